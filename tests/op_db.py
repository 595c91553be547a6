"""torch's table of operations, with samples of each.

Whenever samples are made, torch looks through the stack for a unittest, whose name would be their
seed, and for the source of each frame. Under pytest there is none, and the search takes 70 ms.
"""

from __future__ import annotations

from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core

__all__ = ["op_db"]

for _module in (common_utils, core):
    vars(_module)["extract_test_fn"] = lambda: None
