"""What the backward of a Function does beside returning gradients: it writes `.grad`, or state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

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
    name_of_function,
    register_own_hooks,
    remove_hooks,
)
from gradkit._state.grad_attribute import accumulate_all, grads_put_back, has_grad, set_grad
from gradkit._state.module_state import alone
from gradkit.errors import UnsupportedGraphError, describe, message


class WrittenGrads:
    """The `.grad` that a pass leaves, from a clean start, where Functions may call backward()."""

    def __init__(
        self,
        functions: Sequence[FunctionLeaves],
        variables: Sequence[Tensor],
        made: Sequence[Tensor] = (),
    ) -> None:
        self.own_pass: list[int] = []  # the number of the pass, once it has begun
        self.summed: list[Tensor] = []  # the variables that are added to as they arrive
        self._functions, self._variables = functions, variables
        self._made = made  # tensors of the call's own, which have no `.grad` yet
        self._versions: dict[int, int] = {}  # of zeros

    @contextmanager
    def from_clean_start(self, *, add: bool) -> Iterator[None]:
        """Put every `.grad` back after the block; with `add`, passes add to it as Functions may."""
        returned: dict[int, Tensor] = {}
        hidden: dict[int, Tensor] = {}
        for one in self._functions:
            returned |= one.returned
            hidden |= one.hidden
        self._leaves = {id(v): v for v in self._variables if v.is_leaf} | returned | hidden
        # Leaves with a `.grad` keep one, of zeros: a Function may write to that memory.
        filled = {k: leaf for k, leaf in returned.items() if type(leaf.grad) in PLAIN_TYPES}
        # Passes add to these as `.backward()` does, in whose order the sums have its bits.
        self.summed = [v for v in self._variables if add and id(v) in hidden]
        with undo_stack() as stack:
            if current_pass() == -1:  # a pass inside another may run in a thread of the engine
                # Threads share parameters, and so the `.grad` from which each pass starts. With a
                # lock of its own, one could wait for a thread that waits for its modules.
                stack.enter_context(alone())
            for hooks in filter(None, map(post_accumulate_hooks, self._leaves.values())):
                stack.enter_context(_without(hooks))
            others = [leaf for key, leaf in self._leaves.items() if key not in filled]
            stack.enter_context(grads_put_back(others))
            for leaf in filled.values():
                stack.enter_context(self._zeroed(leaf))
            arrive = [partial(self._arrive, leaf) for leaf in self.summed]
            stack.enter_context(copied_on_arrival(self.summed, arrive))
            yield

    @contextmanager
    def _zeroed(self, leaf: Tensor) -> Iterator[None]:
        grad: Any = leaf.grad
        before = grad.detach().clone()
        value = undone(lambda: grad.detach().copy_(before))
        with undone(partial(set_grad, leaf, grad)), value, INSIDE:
            self._versions[id(leaf)] = grad.detach().zero_()._version
            yield

    def _arrive(self, leaf: Tensor, grad: Tensor | None) -> None:
        if grad is not None and current_pass() in self.own_pass:  # and not inside a Function
            accumulate_all([(leaf, grad)])

    def _is_written(self, leaf: Tensor) -> bool:
        grad, version = leaf.grad, self._versions.get(id(leaf))
        if grad is None or version is None:
            return grad is not None
        # A kernel that autograd does not know leaves the version as it is.
        return grad._version != version or (not grad.is_meta and bool(grad.any()))

    def added_to(self, grads: Grads) -> Grads:
        """Return the gradients of a pass, with what it has left in `.grad`."""
        result = list(grads)
        for index, (variable, grad) in enumerate(zip(self._variables, grads, strict=True)):
            if id(variable) in self._leaves and self._is_written(variable):
                if grad is not None and not any(variable is one for one in self.summed):
                    accumulate_all([(variable, grad)])
                total = variable.grad
                is_kept = total is not None and id(variable) in self._versions
                result[index] = total.clone() if is_kept and total is not None else total
        return result

    def refuse(self, where: Callable[[], str]) -> None:
        """Raise if a variable was written, or any leaf if there are none."""
        leaves = [x for x in self._variables or self._leaves.values() if id(x) in self._leaves]
        for leaf in [*filter(self._is_written, leaves), *filter(has_grad, self._made)][:1]:
            expected = "Functions whose backward returns their gradients"
            got = ", ".join(sorted({name_of_function(type(one.node)) for one in self._functions}))
            got += f", which has written the .grad of {describe(leaf)}, as "
            got += "torch.autograd.backward does, where this call cannot take it from"
            fix = "return torch.autograd.grad(...) there; or call gradkit.value_and_grads, or "
            fix += "gradkit.per_loss_grads, without create_graph"
            raise UnsupportedGraphError(message(where(), expected, got, fix))


Written: TypeAlias = WrittenGrads | None  # None where no Function may write


@contextmanager
def _without(hooks: dict[object, Any]) -> Iterator[None]:
    """Empty a table of hooks in the block."""
    before = dict(hooks)
    with undone(partial(hooks.update, before)):
        hooks.clear()
        yield


@contextmanager
def side_effects_put_back(
    functions: Sequence[FunctionLeaves],
    variables: Sequence[Tensor],
    where: Callable[[], str],
    *,
    retain: bool,
    add: bool = False,
    made: Sequence[Tensor] = (),
) -> Iterator[WrittenGrads]:
    """Put back, after a pass, what Functions write beside returning gradients."""
    handles: list[Any] = []
    written = WrittenGrads(functions, variables, made)
    with undone(partial(remove_hooks, handles)), written.from_clean_start(add=add):
        for one in functions:
            state = _KeptState(one, where, retain=retain)
            before = partial(one.node.register_prehook, state.before)
            handles += register_own_hooks(before, partial(one.node.register_hook, state.after))
        yield written


class _KeptState:
    """Hooks of a Function's node, whose backward may write on what it keeps."""

    # A fused loss makes its gradient in the forward pass, scales it in place by the cotangent, and
    # returns it: right in one pass, and wrong in every later one.

    def __init__(self, one: FunctionLeaves, where: Callable[[], str], *, retain: bool) -> None:
        self._node, self._constants = one.node, one.constants
        self._where, self._retain = where, retain
        # Each tensor by the number of its pass, its version, and a copy if it may be a gradient.
        # What others may refer to, too, is none of the Function's state unless it is handed out.
        self._kept: dict[int, list[tuple[Tensor, int | None, Tensor | None]]] = {}

    def before(self, _: Cotangents) -> None:
        """Raise if what the node keeps is spent; copy what may be a gradient."""
        if _SPENT in metadata(self._node):
            expected = "a Function that gives the same gradients in every pass"
            got = f"{name_of_function(type(self._node))}, which has scaled in place what it keeps"
            fix = "run the forward pass again for each; or return a new tensor in its backward: "
            fix += "ctx.kept * grad, and not ctx.kept.mul_(grad)"
            raise UnsupportedGraphError(
                message(self._where(), expected, f"{got}, in an earlier pass", fix)
            )
        edges = self._node.next_functions
        shapes = {output_shape(child, number) for child, number in edges if child is not None}
        # Aliases: `kept_tensors` counts who else refers to the tensors themselves.
        own = [one.detach() for one in kept_tensors(self._node) if not one.is_inference()]
        versions = {memory_address(one): one._version for one in own}
        own += [one for one in self._constants if memory_address(one) not in versions]
        self._kept[current_pass()] = [
            (
                one,
                versions.get(memory_address(one)),
                one.clone() if self._retain and one.shape in shapes else None,
            )
            for one in own
        ]

    def after(self, grads: Cotangents, _: Cotangents) -> Cotangents | None:
        """Put back what was written on, and hand out copies of it; or note that it is spent."""
        present = {memory_address(grad) for grad in grads if grad is not None}
        restored: dict[int, tuple[Tensor, Tensor]] = {}
        for one, version, copy in self._kept.pop(current_pass(), ()):
            if memory_address(one) in present or version not in (None, one._version):
                if copy is None:
                    metadata(self._node)[_SPENT] = True
                else:
                    restored[memory_address(one)] = one, copy
        result = [
            grad.clone() if grad is not None and memory_address(grad) in restored else grad
            for grad in (grads if restored else ())
        ]
        for one, copy in restored.values():
            one.data.copy_(copy)  # not counted: a pass would take a saved tensor for changed
        return tuple(result) if restored else None


_SPENT = "gradkit: a Function's backward has written on what it keeps"
