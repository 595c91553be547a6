"""What torch gets wrong, and since when not: the list holds for the torch that is installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradkit._compat import versions
from gradkit._torch_bugs.table import EVERY_REFUSAL, NODES, OPERATIONS
from tests.sweep import defects
from tests.sweep.defects import DEFECTS, Defect
from tests.sweep.table import mended_in

BY_NAME = {f"{defect.operation}: {defect.derivative}": defect for defect in DEFECTS}
here = pytest.mark.skipif(versions.is_untested(), reason="a torch that gradkit was not run on")


@here
@pytest.mark.parametrize("name", BY_NAME)
def test_gradkit_raises_where_torch_is_wrong_and_only_there(
    device: torch.device, name: str
) -> None:
    trial = BY_NAME[name].tried(device)
    assert trial.equal, trial


def test_every_operation_that_is_refused_is_tried(device: torch.device) -> None:
    # tests/sweep runs torch's whole table for operations that drop their graph.
    tried = {defect.operation for defect in DEFECTS}
    assert {name for name, row in EVERY_REFUSAL.items() if not row.drops} <= tried
    keys = {defect.key or defect.operation for defect in DEFECTS}
    assert {name for name in OPERATIONS | NODES if mended_in(name)} <= keys


def test_a_defect_that_raises_is_not_silent(device: torch.device) -> None:
    def broken(device: torch.device) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(str(device))

    assert Defect("op", "the gradient", broken).tried(device).outcome == "raises"
    equal = torch.ones(2, device=device)
    assert Defect("op", "the gradient", lambda d: (equal, equal)).tried(device).outcome == "right"
    assert torch.float64 == defects.D
