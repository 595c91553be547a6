"""A call, read and flattened: the passes that it asks for, and the graph that they go through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._core.graph import GraphView
from gradkit._core.losses import Losses
from gradkit._core.params import Params
from gradkit._core.pass_observers import any_observers, observed_tensors
from gradkit._core.tensor_nodes import is_leaf_node
from gradkit._core.user_code import FunctionsAlive, functions_alive

Grads: TypeAlias = list[Tensor | None]


class Pass(NamedTuple):
    """One engine pass."""

    losses: Sequence[int]  # the indices of those that it starts from
    params: Params  # what it differentiates with respect to


@dataclass(slots=True)
class Call:
    """What a public call is to compute."""

    losses: Losses  # as given
    outputs: Sequence[Tensor]  # for each loss: it, or it times a weight that requires grad
    passes: Sequence[Pass]  # in order
    unused: str = "none"  # or "zeros", or "error"
    create_graph: bool = False
    params: list[Params] = field(init=False)  # those of the passes, each once
    no_subclasses: bool = field(init=False)  # no variable is of a subclass of torch's tensors
    only_leaves: bool = field(init=False)  # no variable is an intermediate value
    # Which nodes of Python Functions the graph could hold.
    functions: FunctionsAlive = field(default_factory=functions_alive)
    _graph: GraphView | None = None

    def __post_init__(self) -> None:
        self.no_subclasses = self.only_leaves = True
        self.params = list({id(one.params): one.params for one in self.passes}.values())
        for params in self.params:
            self.no_subclasses &= params.no_subclasses
            self.only_leaves &= params.only_leaves

    @property
    def graph(self) -> GraphView:
        """The graph of the losses, as far as passes for the variables go; one view a call."""
        if self._graph is None:
            self._graph = GraphView(self.outputs, self._ends())
        return self._graph

    def _ends(self) -> frozenset[Node]:
        """Return the nodes at which the passes end; none if one of them ends at a leaf."""
        if self.only_leaves:
            return frozenset()
        nodes = {variable.grad_fn for _, _, variable in self.variables()}
        if any_observers():
            nodes.update(edge.node for _, edge in observed_tensors())
        inner = frozenset(node for node in nodes if node is not None and not is_leaf_node(node))
        return inner if len(inner) == len(nodes) else frozenset()

    @property
    def differentiated(self) -> list[int]:
        """The indices of the losses that some pass starts from."""
        return [index for one in self.passes for index in one.losses]

    @property
    def plain_leaves(self) -> bool:
        """Whether all variables are plain leaf tensors: no intermediate values, no subclasses."""
        return self.no_subclasses and self.only_leaves

    def variables(self) -> Iterator[tuple[Params, int, Tensor]]:
        """Yield every variable of every pass, with its params and its index there."""
        for params in self.params:
            for index, variable in enumerate(params.variables):
                yield params, index, variable
