"""A call, read and flattened: the passes that it asks for, and the graph that they go through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from torch import Tensor

from gradkit._core import user_code
from gradkit._core.graph import GraphView
from gradkit._core.losses import Losses
from gradkit._core.params import Params

Grads: TypeAlias = list[Tensor | None]


class Pass(NamedTuple):
    """One engine pass.

    Attributes:
        losses: The indices of the losses that it starts from.
        params: What it differentiates with respect to.
    """

    losses: Sequence[int]
    params: Params


@dataclass(frozen=True)
class Call:
    """What a public call is to compute.

    Attributes:
        losses: The losses, as given.
        outputs: The tensors that are differentiated, one for each loss: the loss, or the loss times
            a weight that requires grad.
        passes: The engine passes, in order.
        unused: The option: "none", "zeros" or "error".
        create_graph: The option.
    """

    losses: Losses
    outputs: Sequence[Tensor]
    passes: Sequence[Pass]
    unused: str = "none"
    create_graph: bool = False

    @cached_property
    def graph(self) -> GraphView:
        """The graph of the losses."""
        return GraphView(self.outputs)

    @cached_property
    def differentiated(self) -> list[int]:
        """The indices of the losses that some pass starts from."""
        return [index for one in self.passes for index in one.losses]

    @cached_property
    def params(self) -> list[Params]:
        """The params of the passes, each once."""
        return list({id(one.params): one.params for one in self.passes}.values())

    @cached_property
    def may_hold_functions(self) -> bool:
        """Whether the graph could hold the node of a Python Function."""
        return user_code.custom_functions_alive()

    @cached_property
    def plain_leaves(self) -> bool:
        """Whether all variables are plain leaf tensors: no intermediate values, no subclasses."""
        return all(params.plain_leaves for params in self.params)

    def variables(self) -> Iterator[tuple[Params, int, Tensor]]:
        """Yield every variable of every pass, with its params and its index there."""
        for params in self.params:
            for index, variable in enumerate(params.variables):
                yield params, index, variable
