"""The former names of `Arguments`, for rooms that still import them from here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradkit._core.pytree import Structure
from gradkit.func._arguments import ArgNums, Arguments, read_arguments

__all__ = ["ArgNums", "Variables", "read_variables"]


class Variables(Arguments):
    """Arguments with the former names of their attributes."""

    @property
    def leaves(self) -> list[Any]:
        return self.params.leaves

    @property
    def spec(self) -> Structure:
        return self.params.spec

    @property
    def tensors(self) -> list[Tensor]:
        return self.params.variables

    @property
    def slots(self) -> Sequence[int | None]:
        return self.params.slots

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        return self.with_variables(tensors)

    def placed(self, tensors: Sequence[Any]) -> list[Any]:
        return self.params.with_variables(tensors)


def read_variables(args: tuple[Any, ...], argnums: ArgNums, root: str | None = None) -> Variables:
    """Return `read_arguments` under its former name."""
    return Variables(**vars(read_arguments(args, argnums, root)))
