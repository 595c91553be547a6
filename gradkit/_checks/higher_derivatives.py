"""Passes through nodes whose derivative, or second derivative, torch gets wrong, drops or lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradkit._checks.checked import is_checked
from gradkit._compat import transforms
from gradkit._compat.autograd import (
    current_pass,
    forward_class,
    run_around_backward,
    sequence_number,
)
from gradkit._compat.distributed import is_dtensor
from gradkit._compat.dynamo import COMPILED, leave_uncompiled
from gradkit._compat.nodes import (
    DRAW_AFTER_SAVING,
    IN_EVAL_MODE,
    SCRIPTED,
    hooked_tensors,
    is_scripted,
    kind_of_node,
    saved,
)
from gradkit._compat.undoing import INSIDE, undone
from gradkit._compat.versions import is_mended
from gradkit._core import pytree
from gradkit._core.call import Call
from gradkit._core.graph import Subgraph, leaf_tensors, metadata, nodes_below, nodes_from
from gradkit._core.kept_inputs import keeps_inputs_alone
from gradkit._core.known_results import attach
from gradkit._core.user_code import (
    Cotangents,
    is_floating,
    is_lost_view,
    kept_tensors,
    labels_of,
    name_of_function,
    register_own_hooks,
    remove_hooks,
    user_functions,
)
from gradkit._torch_bugs import missing
from gradkit._torch_bugs.node_formulas import NODE_FORMULAS, has_formula
from gradkit._torch_bugs.table import READERS, SECOND, WRONG_ORDER
from gradkit.errors import UnsupportedGraphError, message

# The nodes whose derivative is wrong at some values of what they have saved.
KINDS = frozenset(READERS)
# The names of types: a part of what `kind_of_node` has. Some have a formula.
# The derivative of torch.compile's backward pass is a node that raises. It has no path to what the
# function was computed from where that is not saved, and is left out then.
# What draws after it has saved is looked at, too, which hooks of saved tensors may have spoiled.
_REFUSED = {kind.removesuffix(IN_EVAL_MODE) for kind in WRONG_ORDER} | missing.WITHOUT_SECOND.keys()
_REFUSED |= {
    COMPILED,
    SCRIPTED,
    *NODE_FORMULAS,
    *(kind.__name__ for kind in KINDS | DRAW_AFTER_SAVING),
}
_DTENSORS_ARE_WRONG = not is_mended("DTensor")


def refuse_in_call(call: Call) -> None:
    """Raise if a pass of a call goes through a node that is wrong for what it has saved."""
    if not call.whole.kinds & KINDS:
        return
    for group, params in call.passes:
        for index in group:
            nodes = call.graph.below([index]).leading_to(params.variables)
            _refuse_values(partial(call.losses.path, index), nodes, create_graph=False)


def _refuse_values(
    where: Callable[[], str], nodes: Collection[Node], *, create_graph: bool
) -> None:
    """Raise if torch gets the derivative of a node wrong for the values that it has saved."""
    # torch decomposes matrices below a dispatch mode, such as that of `checked`.
    decomposes = transforms.count_dispatch_modes() > 0 or is_checked()
    for node in nodes:
        if type(node) not in KINDS or hooked_tensors(node):  # hooks may recompute much
            continue
        try:
            got = READERS[type(node)](node, create_graph, decomposes)
        except RuntimeError:  # freed, or changed in place, which torch says itself; or batched
            continue
        if got is not None:
            expected = "an operation whose derivative torch gets right here"
            fix = "compute it in a function that gradkit.func differentiates, or in a `with "
            fix += "gradkit.checked():`"
            if create_graph and any(map(_is_norm_of_zero, nodes)):
                got += "; and a norm of zero, whose second derivative is nan"
                fix += ", at a point beside this one, at which the norm is not zero: v + 1e-9"
            raise UnsupportedGraphError(message(where(), expected, got, fix))


def _is_norm_of_zero(node: Node) -> bool:
    if type(node).__name__ not in {"LinalgVectorNormBackward0", "NormBackward0", "NormBackward1"}:
        return False
    return bool((saved(node, "result").detach() == 0).any())


def refuse_wrong_derivatives(call: Call) -> None:
    """Raise if torch would get the derivative of a pass of the call wrong, or drop it."""
    kinds = call.whole.kinds
    if not (_DTENSORS_ARE_WRONG or call.functions.users or may_be_wrong(kinds)):
        return
    for group, params in call.passes:
        for index, variable in enumerate(params.variables if _DTENSORS_ARE_WRONG else ()):
            if is_dtensor(variable):
                got = "a DTensor, whose second derivative torch "
                got += f"{torch.__version__} gets silently wrong"
                fix = "leave out create_graph=True; or install torch 2.12 or newer"
                where = params.path(index)
                raise UnsupportedGraphError(message(where, "a tensor of this process", got, fix))
        for index in group:
            below = call.graph.below([index])
            refuse_wrong_derivative(partial(call.losses.path, index), params.variables, below)


def may_be_wrong(kinds: Iterable[type]) -> bool:
    """Return whether the derivative of a pass through torch's nodes of these types may be."""
    return not _REFUSED.isdisjoint([kind.__name__ for kind in kinds])


def refuse_wrong_derivative(
    where: Callable[[], str], variables: Sequence[Tensor], below: Subgraph, *, linear: bool = False
) -> None:
    """Raise if a pass executes a node whose derivative torch gets wrong, drops, or lacks."""
    # `linear` passes take the derivative by the cotangents alone.
    once = set(filter(_is_once_differentiable, user_functions(below.kinds)))
    if not once and not may_be_wrong(below.kinds):
        return
    leading = below.leading_to(variables)
    _refuse_values(where, leading, create_graph=True)
    # The engine differentiates such a node right; in a transform, its gradient is a constant.
    in_transform = any(map(transforms.is_transform_tensor, below.roots))
    if in_transform and any(map(is_scripted, leading)):
        raise UnsupportedGraphError(message(where(), *_SCRIPTED))
    nodes = {
        kind_of_node(node): type(node)
        for node in leading
        if not has_formula(node)  # a formula differentiates the pass
    }
    for name, kind in sorted(nodes.items()):
        if kind in once:
            raise UnsupportedGraphError(undifferentiable_message(where(), kind))
        reason = None if linear and WRONG_ORDER.get(name) == "3" else _reason(name)
        if reason is not None and not (name == COMPILED and user_functions([kind])):
            raise UnsupportedGraphError(message(where(), *reason))


def _reason(name: str) -> missing.Reason | None:
    """Return what is wrong with the derivative through a kind of node, and what to do."""
    if name == COMPILED:
        fix = "leave out create_graph=True; call the module that is not compiled; or compile the "
        fix += "function that takes all derivatives"
        got = "a graph that torch.compile has compiled, whose derivative cannot be"
        return missing.DIFFERENTIABLE, got, fix
    if name in missing.WITHOUT_SECOND:
        return missing.without_second(*missing.WITHOUT_SECOND[name])
    order = WRONG_ORDER.get(name)
    if order == "2":
        operation, fix, *_ = SECOND.get(name, (name, "write it out in other operations"))
        got = f"{operation}, whose second derivative torch gets silently wrong"
        return missing.no_second(got, fix)
    if order is None:
        return None
    got = f"a second derivative through {name.removesuffix('BackwardBackward0')}, whose third torch"
    fix = "leave out create_graph=True, or an unroll inside of another, in the last call; or use "
    fix += "group_norm or rms_norm, or write the norm out"
    return f"{missing.DIFFERENTIABLE} again", f"{got} gets silently wrong", fix


_SCRIPTED = (
    missing.DIFFERENTIABLE,
    "one of torch.jit.script or torch.jit.trace, compiled by an earlier call outside of "
    "gradkit.func: torch.func takes its gradient for a constant",
    "the eager calls, gradkit.value_and_grads(losses, params, create_graph=True); the function "
    "that is not scripted; or PYTORCH_JIT=0 in the environment, where a library scripts it",
)


def _is_once_differentiable(kind: Any) -> bool:
    """Return whether the decorator shows; where it is hidden, the pass itself finds out."""
    function = forward_class(kind)
    backward: Any = function.backward
    if not issubclass(function, Function):  # torch.func's own, around the user's
        closure = [cell.cell_contents for cell in getattr(backward, "__closure__", None) or ()]
        backward = next((getattr(fn, "backward", None) for fn in closure), None)
    return getattr(backward, "__code__", None) is _WRAPPER_CODE


# The wrapper that once_differentiable makes has the same code for all.
_WRAPPER_CODE = once_differentiable(lambda ctx: None).__code__


def undifferentiable_message(where: str, kind: type) -> str:
    """Return the message for a Function whose gradients cannot be differentiated."""
    got = f"{name_of_function(kind)}, a Function whose backward cannot be: it is "
    got += "once_differentiable, or cuts the path to its gradients (no_grad, detach(), .data, "
    got += "NumPy, a kernel that autograd does not know)"
    fix = "leave out create_graph=True; take unroll(..., first_order=True)"
    if not forward_class(kind).__module__.startswith("torch."):
        fix += "; or give it a backward made of operations that can be differentiated, that "
        fix += "returns None where there is none"
    return message(where, missing.DIFFERENTIABLE, got, fix)


@contextmanager
def refuse_undifferentiable(
    where: Callable[[], str], below: Subgraph, variables: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Raise from a pass with a graph if a Function's gradients have no path to its cotangent."""
    # Such a gradient, or derivative of one, would be taken for a constant, and what remains of the
    # derivative would be returned. It is what once_differentiable, no_grad, detach() and a kernel
    # that autograd does not know do, in whatever they are wrapped.
    kinds = set(user_functions(below.kinds))
    handles: list[RemovableHandle] = []
    with undone(partial(remove_hooks, handles)):
        for node in below.nodes if kinds else ():
            if type(node) in kinds:
                probe = _Probe(where, node, below, variables)
                handles += register_own_hooks(
                    partial(node.register_prehook, probe.before),
                    partial(node.register_hook, probe.after),
                )
        yield


# The node that made a cotangent of a Function, and the leaf below it if that is no one's.
_Copy: TypeAlias = tuple[Node, Tensor | None]


class _Probe:
    """Hooks of a Function's node: it gets cotangents that only its own gradients can lead to."""

    def __init__(
        self, where: Callable[[], str], node: Node, graph: Subgraph, variables: Sequence[Tensor]
    ) -> None:
        self._where, self._node, self._graph, self._variables = where, node, graph, variables
        if _MODES not in metadata(node):
            modes: dict[int, _KeptConstants] = {}
            metadata(node)[_MODES] = modes
            run_around_backward(node, partial(_run_below_mode, modes))
        self._copies: dict[int, list[_Copy]] = {}  # by the number of the pass
        self._inputs: list[Tensor] | None = None  # the inputs of the Function
        self._may_be_inputs = False  # whether all that it keeps may be inputs
        self._keeps_results = False
        self._written: set[int] = set()  # the passes in which it wrote on what it keeps

    def before(self, cotangents: Cotangents) -> Cotangents | None:
        """Return copies of the cotangents, each with a node that made it."""
        if not torch.is_grad_enabled():  # a pass in another thread
            return None
        copies = self._copies[current_pass()] = []
        kept = kept_tensors(self._node)
        # A kept tensor in a transform is the level's own, as an input without a graph is. In eager
        # code an input that nothing else refers to is told from a result by the source alone.
        # gradkit's own Functions, which run the user's code again, keep their inputs alone.
        is_own = forward_class(self._node).__module__.startswith("gradkit.")
        inputs, is_lost = 0, any(map(is_lost_view, kept)) and not is_own
        if kept and not is_lost and keeps_inputs_alone(self._node):
            inputs = len(kept)
        elif not is_lost and (is_own or transforms.transforms()):
            inputs = sum(child is None for child, _ in self._node.next_functions)
            inputs -= labels_of(self._node)
        self._may_be_inputs = bool(kept) and len(kept) <= inputs
        self._keeps_results = len(kept) > inputs
        if self._keeps_results:
            modes = cast("dict[int, _KeptConstants]", metadata(self._node)[_MODES])
            note = partial(self._written.add, current_pass())
            modes[current_pass()] = _KeptConstants(kept, self._attach, note)
        return tuple(_with_own_node(cotangent, copies) for cotangent in cotangents)

    def _attach(self, kept: Tensor) -> Tensor:
        """Return a copy of what the Function keeps, whose derivative by its inputs raises."""
        got = f"{name_of_function(type(self._node))}, whose backward computes with what its "
        got += "forward pass has made and kept: the derivative of that by its inputs is missing"
        fix = "compute it anew in backward, from inputs kept by ctx.save_for_backward(x); or "
        fix += (
            "return it as an output of the Function, too; if it is an input, keep it as it came, "
        )
        fix += "or give it a name: mask = x > 0, then F.apply(x, mask)"
        reason = message(self._where(), f"{missing.DIFFERENTIABLE} again", got, fix)
        if transforms.differentiated():
            raise UnsupportedGraphError(reason)
        if self._inputs is None:
            nodes = nodes_from(self._node) & set(self._graph.nodes)  # the graph ends at variables
            inner = [x for x in self._variables if x.grad_fn in nodes]
            self._inputs = [*leaf_tensors(nodes).values(), *inner]
        return attach(kept, self._inputs, reason)

    def after(self, grads: Cotangents, _: Cotangents) -> Cotangents | None:
        """Raise if no gradient leads to a cotangent; detach those that lead to nothing else."""
        copies = self._copies.pop(current_pass(), [])
        if not copies:
            return None
        oldest = min(sequence_number(node) for node, _ in copies)
        present = [transforms.unbatched(grad) for grad in grads if grad is not None]
        own = {node for node, _ in copies}
        # Numbers of nodes compare within a thread: one of backward's own starts at zero. There, the
        # mode does not see what is computed with kept tensors.
        numbers = (oldest,) if self._keeps_results else (oldest, 0)
        if all(own.isdisjoint(self._new_nodes(present, number)) for number in numbers):
            # A transform around may have recorded one: then it is not lost.
            around = ([*transforms.layers(grad)][1:] for grad in present)
            if any(not any(layer.requires_grad for layer in outer) for outer in around):
                raise UnsupportedGraphError(
                    undifferentiable_message(self._where(), type(self._node))
                )
            return None
        leaves = [leaf for _, leaf in copies if leaf is not None]
        transforms.set_requires_grad(leaves, False)  # no later pass accumulates there
        if current_pass() in self._written:  # the gradients may be what it keeps itself
            self._written.discard(current_pass())
            return tuple(
                None if grad is None else grad - self._attach(torch.zeros_like(grad))
                for grad in grads
            )
        if not leaves:
            return None
        return tuple(
            self._constant(grad) if grad is not None and self._is_constant(grad, oldest) else grad
            for grad in grads
        )

    def _constant(self, grad: Tensor) -> Tensor:
        """Return a gradient that does not depend on the inputs, but perhaps on what is kept."""
        is_doubtful = self._may_be_inputs and not transforms.differentiated()
        return self._attach(grad.detach()) if is_doubtful else grad.detach()

    def _new_nodes(self, grads: list[Tensor], oldest: int) -> set[Node]:
        """Return the nodes of gradients that are as new as the cotangents'."""
        roots = [grad for grad in grads if grad.requires_grad]
        if self._keeps_results:
            roots = [x for x in roots if x.grad_fn is None or sequence_number(x.grad_fn) >= oldest]
        return nodes_below(roots, self._graph.nodes, oldest)

    def _is_constant(self, grad: Tensor, oldest: int) -> bool:
        """Return whether a gradient leads to nothing but leaves that are no one's."""
        new = self._new_nodes([grad], oldest)
        ends = {node for one in new for node, _ in one.next_functions if node is not None}
        leads_on = any(leaf.requires_grad for leaf in leaf_tensors(new).values())
        return grad.requires_grad and ends <= new and not leads_on


_MODES = "gradkit: what watches the backward in each pass"


def _run_below_mode(
    modes: dict[int, _KeptConstants], run: Callable[..., Any], *cotangents: Tensor | None
) -> Any:
    with modes.pop(current_pass(), INSIDE):
        return run(*cotangents)


class _KeptConstants(TorchFunctionMode):
    """Gives what a Function has computed in its forward pass, and kept, a graph to its inputs."""

    # Torch runs the forward pass under no_grad, and takes what is kept of it for constants.

    def __init__(
        self,
        kept: Sequence[Tensor],
        attach: Callable[[Tensor], Tensor],
        note_write: Callable[[], None],
    ) -> None:
        super().__init__()
        self._kept = {id(one): one for one in kept}
        self._attach, self._note_write = attach, note_write

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; what is made of kept tensors alone counts as one of them."""
        leaves, spec = pytree.flatten((list(args), dict(kwargs or {})))
        here = [id(x) in self._kept and (not x.requires_grad or is_lost_view(x)) for x in leaves]
        recorded = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        name = func.__name__
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        is_mixed = recorded and any(here) and torch.is_grad_enabled()
        if is_mixed and writes and here[0]:
            self._note_write()
        elif is_mixed:
            each = [self._attach(x) if kept else x for x, kept in zip(leaves, here, strict=True)]
            args, kwargs = pytree.unflatten(spec, each)
        result = func(*args, **(kwargs or {}))
        if any(here) and not recorded and not name.startswith("new_") and "_like" not in name:
            self._kept |= {id(x): x for x in pytree.tensors(result) if is_floating(x)}
        return result


def _with_own_node(cotangent: Tensor | None, copies: list[_Copy]) -> Tensor | None:
    if cotangent is None or not is_floating(cotangent):
        return cotangent
    copy = transforms.clone_with_node(cotangent)
    node = transforms.unbatched(copy).grad_fn
    if node is not None:
        leaf = None
        if not transforms.is_transform_tensor(cotangent) and not cotangent.requires_grad:
            (leaf,) = leaf_tensors(child for child, _ in node.next_functions if child).values()
        copies.append((node, leaf))
    return copy


def refuse_inside_transforms(call: Call) -> None:
    """Raise if a transform of torch.func would take the gradients of a call for constants."""
    for index, output in enumerate(call.outputs):
        if transforms.is_differentiated_tensor(output):
            expected = "a loss outside of torch.func's grad, vjp and jvp"
            got = "one inside: the transform would take the gradient for a constant"
            fix = "pass create_graph=True, so that it is differentiated, too"
            raise UnsupportedGraphError(message(call.losses.path(index), expected, got, fix))
