"""One step of training, as `compare` runs it: a function, its params, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, ValuesView
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from gradkit._core import pytree
from gradkit._core.call import Losses, read_losses
from gradkit._core.params import Params, read_params
from gradkit._core.pytree import PyTree
from gradkit._state.module_state import attributes_put_back
from gradkit.errors import LeafTypeError, StructureError, describe, message

# The parameters of all modules, each once, by name; and lone tensors, by their index in `leaves`.
Inputs: TypeAlias = dict[str | int, Tensor]


@dataclass(frozen=True)
class Step:
    """A loss function and its arguments; `tree` is the params with iterators read once."""

    fn: Callable[..., PyTree]
    tree: PyTree
    args: tuple[Any, ...]
    takes_params: bool
    params: Params
    names: list[str]

    @property
    def called(self) -> str:
        """How the function is called."""
        return "loss_fn(params, *args)" if self.takes_params else "loss_fn(*args)"

    @property
    def leaves(self) -> list[Any]:
        """The leaves of the tree: tensors, None, and modules as a whole."""
        return pytree.flatten(self.tree)[0]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules in the params, each once."""
        return list({id(m): m for m in self.leaves if isinstance(m, nn.Module)}.values())

    def losses(self) -> Losses:
        """Call the function on the params themselves, and check its losses."""
        args = _copied(self.args)
        out = self.fn(self.tree, *args) if self.takes_params else self.fn(*args)
        return read_losses(out, scalar=True)

    @property
    def inputs(self) -> Inputs:
        """What torch.func differentiates."""
        named = _Container(self.modules).named_parameters()
        given: dict[str | int, Any] = {**dict(named), **dict(enumerate(self.leaves))}
        tensors = {key: x for key, x in given.items() if isinstance(x, Tensor)}
        return {k: x for k, x in tensors.items() if x.is_floating_point() or x.is_complex()}

    def losses_at(self, inputs: Inputs, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> Losses:
        """Call the function with other tensors in place of its inputs."""
        leaves, spec = pytree.flatten(self.tree)
        tree = pytree.unflatten(spec, [inputs.get(i, leaf) for i, leaf in enumerate(leaves)])
        container = _Container(self.modules)
        # In a transform, only buffers that are made in it can be written on.
        named = {name: copy(buffer) for name, buffer in container.named_buffers()}
        named |= {key: x for key, x in inputs.items() if isinstance(key, str)}
        call = partial(self.fn, *((tree,) if self.takes_params else ()), *_copied(self.args, copy))
        with attributes_put_back(container):
            return read_losses(functional_call(container, named, (call,)), scalar=True)


class _Container(nn.ModuleList):
    """Modules whose common forward calls its argument."""

    def forward(self, call: Callable[[], PyTree]) -> PyTree:
        return call()


def read_step(fn: Any, params: PyTree, args: tuple[Any, ...]) -> Step:
    """Check the arguments of `compare`."""
    if not callable(fn):
        expected, fix = "a function that computes the losses", "lambda params: ..."
        raise StructureError(message("loss_fn", expected, describe(fn), fix))
    tree = _without_iterators(params)
    opened = read_params(tree)
    for index, leaf in enumerate(opened.leaves):
        if leaf is not None and not leaf.is_leaf:
            where = pytree.path(opened.spec, index, "params")
            expected = "a leaf tensor, which .backward() gives a .grad"
            fix = "pass the tensors that it was computed from"
            raise LeafTypeError(message(where, expected, f"{describe(leaf)} with a history", fix))
    _check_args(args)
    names = pytree.labels(opened.spec, "param")
    return Step(fn, tree, args, _takes_params(fn, tree, args), opened, names)


def _without_iterators(tree: PyTree) -> PyTree:
    leaves, spec = pytree.flatten(tree)
    opened = list(leaves)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Iterator | ValuesView):
            opened[index] = tuple(leaf)
        elif isinstance(leaf, Optimizer):
            opened[index] = tuple(p for group in leaf.param_groups for p in group["params"])
    if all(map(is_, opened, leaves)):
        return tree
    return _without_iterators(pytree.unflatten(spec, opened))


def _check_args(args: tuple[Any, ...]) -> None:
    leaves, spec = pytree.flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not leaf.is_leaf:
            got = f"{describe(leaf)} with a history, which is a constant for torch.func"
            fix = "compute it in loss_fn, or pass x.detach()"
        elif isinstance(leaf, Iterator):
            got, fix = f"the {type(leaf).__name__}, which can be read only once", "list(...)"
        else:
            continue
        where = pytree.path(spec, index, "args")
        raise LeafTypeError(message(where, "the same argument in every run", got, fix))


def _takes_params(fn: Callable[..., PyTree], tree: PyTree, args: tuple[Any, ...]) -> bool:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return True  # a builtin without a signature
    for takes_params, given in ((True, (tree, *args)), (False, args)):
        with suppress(TypeError):
            signature.bind(*given)
            return takes_params
    expected = (
        f"a function of (params, *args), {len(args) + 1} arguments; or of (*args), if it holds its "
        "modules itself"
    )
    got, fix = f"one of {signature}", "lambda params, x, y: ..."
    raise StructureError(message("loss_fn", expected, got, fix))


def in_double(tensor: Tensor) -> Tensor:
    """Return a copy in double precision; integers stay what they are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.clone()
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float64), copy=True)


def _copied(
    args: tuple[Any, ...], copy: Callable[[Tensor], Tensor] = Tensor.clone
) -> tuple[Any, ...]:
    """Copy the arguments that a function may write on: all but those that require grad."""
    leaves, spec = pytree.flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (copy is not Tensor.clone or not leaf.requires_grad):
            leaves[index] = copy(leaf)
    copies: tuple[Any, ...] = pytree.unflatten(spec, leaves)
    return copies


def tensors_in(tree: PyTree) -> list[Tensor]:
    """Return the tensors in a tree, and all parameters, buffers and attributes of its modules."""
    leaves, _ = pytree.flatten(tree)
    tensors: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if isinstance(leaf, nn.Module):
            attributes = [value for part in leaf.modules() for value in vars(part).values()]
            tensors += [*leaf.parameters(), *leaf.buffers(), *filter(torch.is_tensor, attributes)]
    return tensors


def moved(step: Step, device: torch.device) -> Step:
    """Return the step with copies of its modules and tensors on another device, ties kept."""
    memo: dict[int, Any] = {}
    for tensor in tensors_in((step.tree, step.args)):
        if tensor.is_leaf and id(tensor) not in memo:
            there = tensor.detach().to(device, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_parameter else there
            memo[id(tensor)].requires_grad_(tensor.requires_grad)
    tree, args = deepcopy((step.tree, step.args), memo)
    return read_step(step.fn, tree, args)
