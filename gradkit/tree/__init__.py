"""Arithmetic on trees of gradients. None is an exact zero, and takes no memory.

Every function is pure: it returns new tensors, and is differentiable where its inputs carry a
graph. Trees are optree's; dictionaries match by key and keep the order of the first tree.

DTensors stay DTensors in sums. A number or a matrix made of them is a plain tensor, the same on all
their ranks, which have to make the call together; their leaves are gathered one by one for it.
"""

from gradkit.tree._arithmetic import (
    add,
    allclose,
    clip_by_global_norm,
    cosine,
    dot,
    global_norm,
    map,
    scale,
    stack,
    sub,
    unstack,
)
from gradkit.tree._gram import gram
from gradkit.tree._matrix import to_matrix, weighted_sum

__all__ = [
    "add",
    "allclose",
    "clip_by_global_norm",
    "cosine",
    "dot",
    "global_norm",
    "gram",
    "map",
    "scale",
    "stack",
    "sub",
    "to_matrix",
    "unstack",
    "weighted_sum",
]
