"""Captured gradients that a hook or a custom Function may have changed after they had arrived.

A backward function may hand the tensor that it was given to two others. A hook of one of them that
writes on it changes what the engine has captured for the other [A3, L3]. Such a write counts up the
version of the tensor, which is one number for all that share its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradkit._checks.checked import is_checked
from gradkit._core import user_code
from gradkit._core.call import Call
from gradkit._core.graph import Subgraph, edge, leaf_tensors
from gradkit._core.params import Params
from gradkit.errors import UnsupportedGraphError, describe, message

_version = attrgetter("_version")


def user_code_alive(call: Call) -> bool:
    """Return whether some pass in this process could run a hook, or a Function of the user's."""
    return user_code.hooks_registered() or call.functions.users


def exposed(call: Call, params: Params) -> list[Tensor]:
    """Return the variables whose gradients have to be copied as they arrive.

    Those with hooks of their own, which may write on it before, and those below a custom Function,
    which may have made it by writing: there the version tells nothing. Also intermediate values,
    since the engine captures before their hooks, and hands what it has captured on [D3].
    """
    if is_checked():
        return params.variables
    if not user_code_alive(call):
        return []
    hooks, functions = user_code.hooks_registered(), call.functions.users
    if not params.plain:
        return params.variables
    ids = {id(v) for v in params.variables if v._backward_hooks} if hooks else set()
    if not params.only_leaves:
        ids |= {id(v) for v in params.variables if v.grad_fn is not None}
    if functions:
        below = call.graph.below(call.differentiated)
        kinds = set(user_code.user_functions(below.kinds))
        for function in [node for node in below.nodes if type(node) in kinds] if kinds else ():
            inputs = (child for child, _ in function.next_functions)
            ids |= set(leaf_tensors(node for node in inputs if node is not None))
    return [variable for variable in params.variables if id(variable) in ids]


def refuse_written(
    call: Call,
    outputs: Sequence[Tensor],
    params: Params,
    grads: Sequence[Tensor | None],
    copied: Sequence[Tensor],
) -> None:
    """Raise if a gradient of a pass from some outputs, not copied, may have changed since."""
    if not any(map(_version, [grad for grad in grads if grad is not None])):
        return
    safe = set(map(id, copied))
    arrivals: _Arrivals | None = None
    for index, (variable, grad) in enumerate(zip(params.variables, grads, strict=True)):
        if grad is None or not grad._version or id(variable) in safe:
            continue
        arrivals = arrivals or _Arrivals(Subgraph(outputs))
        if grad._version > arrivals.most_writes(variable):
            raise UnsupportedGraphError(_written(call, params, index))


def _written(call: Call, params: Params, index: int) -> str:
    paths = ", ".join(map(call.losses.path, call.differentiated[:3]))
    return message(
        params.path(index),
        f"a gradient of {paths} that nothing has changed since it was computed",
        f"that of {describe(params.variables[index])}, on which a tensor's hook, a module's, or "
        "the backward of a custom Function has written in place",
        "return a new tensor there: lambda grad: grad.clamp(-1, 1), and not grad.clamp_(-1, 1); "
        "`with gradkit.checked():` around this call names the place, and gives the right gradients",
    )


class _Arrivals:
    """How often torch itself may have written on each gradient that arrives in a pass."""

    def __init__(self, below: Subgraph) -> None:
        self._roots = {edge(root)[:2] for root in below.roots}
        # For each node its outputs in the forward pass, and the nodes that they are inputs of.
        self._users: dict[Node, dict[int, list[Node]]] = {}
        for node in below.nodes:
            for child, number in node.next_functions:
                if child is not None:
                    self._users.setdefault(child, {}).setdefault(number, []).append(node)

    def most_writes(self, variable: Tensor) -> float:
        """Return the largest version of the variable's gradient that needs no writer."""
        here = edge(variable)
        most = 0
        seen = {here.node}
        stack = [(here[:2], self._users.get(here.node, {}).get(here.output_nr, []))]
        while stack:
            output, users = stack.pop()
            # Each part of a sum but the first may be added in place.
            most += max(0, len(users) + (output in self._roots) - 1)
            for user in users:
                name = user.name()
                if name in _WRITE_ON_THEIR_OWN or _is_function(type(user)):
                    return float("inf")
                if name in _MAKE_NEW or user in seen:
                    continue
                # It may hand on what it was given, with all that was written on it.
                seen.add(user)
                outputs = self._users.get(user, {0: []})
                stack += [((user, number), others) for number, others in outputs.items()]
        return most


def _is_function(kind: type) -> bool:
    """Return whether nodes of a type run Python or generated code, which may build in place.

    But for the Function that calls a module's backward hooks: it hands on what it was given.
    """
    return issubclass(kind, BackwardCFunction) and kind.__name__ != "BackwardHookFunctionBackward"


# Backward functions that write on what they have made before anyone else has it: found among all
# operations of torch's own test inputs, on torch 2.11 to 2.15.
_WRITE_ON_THEIR_OWN = frozenset((
    "AminmaxBackward0", "AsStridedBackward0", "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0", "CopysignBackward0", "CummaxBackward0",
    "CumminBackward0", "FftC2RBackward0", "GatherBackward0", "IndexBackward0",
    "IndexSelectBackward0", "KthvalueBackward0", "LinalgHouseholderProductBackward0",
    "MaskedSelectBackward0", "MaxBackward0", "MaxBackward1",
    "MaxPool2DWithIndicesBackwardBackward0", "MaximumBackward0", "MedianBackward0",
    "MedianBackward1", "MinBackward0", "MinBackward1", "MinimumBackward0", "ModeBackward0",
    "NanmedianBackward0", "NanmedianBackward1", "NativeGroupNormBackward0", "NextafterBackward0",
    "NormalBackward1", "NormalBackward3", "OrmqrBackward0", "SortBackward0", "SortBackward1",
    "TakeBackward0", "TopkBackward0", "TraceBackward0",
    "AsStridedBackward0_copy", "AsStridedScatterBackward0", "torch::autograd::CopySlices",
    "GeneratedBackwardFor_torch_nn__linear_cross_entropy_batch_chunked_no_reduction_defaultBackward",
))  # fmt: skip
# The most common of those that make a new tensor, and never hand on the one that they were given.
_MAKE_NEW = frozenset(
    f"{name}Backward0"
    for name in (
        "Abs", "AdaptiveAvgPool2D", "AvgPool2D", "Bmm", "Convolution", "Cos", "CudnnBatchNorm",
        "Div", "Dot", "Elu", "Embedding", "Exp", "Gelu", "LeakyRelu", "Log", "LogSoftmax",
        "MaxPool2DWithIndices", "Mean", "Mm", "MseLoss", "Mul", "Mv", "NativeBatchNorm",
        "NativeDropout", "NativeLayerNorm", "Neg", "NllLoss", "Pow", "Relu", "Rsqrt",
        "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttention",
        "ScaledDotProductFlashAttentionForCpu", "Select", "Sigmoid", "Silu", "Sin", "Slice",
        "SmoothL1Loss", "Softmax", "Softplus", "Sqrt", "Tanh",
    )
)  # fmt: skip
