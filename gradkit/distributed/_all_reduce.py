"""`all_reduce`: gradients of all ranks, from a tree of one's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gradkit._autograd.passes import ordinary_mode
from gradkit._compat.dtensor import is_dtensor
from gradkit._compat.dynamo import disable_compile
from gradkit._compat.transforms import is_dual, transforms
from gradkit._core import pytree
from gradkit._core.options import check_option
from gradkit._core.pytree import PyTree
from gradkit.distributed._agreement import join
from gradkit.distributed._reduction import LocalGrads, agree, reduce
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
        LeafTypeError: A leaf is neither a tensor that has a gradient nor None.
        StructureError: Trees, shapes, dtypes or kinds of devices differ between ranks, or who has a
            graph; or `op` has no such value.
        UnsupportedGraphError: A leaf carries a graph that would be cut, without `differentiable`;
            a leaf is a DTensor, or sparse where there is no sparse sum.

    Source:
        `torch.nn.parallel.DistributedDataParallel`; Li et al. 2020, "PyTorch Distributed:
        Experiences on Accelerating Data Parallel Training", section 3.2,
        https://arxiv.org/abs/2006.15704
    """
    check_option("op", op, ("mean", "sum"))
    ranks = join(group, "gradkit.distributed.all_reduce")
    leaves, spec = pytree.flatten(grads)
    path = partial(pytree.path, spec, root="grads")

    def offer() -> LocalGrads:
        for index, leaf in enumerate(leaves):
            _check(leaf, partial(path, index), differentiable)
        structure = (("the structure", str(spec)), ("op", op), ("differentiable", differentiable))
        return LocalGrads(leaves, leaves, structure, path)

    with ordinary_mode():
        ours, agreed = agree(ranks, offer, differentiable=differentiable)
        scale = 1 / ranks.size if op == "mean" else None
        reduced = reduce(ranks, leaves, ours.likes, agreed, scale)
    return pytree.unflatten(spec, reduced)


def _check(leaf: object, where: Callable[[], str], differentiable: bool) -> None:
    if leaf is None:
        return
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        raise LeafTypeError(
            message(
                where(),
                "a floating-point or complex tensor, or None",
                describe(leaf),
                "leave it out: gradients are reduced here",
            )
        )
    if is_dtensor(leaf):
        expected, came = "a tensor of this process", "a DTensor, which torch reduces itself"
        do = "leave it out: the gradients of fully_shard are reduced already"
    elif leaf.requires_grad and not differentiable and torch.is_grad_enabled():
        expected, came = "a gradient without a graph", "one whose graph the reduction would cut"
        do = "all_reduce(grads, differentiable=True), or detach it"
    elif transforms() or is_dual(leaf):
        expected, came = "a call outside of torch.func's transforms", "one inside"
        do = "transform what comes before and after; differentiable=True is for autograd"
    elif leaf.is_sparse and differentiable and leaf.requires_grad:
        expected, came, do = "a dense tensor", "a sparse one with a graph", "leaf.to_dense()"
    else:
        return
    raise UnsupportedGraphError(message(where(), expected, came, do))
