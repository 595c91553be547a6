"""Communication hooks of DistributedDataParallel reduce gradients as in a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradkit._compat import distributed
from gradkit._core.ownership import empty_for
from gradkit.distributed._agreement import GradSpec, Specs
from gradkit.distributed._group import Group, collective_errors
from gradkit.distributed._reduction import LocalGrads
from gradkit.errors import UnsupportedGraphError, message

# In the names of torch's own hooks that step an optimizer.
_STEPPING = ("optim", "zero")


def check_comm_hooks(
    modules: Iterable[DistributedDataParallel],
    grads: Iterable[Tensor | None] = (),
    *,
    create_graph: bool = False,
    several: bool = False,
) -> None:
    """Raise if the modules' hooks cannot reduce these gradients; `several`: for several losses."""
    hooked = [module for module in modules if distributed.has_comm_hook(module)]
    hooks = [hook for module in hooked for hook in distributed.comm_hooks(module)]
    if hooked and create_graph:
        got = "create_graph=True"
    elif hooked and any(grad is not None and grad.layout != torch.strided for grad in grads):
        got = "a sparse gradient"
    elif any(word in hook.__qualname__ for hook, _ in hooks for word in _STEPPING):
        got = "a hook that steps an optimizer"
    elif several and any(hasattr(state, "error_dict") for _, state in hooks):
        got = "several losses: the hook would add the error of one loss to the next"
    else:
        return
    expected = "dense gradients without a graph, one a parameter, for a communication hook"
    fix = "leave out the hook, or reduce with gradkit.distributed.all_reduce"
    raise UnsupportedGraphError(message("the module", expected, got, fix))


def bucketed_params(module: DistributedDataParallel) -> set[int]:
    """Return the ids of the parameters in the reducer's buckets: those trained when wrapped."""
    return {
        id(param) for bucket in distributed.zero_buckets(module) for param in bucket.parameters()
    }


def reduce_by_hook(
    group: Group, module: DistributedDataParallel, local: LocalGrads, specs: Specs
) -> Iterator[tuple[int, Tensor]]:
    """Yield index and mean of each gradient that a module's hook reduces, loss by loss."""
    bucketed = bucketed_params(module)
    params = cast("Sequence[Tensor]", local.likes)
    width = len(set(map(id, params))) or 1
    for start in range(0, len(params), width):
        indices = range(start, start + width)
        row = [i for i in indices if id(params[i]) in bucketed and specs[i] is not None]
        if row:
            yield from zip(row, _reduce_row(group, module, row, local, specs), strict=True)


def _reduce_row(
    group: Group,
    module: DistributedDataParallel,
    row: Sequence[int],
    local: LocalGrads,
    specs: Specs,
) -> list[Tensor]:
    """Return the means of the gradients of one loss, which stand at the indices of the row."""
    params = [cast("Tensor", local.likes[index]) for index in row]
    kinds = [cast("GradSpec", specs[index]) for index in row]
    loss_shape = kinds[0].shape[: len(kinds[0].shape) - params[0].dim()]
    pairs = zip(params, kinds, strict=True)
    means = [empty_for(param, kind.dtype, loss_shape) for param, kind in pairs]
    # A hook takes one gradient for each parameter: that of one element of the loss.
    for element in range(torch.Size(loss_shape).numel()):
        grads = {
            id(param): grad.view(-1, *param.shape)[element]
            for index, param in zip(row, params, strict=True)
            if (grad := local.grads[index]) is not None
        }
        reduced = _run_hook(group, module, grads)
        for param, mean in zip(params, means, strict=True):
            mean.view(-1, *param.shape)[element].copy_(reduced[id(param)])
    return means


def _run_hook(
    group: Group, module: DistributedDataParallel, grads: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return the means of gradients by parameter id; one that is not there counts as zero."""
    reduced: dict[int, Tensor] = {}
    with torch.no_grad(), collective_errors(group, backend_only=True):
        for bucket in distributed.zero_buckets(module):
            views = dict(zip(map(id, bucket.parameters()), bucket.gradients(), strict=True))
            for key in views.keys() & grads.keys():
                _fill(views[key], grads[key])
            bucket.buffer().copy_(distributed.run_comm_hook(module, bucket))
            reduced |= views
    return reduced


def _fill(view: Tensor, grad: Tensor) -> None:
    if grad.dtype != view.dtype:
        expected = f"gradients in {view.dtype}, as when it was wrapped, for its communication hook"
        fix = "call .to(), .double(), ... before DistributedDataParallel(module)"
        raise UnsupportedGraphError(message("the module", expected, str(grad.dtype), fix))
    view.copy_(grad)
