"""Arithmetic on trees of gradients. None is an exact zero, and takes no memory.

Every function but `add_` and `lerp_`, which change their first tree, is pure: it returns new
tensors, and is differentiable where its inputs carry a graph. Trees are optree's; dictionaries
match by key and keep the order of the first tree. A module in a tree stands for
`dict(module.named_parameters())`, an iterator for the tuple of its items, an optimizer for the
tuple of its parameters. A leaf that is no tensor raises `LeafTypeError`; trees that do not match
raise `StructureError`.

DTensors stay DTensors in sums. A number or a matrix made of them is a plain tensor, the same on all
of their ranks: all ranks make the call, and the leaves are gathered one after the other.
"""

from gradkit.tree._arithmetic import (
    add,
    dot,
    map,
    randn_like,
    scale,
    stack,
    sub,
    unstack,
    zeros_like,
)
from gradkit.tree._in_place import add_, lerp_
from gradkit.tree._norms import allclose, clip_by_global_norm, cosine, global_norm
from gradkit.tree._per_loss import gram, to_matrix, weighted_sum
from gradkit.tree._solvers import cg, gmres, neumann

__all__ = [
    "add",
    "add_",
    "allclose",
    "cg",
    "clip_by_global_norm",
    "cosine",
    "dot",
    "global_norm",
    "gmres",
    "gram",
    "lerp_",
    "map",
    "neumann",
    "randn_like",
    "scale",
    "stack",
    "sub",
    "to_matrix",
    "unstack",
    "weighted_sum",
    "zeros_like",
]
