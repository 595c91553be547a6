"""Modules replicated by DistributedDataParallel: their group, parameters, and mean gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradkit._compat import ddp
from gradkit._core import pytree
from gradkit._core.pytree import PyTree
from gradkit.distributed._comm_hooks import bucketed_params, reduce_by_hook
from gradkit.distributed._grad_spec import GradSpec
from gradkit.distributed._group import Group, join_group
from gradkit.distributed._reduction import LocalGrads, reduce_grads
from gradkit.errors import StructureError, UnsupportedGraphError, message


def replicas_in(tree: PyTree) -> list[DistributedDataParallel]:
    """Return the replicated modules in a tree of params, submodules included."""
    leaves, _ = pytree.flatten(tree)
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    parts = {id(part): part for module in modules for part in module.modules()}
    return [part for part in parts.values() if isinstance(part, DistributedDataParallel)]


def join_replicas(modules: Sequence[DistributedDataParallel], call: str) -> Group:
    """Return the one group over which modules are replicated."""
    for module in modules:
        _check_reducible(module)
    handle = modules[0].process_group
    if any(module.process_group is not handle for module in modules):
        raise StructureError(
            message(call, "modules of one process group", "several", "make a call for each group")
        )
    return join_group(handle, call)


def _check_reducible(module: DistributedDataParallel) -> None:
    """Raise if gradients cannot be reduced outside of the module's own backward passes [M4]."""
    wrapped = "a DistributedDataParallel module"
    if module.static_graph:
        expected, got = f"{wrapped} without static_graph", "one with static_graph=True"
        fix = "leave static_graph out: with it, a functional pass ends all later reduction"
    elif ddp.is_joining(module):
        expected, got = f"{wrapped} outside of join()", "one inside of it"
        fix = "give all ranks as many inputs: a rank that has joined takes no part in this call"
    elif module.mixed_precision is not None:
        expected, got = f"{wrapped} without mixed_precision", "one with it"
        fix = "use torch.autocast in the forward pass"
    elif ddp.delays_all_reduce(module):
        expected, got = wrapped, "one with delay_all_reduce_named_params"
        fix = "leave it out: a hook reduces these parameters, also in a functional pass"
    else:
        return
    raise UnsupportedGraphError(message("the module", expected, got, fix))


def refuse_no_sync(modules: Sequence[DistributedDataParallel]) -> None:
    """Raise if a module is inside of no_sync()."""
    if not all(module.require_backward_grad_sync for module in modules):
        expected = "a DistributedDataParallel module that reduces"
        got = "one inside of no_sync(), whose gradients would not be synchronized"
        fix = "make the call outside of it, or without hooks=True"
        raise UnsupportedGraphError(message("params", expected, got, fix))


def reduced_params(module: DistributedDataParallel) -> list[Tensor]:
    """Return the trained parameters of a module, each once, without those that DDP ignores."""
    # Names as DDP reads them: at the root they begin with a dot. DDP reduces a tied parameter
    # unless all of its names are ignored.
    named = (
        (f"{path}.{name}", param)
        for path, part in module.module.named_modules()
        for name, param in part.named_parameters(recurse=False)
    )
    ignored = module.parameters_to_ignore
    params = {id(p): p for name, p in named if p.requires_grad and name not in ignored}
    return list(params.values())


def reduce_replicas(
    group: Group,
    modules: Sequence[DistributedDataParallel],
    local: LocalGrads,
    specs: Sequence[GradSpec | None],
) -> list[Tensor | None]:
    """Return the means over the ranks, by the modules' communication hooks where they have one."""
    hooked = [module for module in modules if ddp.has_comm_hook(module)]
    by_hook = {key for module in hooked for key in bucketed_params(module)}
    pairs = zip(local.likes, specs, strict=True)
    plain = [None if id(param) in by_hook else spec for param, spec in pairs]
    reduced = reduce_grads(group, local, plain, 1 / group.size)
    for module in hooked:
        for index, grad in reduce_by_hook(group, module, local, specs):
            reduced[index] = grad
    return reduced
