"""Which tensors an operator writes on, for what watches operators run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from gradkit._compat.autograd import operator_schema


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes on, called so: in place, `out=`, and in lists."""
    tensors: list[Tensor] = []
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        values = value if isinstance(value, tuple | list) else (value,)
        tensors += [each for each in values if isinstance(each, Tensor)]
    return tensors


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the position and name of each argument that an operator writes to."""
    schema = operator_schema(func)
    if schema is None:  # of a higher-order operator, such as torch.cond: torch lets none write
        return []
    if func.overloadpacket.__name__ in _MISSING_FROM_SCHEMA:
        return _MISSING_FROM_SCHEMA[func.overloadpacket.__name__]
    return [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


# Their schemas do not say that the running statistics are written to.
_STATISTICS = [(3, "running_mean"), (4, "running_var")]
_MISSING_FROM_SCHEMA: dict[str, list[tuple[int, str]]] = {
    "native_batch_norm": _STATISTICS,
    "cudnn_batch_norm": _STATISTICS,
    "miopen_batch_norm": _STATISTICS,
}
