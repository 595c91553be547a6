"""`all_reduce`: a tree of gradients, reduced over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gradkit._compat.distributed import is_dtensor
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import is_dual, transforms
from gradkit._core import pytree
from gradkit._core.options import check_bool, check_option
from gradkit._core.ownership import leave_inference_mode
from gradkit._core.pytree import PyTree
from gradkit.distributed._group import join_group
from gradkit.distributed._reduction import LocalGrads, agree_on_grads, reduce_grads
from gradkit.errors import LeafTypeError, UnsupportedGraphError, describe, message


@disable_compile
def all_reduce(
    grads: PyTree,
    group: Any = None,
    op: Literal["mean", "sum"] = "mean",
    *,
    differentiable: bool = False,
) -> PyTree:
    """Return the mean, or the sum, of every gradient over the ranks of a process group.

    All ranks of the group make the call, with trees of one structure. A gradient that is None on
    some ranks counts as zero there (without `differentiable`); one that is None on all of them
    stays None.

    Example:
        >>> import gradkit, tempfile, torch
        >>> rendezvous = f"file://{tempfile.mkdtemp()}/file"
        >>> torch.distributed.init_process_group("gloo", rendezvous, rank=0, world_size=1)
        >>> gradkit.distributed.all_reduce({"w": torch.ones(2), "b": None})
        {'w': tensor([1., 1.]), 'b': None}
        >>> torch.distributed.destroy_process_group()

    Args:
        grads: A tree of tensors of any shape and floating-point or complex dtype, dense or sparse,
            on any devices that the group's backend serves, or None. They stay as they are.
        group: A process group; None is the default one.
        op: `"mean"` divides by the number of ranks, before the sum, as DistributedDataParallel
            does; `"sum"` does not.
        differentiable: Let the result carry the graphs of the gradients, which must have one on all
            ranks or on none. A backward pass through it sums the cotangents over the ranks (and
            divides, if this did), so that all ranks must run it, in the same order.

    Returns:
        A tree like `grads`, the same on all ranks, in the strides of `grads` where those are dense.
        It shares no memory with anything; with `differentiable`, it may.

    Raises:
        CollectiveError: There is no group, or a rank has failed, is missing, or is too late.
        LeafTypeError: A leaf is neither a floating-point or complex tensor nor None.
        OptionError: An option has no such value.
        StructureError: Trees, shapes, dtypes or kinds of devices differ between ranks; or some
            ranks' gradients carry a graph, and others' do not.
        UnsupportedGraphError: A leaf carries a graph that would be cut, without `differentiable`;
            a leaf is a DTensor, or sparse where there is no sparse sum.

    Source:
        `torch.nn.parallel.DistributedDataParallel`; Li et al. 2020, "PyTorch Distributed:
        Experiences on Accelerating Data Parallel Training", section 3.2,
        https://arxiv.org/abs/2006.15704
    """
    check_option("op", op, ("mean", "sum"))
    check_bool("differentiable", differentiable)
    ranks = join_group(group, "gradkit.distributed.all_reduce")
    leaves, spec = pytree.flatten(grads)
    path = partial(pytree.path, spec, root="grads")

    def checked() -> LocalGrads:
        for index, leaf in enumerate(leaves):
            _check_leaf(leaf, partial(path, index), differentiable)
        structure = (("the structure", str(spec)), ("op", op), ("differentiable", differentiable))
        return LocalGrads(leaves, leaves, structure, path)

    with leave_inference_mode():
        local, specs = agree_on_grads(ranks, checked, differentiable=differentiable)
        reduced = reduce_grads(ranks, local, specs, 1 / ranks.size if op == "mean" else None)
    return pytree.unflatten(spec, reduced)


def _check_leaf(leaf: object, path: Callable[[], str], differentiable: bool) -> None:
    if leaf is None:
        return
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        expected = "a floating-point or complex tensor, or None"
        fix = "leave it out: gradients are reduced here"
        raise LeafTypeError(message(path(), expected, describe(leaf), fix))
    if is_dtensor(leaf):
        expected, got = "a tensor of this process", "a DTensor, which torch reduces itself"
        fix = "leave it out: the gradients of fully_shard are reduced already"
    elif leaf.requires_grad and not differentiable and torch.is_grad_enabled():
        expected, got = "a gradient without a graph", "one whose graph the reduction would cut"
        fix = "all_reduce(grads, differentiable=True), or detach it"
    elif transforms() or is_dual(leaf):
        expected, got = "a call outside of torch.func's transforms", "one inside"
        fix = "transform what comes before and after; differentiable=True is for autograd"
    elif leaf.is_sparse and differentiable and leaf.requires_grad:
        expected, got, fix = "a dense tensor", "a sparse one with a graph", "leaf.to_dense()"
    else:
        return
    raise UnsupportedGraphError(message(path(), expected, got, fix))
