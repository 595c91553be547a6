"""Second and third derivatives that torch would get silently wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradkit._compat.distributed import is_dtensor
from gradkit._compat.transforms import is_differentiated_tensor
from gradkit._compat.versions import is_mended
from gradkit._core.call import Call
from gradkit._core.graph import Subgraph
from gradkit._core.params import Params
from gradkit._core.user_code import user_functions
from gradkit.errors import UnsupportedGraphError, message

# The backward pass of these takes the mean and the deviation for constants, so that its own
# derivative, the third in all, is wrong. Not so group_norm and rms_norm.
_NORMS = ("NativeLayerNormBackwardBackward0", "NativeBatchNormBackwardBackward0")
_WRONG_THIRD = {kind for kind in _NORMS if not is_mended(kind)}
# The derivative of torch.compile's backward pass is a node that raises. It has no path to what the
# function was computed from where that is not saved, and is left out then.
_COMPILED = "CompiledFunctionBackward"
_REFUSED = _WRONG_THIRD | {_COMPILED}
_DTENSORS_ARE_WRONG = not is_mended("DTensor")


def refuse_wrong_derivatives(call: Call) -> None:
    """Raise if torch would get the derivative of a pass of the call wrong, or drop it."""
    for group, params in call.passes:
        if _DTENSORS_ARE_WRONG:
            _refuse_dtensors(params)
        for index in group:
            below = call.graph.below([index])
            refuse_wrong_derivative(call.losses.path(index), params.variables, below)


def _refuse_dtensors(params: Params) -> None:
    for index, variable in enumerate(params.variables):
        if is_dtensor(variable):
            expected, got = "a tensor of this process", "a DTensor, whose second derivative"
            torch_is = f"{got} torch {torch.__version__} gets silently wrong"
            fix = "leave out create_graph=True; or install torch 2.12 or newer"
            raise UnsupportedGraphError(message(params.path(index), expected, torch_is, fix))


def refuse_wrong_derivative(where: str, variables: Sequence[Tensor], below: Subgraph) -> None:
    """Raise if a pass executes a node whose derivative torch gets silently wrong, or drops."""
    if _REFUSED.isdisjoint(kind.__name__ for kind in below.kinds):
        return
    for kind in sorted(set(map(type, below.leading_to(variables))), key=lambda kind: kind.__name__):
        if kind.__name__ in _WRONG_THIRD:
            raise UnsupportedGraphError(_wrong_third(where, kind))
        if kind.__name__ == _COMPILED and not user_functions([kind]):
            raise UnsupportedGraphError(_compiled(where))


def _compiled(where: str) -> str:
    return message(
        where,
        "a graph whose derivative can be differentiated",
        "a graph that torch.compile has compiled, whose derivative cannot be",
        "leave out create_graph=True; call the module that is not compiled; or compile the "
        "function that takes all derivatives",
    )


def _wrong_third(where: str, kind: type) -> str:
    return message(
        where,
        "a graph whose derivative can be differentiated again",
        f"a second derivative through {kind.__name__.removesuffix('BackwardBackward0')}, whose "
        "third torch gets silently wrong",
        "leave out create_graph=True, or an unroll inside of another, in the last call; or use "
        "group_norm or rms_norm, or write the norm out",
    )


def refuse_inside_transforms(call: Call) -> None:
    """Raise if a transform of torch.func would take the gradients of a call for constants."""
    for index, output in enumerate(call.outputs):
        if is_differentiated_tensor(output):
            raise UnsupportedGraphError(
                message(
                    call.losses.path(index),
                    "a loss outside of torch.func's grad, vjp and jvp",
                    "one inside: the transform would take the gradient for a constant",
                    "pass create_graph=True, so that it is differentiated, too",
                )
            )
