"""What the backward of a Function does beside returning gradients: it writes `.grad`, or state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradkit._autograd.arrival_copies import copied_on_arrival, memory_address
from gradkit._compat.autograd import current_pass, post_accumulate_hooks
from gradkit._compat.nodes import output_shape
from gradkit._compat.undoing import INSIDE, undo_stack, undone
from gradkit._core.call import Grads
from gradkit._core.graph import metadata
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.user_code import (
    Cotangents,
    FunctionLeaves,
    kept_tensors,
    register_own_hooks,
    remove_hooks,
)
from gradkit._state.grad_attribute import accumulate_all, grads_put_back, set_grad
from gradkit.errors import UnsupportedGraphError, describe, message


class WrittenGrads:
    """The `.grad` that a pass leaves, from a clean start, where Functions may call backward()."""

    def __init__(self, functions: Sequence[FunctionLeaves], variables: Sequence[Tensor]) -> None:
        self.own_pass: list[int] = []  # the number of the pass, once it has begun
        self.summed: list[Tensor] = []  # the variables that are added to as they arrive
        self._variables = variables
        self._names = ", ".join(sorted({_name(one.node) for one in functions}))
        self._leaves = {id(v): v for v in variables if v.grad_fn is None}
        self._hidden: dict[int, Tensor] = {}
        # Those that a Function returns the gradient of keep a `.grad` of zeros: it may have kept
        # that memory in its forward pass, to write there.
        self._filled: dict[int, Tensor] = {}
        for one in functions:
            self._hidden |= one.hidden
            self._leaves |= one.returned
            filled = (leaf for leaf in one.returned.values() if type(leaf.grad) in PLAIN_TYPES)
            self._filled |= {id(leaf): leaf for leaf in filled}
        self._leaves |= self._hidden
        self._versions: dict[int, int] = {}  # of zeros

    @contextmanager
    def from_clean_start(self, *, add: bool) -> Iterator[None]:
        """Put every `.grad` back after the block; add to it what arrives, if Functions may, too."""
        # As by `.backward()`, in whose order sums have its bits.
        self.summed = [v for v in self._variables if add and id(v) in self._hidden]
        others = [leaf for key, leaf in self._leaves.items() if key not in self._filled]
        with undo_stack() as stack:
            for leaf in self._leaves.values():
                stack.enter_context(_without(post_accumulate_hooks(leaf) or {}))
            stack.enter_context(grads_put_back(others))
            for leaf in self._filled.values():
                stack.enter_context(self._zeroed(leaf))
            arrive = [partial(self._arrive, leaf) for leaf in self.summed]
            stack.enter_context(copied_on_arrival(self.summed, arrive))
            yield

    @contextmanager
    def _zeroed(self, leaf: Tensor) -> Iterator[None]:
        grad: Any = leaf.grad
        before = grad.detach().clone()

        def put_back() -> None:
            set_grad(leaf, grad)
            grad.detach().copy_(before)

        with undone(put_back):
            self._versions[id(leaf)] = grad.detach().zero_()._version
            yield

    def _arrive(self, leaf: Tensor, grad: Tensor | None) -> None:
        if grad is not None and current_pass() in self.own_pass:  # and not inside a Function
            accumulate_all([(leaf, grad)])

    def written(self) -> list[Tensor]:
        """Return the leaves whose `.grad` something has written since the clean start."""
        return [leaf for leaf in self._leaves.values() if self._is_written(leaf)]

    def _is_written(self, leaf: Tensor) -> bool:
        grad, version = leaf.grad, self._versions.get(id(leaf))
        if grad is None or version is None:
            return grad is not None
        # A kernel that autograd does not know leaves the version as it is.
        return grad._version != version or (not grad.is_meta and bool(grad.any()))

    def added_to(self, grads: Grads, variables: Sequence[Tensor]) -> Grads:
        """Return the gradients of a pass, with what it has left in `.grad`."""
        written = set(map(id, self.written()))
        result = list(grads)
        for index, (variable, grad) in enumerate(zip(variables, grads, strict=True)):
            if id(variable) in written:
                if grad is not None and not any(variable is one for one in self.summed):
                    accumulate_all([(variable, grad)])
                is_kept = id(variable) in self._filled
                result[index] = variable.grad.clone() if is_kept else variable.grad
        return result

    def refuse(self, where: Callable[[], str], variables: Sequence[Tensor] | None = None) -> None:
        """Raise if one of these leaves, or of all, was written, and its gradient is incomplete."""
        asked = None if variables is None else set(map(id, variables))
        for leaf in self.written():
            if asked is None or id(leaf) in asked:
                expected = "Functions whose backward returns their gradients"
                got = f"{self._names}, which has written the .grad of {describe(leaf)}, as "
                got += "torch.autograd.backward does, where this call cannot take it from"
                fix = "return torch.autograd.grad(...) there; or call gradkit.value_and_grads, or "
                fix += "gradkit.per_loss_grads, without create_graph"
                raise UnsupportedGraphError(message(where(), expected, got, fix))


def _name(node: Node) -> str:
    return type(node).__name__.removesuffix("Backward").removesuffix("Generated")


@contextmanager
def _without(hooks: dict[object, Any]) -> Iterator[None]:
    """Empty a table of hooks in the block."""
    before = dict(hooks)

    def put_back() -> None:
        hooks.update(before)

    with undone(put_back):
        hooks.clear()
        yield


@contextmanager
def kept_put_back(nodes: Sequence[Node], where: Callable[[], str], *, retain: bool) -> Iterator[None]:
    """Let the backward of Functions write on what they keep, if it is to run again; else once."""
    # A fused loss makes its gradient in the forward pass, scales it in place by the cotangent, and
    # returns it: right in one pass, and wrong in every later one.
    handles: list[Any] = []
    with undone(partial(remove_hooks, handles)):
        for node in nodes:
            state = _KeptState(node, where, retain=retain)
            handles += register_own_hooks(
                partial(node.register_prehook, state.before),
                partial(node.register_hook, state.after),
            )
        yield


class _KeptState:
    """Hooks of a Function's node, around its backward."""

    def __init__(self, node: Node, where: Callable[[], str], *, retain: bool) -> None:
        self._node, self._where, self._retain = node, where, retain
        # By the number of a pass: each tensor, its version, and a copy if it may be a gradient.
        self._kept: dict[int, list[tuple[Tensor, int, Tensor | None]]] = {}

    def before(self, _: Cotangents) -> None:
        """Raise if what the node keeps is spent; copy what may be a gradient."""
        if _SPENT in metadata(self._node):
            expected = "a Function that gives the same gradients in every pass"
            got = f"{_name(self._node)}, which has scaled in place what it keeps, in an earlier pass"
            fix = "run the forward pass again for each; or return a new tensor in its backward: "
            fix += "ctx.kept * grad, and not ctx.kept.mul_(grad)"
            raise UnsupportedGraphError(message(self._where(), expected, got, fix))
        edges = self._node.next_functions
        shapes = {output_shape(child, number) for child, number in edges if child is not None}
        # Aliases: `kept_tensors` counts who else refers to the tensors themselves.
        kept = [one.detach() for one in kept_tensors(self._node) if not one.is_inference()]
        self._kept[current_pass()] = [
            (one, one._version, one.clone() if self._retain and one.shape in shapes else None)
            for one in kept
        ]

    def after(self, grads: Cotangents, _: Cotangents) -> Cotangents | None:
        """Put back what was written on, and hand out copies of it; or note that it is spent."""
        present = {memory_address(grad) for grad in grads if grad is not None}
        restored: dict[int, tuple[Tensor, Tensor]] = {}
        for one, version, copy in self._kept.pop(current_pass(), ()):
            address = memory_address(one)
            if address not in present and one._version == version:
                continue
            if copy is None:
                metadata(self._node)[_SPENT] = True
            else:
                restored[address] = one, copy
        if not restored:
            return None
        result = [
            grad.clone() if grad is not None and memory_address(grad) in restored else grad
            for grad in grads
        ]
        for one, copy in restored.values():
            one.data.copy_(copy)  # not counted: a pass would take a saved tensor for changed
        return tuple(result)


_SPENT = "gradkit: a Function's backward has written on what it keeps"
