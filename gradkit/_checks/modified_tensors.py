"""Tensors changed in place: those that the graph has saved, and gradients that arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_not

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from gradkit._checks.checked import STATISTICS, is_checked
from gradkit._checks.circumstances import USER_CODE, around
from gradkit._compat.autograd import forward_line, sequence_number, tensor_hooks
from gradkit._compat.nodes import (
    CHANGED,
    IN_EVAL_MODE,
    WRITTEN_VIEW,
    changed_since_saved,
    kind_of_node,
    names_of_nodes,
    packed_tensors,
)
from gradkit._compat.transforms import data_of, is_of_ended_transform
from gradkit._core import user_code
from gradkit._core.call import Call
from gradkit._core.graph import KEEP_HISTORY, Subgraph, edge, leaf_tensors, nodes_of_types
from gradkit._core.user_code import FunctionLeaves
from gradkit._state.recomputed_tensors import OF_A_GRAPH
from gradkit._torch_bugs.missing import Reason
from gradkit.errors import UnsupportedGraphError, describe, message

_EXPECTED = "saved tensors as they were in the forward pass"
_FIX = (
    "take this loss's gradients before the write, which an optimizer's step is, too; or make a new "
    "tensor: label = torch.zeros_like(label), not label.zero_()"
)
# An optimizer writes on leaves. What is no view of one was written on by the model, or a backward.
_OWN_FIX = (
    "make a new tensor where the forward pass, or the backward of a Function, writes on one: "
    "y = y + x, not y.add_(x); y = torch.cat([y[:1], y[1:] + x]), not y[1:].add_(x)"
)
_ANOMALY = "; under torch.autograd.detect_anomaly() this error names the line that saved it"


def modified_since_saved(nodes: Iterable[Node]) -> Reason | None:
    """Return why a pass through some nodes raises, if a tensor that one saved was changed since."""
    for node in sorted(nodes, key=sequence_number, reverse=True):  # as a pass executes them
        changed = changed_since_saved(node)
        if changed is not None:
            line, (name, error) = forward_line(node), changed
            got = f"`{name}` of {node.name()} changed in place since"
            got += f"{f', saved in {line}' if line else ''}: {without_hint(error)}"
            saved = next((packed.data for key, packed in packed_tensors(node) if key == name), None)
            return _EXPECTED, got, _fix(error, saved) + ("" if line else _ANOMALY)
    return None


def saved_versions(outputs: Iterable[Tensor]) -> list[tuple[Node, Tensor, int]]:
    """Return what the nodes of a graph have saved, and how often each has been written on."""
    # A transform saves wrappers, whose counts are their own: torch itself sees no later write.
    roots = [output for output in outputs if output.grad_fn is not None]
    return [
        (node, data, data._version)
        for node in Subgraph(roots).nodes
        for name, packed in packed_tensors(node)
        if packed.unpack_hook is None and isinstance(packed.data, Tensor)
        if not (data := data_of(packed.data)).is_inference()
        if name not in STATISTICS or kind_of_node(node).endswith(IN_EVAL_MODE)
    ]


def refuse_written_since(saved: Iterable[tuple[Node, Tensor, int]]) -> None:
    """Raise if a tensor that a function's graph has saved was changed in place since."""
    for node, tensor, version in saved:
        if tensor._version != version:
            raise UnsupportedGraphError(_written_since(describe(tensor), node))


def refuse_changed_since_saved(nodes: Iterable[Node], error: RuntimeError) -> None:
    """Raise gradkit's error for that of a tensor which one of a function's nodes has saved."""
    text = str(error)
    if text.startswith(OF_A_GRAPH):  # it has hooks, for the shards of parameters in this process
        raise UnsupportedGraphError(_written_since("a tensor")) from error
    for node in nodes if any(part in text for part in CHANGED) else ():
        if (changed := changed_since_saved(node)) is not None:
            raise UnsupportedGraphError(_written_since(f"`{changed[0]}`", node)) from error


def _written_since(what: str, node: Node | None = None) -> str:
    got = f"{what} that {node.name() if node else 'its graph'} has saved, changed in place since"
    fix = "call it again after the change, or let fn use a copy, tensor.clone()"
    return message("fn", _EXPECTED, got, fix)


def _fix(error: str, saved: Tensor | None = None) -> str:
    if WRITTEN_VIEW in error:
        return KEEP_HISTORY
    source = saved if saved is None or saved._base is None else saved._base
    is_leaf = source is None or (source.is_leaf and source.requires_grad)
    return _FIX if is_leaf or "which is output" not in error else _OWN_FIX


def without_hint(error: str) -> str:
    """Return torch's error that a tensor was changed in place, without what it advises."""
    return error.partition(" Hint")[0].rstrip(".")


def modified_message(error: RuntimeError, call: Call) -> str:
    """Return the message for torch's error that a saved tensor was changed in place."""
    each = ((index, modified_since_saved(nodes)) for index, nodes in nodes_by_loss(call))
    reasons = {index: reason for index, reason in each if reason is not None}
    # A graph inside a backward function shows only in torch's own text.
    got = f"one changed in place since: {without_hint(str(error))}"
    affected = list(reasons) or call.differentiated
    reason = next(iter(reasons.values()), (_EXPECTED, got, _fix(str(error))))
    return message(", ".join(map(call.losses.path, affected[:3])), *reason)


def nodes_by_loss(call: Call) -> Iterator[tuple[int, Collection[Node]]]:
    """Yield each loss that a call differentiates, and the nodes that its pass executes."""
    for group, params in call.passes:
        for index in group:
            below = call.graph.below([index])
            # `.backward()` for all leaves is for no variables in particular.
            yield index, below.leading_to(params.variables) if params.variables else below.nodes


_version = attrgetter("_version")
_is_given = partial(is_not, None)


def variables_to_copy(call: Call, variables: list[Tensor]) -> list[Tensor]:
    """Return those variables of a call whose gradients are copied as they arrive."""
    if is_checked():
        return variables
    if not around(call) & USER_CODE:
        return []
    params = call.params_of(variables)
    if not params.no_subclasses:
        return variables
    inside = variables_to_copy_inside(variables, nodes_of_functions(call))
    if params.only_leaves:
        return inside
    ids = set(map(id, inside))
    # The engine captures before the hooks of a non-leaf, and hands what it has captured on [D3].
    return [v for v in variables if id(v) in ids or v.grad_fn is not None]


def nodes_of_functions(call: Call) -> list[Node]:
    """Return the nodes of custom Functions that passes of a call may execute."""
    if not call.functions.users:
        return []
    if call.function_nodes is None:
        if not call.only_leaves:
            below, users = call.graph.below, user_code.most_nodes_of_users()
            above = (below(group).leading_to(params.variables) for group, params in call.passes)
            executed = set[Node]().union(*above)
            call.function_nodes = [node for node in executed if type(node) in users]
        elif len(call.passes) > 1:  # whose graph has been walked
            call.function_nodes = functions_below(call.whole)
        else:
            roots = [call.outputs[index] for index in call.differentiated]
            call.function_nodes = nodes_of_types(roots, user_code.most_nodes_of_users())
    return call.function_nodes


def leaves_of_functions(call: Call) -> list[FunctionLeaves]:
    """Return the leaves whose `.grad` the backward of each Function of a call may write."""
    if call.function_leaves is None:
        call.function_leaves = user_code.leaves_of_functions(nodes_of_functions(call))
    return call.function_leaves


def functions_above_hidden(call: Call, variables: Iterable[Tensor]) -> list[Node]:
    """Return the nodes of Functions whose backward may write `.grad` of these variables."""
    ids = set(map(id, variables)) if call.functions.users else set()
    every = leaves_of_functions(call) if ids else ()
    return [one.node for one in every if not ids.isdisjoint(one.hidden)]


def edges_above_hidden(call: Call, variables: Iterable[Tensor]) -> list[GradientEdge]:
    """Return an edge below each such Function: a pass that captures there runs its backward."""
    edges = [one.next_functions for one in functions_above_hidden(call, variables)]
    return [next(GradientEdge(child, nr) for child, nr in each if child) for each in edges]


def functions_below(below: Subgraph) -> list[Node]:
    """Return the nodes of custom Functions in a graph."""
    users = set(user_code.user_functions(below.kinds))
    return [node for node in below.nodes if type(node) in users] if users else []


def refuse_pre_hooks(call: Call) -> None:
    """Raise if a leaf has hooks that torch runs in `.backward()` alone."""
    for params in call.params if around(call) & USER_CODE else ():
        index = user_code.first_pre_hooked(params.variables)
        if index is not None:
            expected = "a leaf whose hooks are those of the tensor"
            got = "one with a pre-hook of its AccumulateGrad node: torch runs it in backward() only"
            fix = "register it on the tensor: param.register_hook(hook); or use backward_"
            raise UnsupportedGraphError(message(params.path(index), expected, got, fix))


def variables_to_copy_inside(
    variables: Sequence[Tensor], functions: Iterable[Node]
) -> list[Tensor]:
    """Return the variables whose gradients are to be copied in a pass that ends at all of them."""
    # A variable's own hooks may write on the gradient before it is returned, and a custom Function
    # above may have made it by writing: there the version tells nothing.
    if is_checked():  # also one that a hook keeps, to write on it later
        return [variable for variable in variables if variable.is_leaf or tensor_hooks(variable)]
    nodes = {child for node in functions for child, _ in node.next_functions if child is not None}
    hooked = filter(tensor_hooks, variables) if user_code.hooks_registered() else ()
    copied = set(map(id, hooked))
    if nodes:
        copied.update(leaf_tensors(nodes))
        copied.update(id(variable) for variable in variables if variable.grad_fn in nodes)
    return [variable for variable in variables if id(variable) in copied] if copied else []


def grad_versions(
    variables: Sequence[Tensor], grads: Sequence[Tensor | None], copied: Sequence[Tensor]
) -> dict[int, int]:
    """Return the version of each gradient, by the variable's number: if not 0, and no copy's."""
    if not any(map(_version, filter(_is_given, grads))):
        return {}
    safe = set(map(id, copied))
    return {
        index: grad._version
        for index, (variable, grad) in enumerate(zip(variables, grads, strict=True))
        if grad is not None and grad._version and id(variable) not in safe
    }


def refuse_modified(
    where: Callable[[], str],
    path: Callable[[int], str],
    variables: Sequence[Tensor],
    below: Subgraph,
    versions: Mapping[int, int],
) -> None:
    """Raise if a gradient with respect to a variable, of this version, has had another writer."""
    if versions:
        counter = _WriteCounter(below)
        for index, version in versions.items():
            if version > counter.most_writes(variables[index]):
                expected = f"a gradient of {where()} that nothing has changed since it was computed"
                got = f"that of {describe(variables[index])}, on which a tensor's hook, a "
                got += "module's, or the backward of a custom Function has written in place"
                raise UnsupportedGraphError(message(path(index), expected, got, _NEW_TENSOR))


_NEW_TENSOR = (
    "return a new tensor there: lambda grad: grad.clamp(-1, 1), and not grad.clamp_(-1, 1); `with "
    "gradkit.checked():` around an eager call, for losses that are computed anew, names the place"
)


class _WriteCounter:
    """How often torch itself may have written on each gradient that arrives in a pass."""

    def __init__(self, below: Subgraph) -> None:
        self._roots = Counter(edge(root)[:2] for root in below.roots)
        # The outputs of each node in the forward pass, and the nodes that they are inputs of.
        self._users: dict[Node, dict[int, list[Node]]] = {}
        for node in below.nodes:
            for child, number in node.next_functions:
                if child is not None:
                    self._users.setdefault(child, {}).setdefault(number, []).append(node)

    def most_writes(self, variable: Tensor) -> float:
        """Return the largest version of the variable's gradient that needs no writer."""
        if variable.is_leaf and is_of_ended_transform(variable):  # torch gives no edge of it
            own = (node for node in self._users if getattr(node, "variable", None) is variable)
            here = next(own), 0
        else:
            here = edge(variable)[:2]
        most = 0
        seen = {here[0]}
        stack = [(here, self._users.get(here[0], {}).get(here[1], []))]
        while stack:
            output, users = stack.pop()
            # Each part of a sum but the first may be added in place.
            most += max(0, len(users) + self._roots[output] - 1)
            for user in users:
                name = user.name()
                if name in _WRITE_ON_THEIR_OWN or name.count("Backward") > 1:
                    return float("inf")  # so do some nodes of derivatives of derivatives
                # Python or generated code may build in place; what calls a module's backward hooks
                # hands on what it was given.
                is_function = issubclass(type(user), BackwardCFunction)
                if is_function and name != "BackwardHookFunctionBackward":
                    return float("inf")
                if name in _MAKE_NEW or user in seen:
                    continue
                # The node may hand on what it was given, with all that was written on it.
                seen.add(user)
                outputs = self._users.get(user, {0: []})
                stack += [((user, number), others) for number, others in outputs.items()]
        return most


# Backward functions that write on what they have made before anyone else has it: found among all
# operations of torch's own test inputs, on torch 2.11 to 2.15.
_WRITE_ON_THEIR_OWN = {
    "MaxPool2DWithIndicesBackwardBackward0", "AsStridedBackward0_copy",
    "torch::autograd::CopySlices",
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_no_reduction_defaultBackward",
}.union(names_of_nodes("""
    Aminmax AsStrided AsStridedScatter BinaryCrossEntropy BinaryCrossEntropyWithLogits Clamp
    ClampMax.1 ClampMin.1 Copysign Cummax Cummin Cumprod FftC2R Fmax Fmin Gather Index IndexSelect
    Kthvalue LinalgHouseholderProduct MaskedSelect Max Max.1 Maximum Median Median.1 Min Min.1
    Minimum MkldnnRnnLayer Mode Nanmedian Nanmedian.1 NativeGroupNorm Nextafter Normal.1 Normal.3
    Ormqr Sort Sort.1 Take Topk Trace
"""))  # fmt: skip
# The most common of those that make a new tensor, and never hand on the one that they were given.
_MAKE_NEW = frozenset(
    names_of_nodes("""
    Abs AdaptiveAvgPool2D AvgPool2D Bmm Clamp.1 Convolution Cos CudnnBatchNorm Div Dot Elu Embedding
    Exp Flip Gelu LeakyRelu Log LogSoftmax MaskedFill MaxPool2DWithIndices Mean Mm MseLoss Mul Mv
    NativeBatchNorm NativeDropout NativeLayerNorm Neg NllLoss Pow Relu Roll Rsqrt
    ScaledDotProductEfficientAttention ScaledDotProductFlashAttention
    ScaledDotProductFlashAttentionForCpu Select Sigmoid Silu Sin Slice SmoothL1Loss Softmax Softplus
    Sqrt Tanh Tril Triu Where
""")
)
