"""A mode that raises where a module would write on its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradkit._compat.transforms import transforms
from gradkit.errors import UnsupportedGraphError, message

_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})


class ReadOnly(TorchFunctionMode):
    """Raises at operations that write on some tensors, also through views, `.data` and detach()."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._ids = set(map(id, self._tensors))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, unless it writes."""
        name = getattr(func, "__name__", "")
        if name.endswith("_") and args and isinstance(args[0], Tensor):
            writes = name in _WRITES or not name.endswith("__")
            if writes and name != "requires_grad_" and self._is_protected(args[0]):
                raise UnsupportedGraphError(
                    message(
                        "module",
                        "a module that reads its parameters",
                        f"one that writes on them in its forward pass, with {name}",
                        "compute a new tensor from the parameter, or write outside of the module",
                    )
                )
        return func(*args, **(kwargs or {}))

    def _is_protected(self, tensor: Tensor) -> bool:
        if id(tensor) in self._ids:
            return True
        if transforms():  # its tensors show no memory
            return False
        memory = {t.untyped_storage()._cdata for t in self._tensors if t.layout == tensor.layout}
        return tensor.untyped_storage()._cdata in memory
