"""One step of training, as `compare` runs it: a function, its params, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from gradkit._core import pytree
from gradkit._core.inputs import Losses, Params, read_losses, read_params
from gradkit._core.pytree import PyTree
from gradkit.errors import LeafTypeError, StructureError, describe, message
from gradkit.func._modules import as_before


@dataclass(frozen=True)
class Step:
    """A function, what it is differentiated by, and its arguments.

    Attributes:
        fn: Returns losses.
        tree: The params as the caller gave them, iterators and optimizers as tuples.
        args: Its further arguments.
        closes: It is called as `fn(*args)`, and holds its modules itself.
        wanted: The leaves of `tree`.
        names: The name of each leaf.
    """

    fn: Callable[..., PyTree]
    tree: PyTree
    args: tuple[Any, ...]
    closes: bool
    wanted: Params
    names: list[str]

    @property
    def called(self) -> str:
        """How the function is called."""
        return "loss_fn(*args)" if self.closes else "loss_fn(params, *args)"

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that stand in the params, each once."""
        leaves, _ = pytree.flatten(self.tree)
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, nn.Module)}.values())

    def losses(self) -> Losses:
        """Call the function on the params themselves, and check its losses."""
        args = _fresh(self.args)
        out = self.fn(*args) if self.closes else self.fn(self.tree, *args)
        return read_losses(out, scalar=True)

    def losses_at(self, named: dict[str, Tensor], bare: Sequence[Tensor | None]) -> Losses:
        """Call the function on other tensors, as torch.func needs it.

        Args:
            named: Tensors for the parameters of the modules, by the names in `holder()`.
            bare: Tensors for the other leaves, in their order.

        Returns:
            Its losses.
        """
        rest = iter(bare)
        leaves, spec = pytree.flatten(self.tree)
        placed = [leaf if isinstance(leaf, nn.Module) else next(rest) for leaf in leaves]
        first = () if self.closes else (pytree.unflatten(spec, placed),)
        holder = self.holder()
        # Inside of a transform a buffer can be written on only if it has been made there.
        buffers = {name: buffer.clone() for name, buffer in holder.named_buffers()}
        call = (lambda: self.fn(*first, *_fresh(self.args)),)
        with as_before(holder):
            return read_losses(functional_call(holder, {**buffers, **named}, call), scalar=True)

    def bare(self) -> list[Any]:
        """Return the leaves of the params that are no modules."""
        leaves, _ = pytree.flatten(self.tree)
        return [leaf for leaf in leaves if not isinstance(leaf, nn.Module)]

    def holder(self) -> nn.Module:
        """Return a module of all modules in the params, whose forward calls what it is given."""
        return _Holder(self.modules)


class _Holder(nn.Module):
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, call: Callable[[], PyTree]) -> PyTree:
        return call()


def read_step(fn: Callable[..., PyTree], params: PyTree, args: tuple[Any, ...]) -> Step:
    """Check what is compared.

    Args:
        fn: The caller's function.
        params: The caller's params.
        args: Its further arguments.

    Returns:
        The step.

    Raises:
        LeafTypeError: A param is no leaf tensor, or an argument has a graph or is an iterator.
        StructureError: It is no function, or one that takes neither `(params, *args)` nor
            `(*args)`.
    """
    if not callable(fn):
        raise StructureError(
            message(
                "loss_fn",
                "a function that computes the losses",
                describe(fn),
                "lambda params, x, y: ..., so that it can run again in each way",
            )
        )
    tree = _without_iterators(params)
    wanted = read_params(tree)
    for index, leaf in enumerate(wanted.leaves):
        if leaf is not None and not leaf.is_leaf:
            raise LeafTypeError(
                message(
                    pytree.path(wanted.spec, index, "params"),
                    "a leaf tensor, which .backward() gives a .grad",
                    f"{describe(leaf)} with a history",
                    "pass the tensors that it was computed from",
                )
            )
    _check_args(args)
    names = pytree.labels(wanted.spec, "param")
    return Step(fn, tree, args, _closes(fn, tree, args), wanted, names)


def _without_iterators(tree: PyTree) -> PyTree:
    leaves, spec = pytree.flatten(tree)
    opened = [_opened(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(opened, leaves, strict=True)):
        return tree
    return _without_iterators(pytree.unflatten(spec, opened))


def _opened(leaf: Any) -> Any:
    if isinstance(leaf, Iterator | ValuesView):
        return tuple(leaf)
    if isinstance(leaf, Optimizer):
        return tuple(p for group in leaf.param_groups for p in group["params"])
    return leaf


def _check_args(args: tuple[Any, ...]) -> None:
    leaves, spec = pytree.flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not leaf.is_leaf:
            came = f"{describe(leaf)} with a history, which torch.func would take for a constant"
            do = "compute it inside of loss_fn, or pass x.detach()"
        elif isinstance(leaf, Iterator):
            came, do = f"the {type(leaf).__name__}, which can be read only once", "list(...)"
        else:
            continue
        where = pytree.path(spec, index, "args")
        raise LeafTypeError(message(where, "the same argument for every way", came, do))


def _closes(fn: Callable[..., PyTree], tree: PyTree, args: tuple[Any, ...]) -> bool:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False  # a builtin that does not tell
    if _binds(signature, (tree, *args)):
        return False
    if _binds(signature, args):
        return True
    raise StructureError(
        message(
            "loss_fn",
            f"a function of (params, *args), {len(args) + 1} arguments; or of (*args), if it holds "
            "its modules itself",
            f"one of {signature}",
            "lambda params, x, y: ...",
        )
    )


def _binds(signature: inspect.Signature, args: tuple[Any, ...]) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments that a function may write on; a tensor that requires grad is itself."""
    leaves, spec = pytree.flatten(args)
    copies = [
        leaf.clone() if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf
        for leaf in leaves
    ]
    fresh: tuple[Any, ...] = pytree.unflatten(spec, copies)
    return fresh


def tensors_in(tree: PyTree) -> list[Tensor]:
    """Return the tensors in a tree, with those that modules in it have, under whatever name."""
    leaves, _ = pytree.flatten(tree)
    found: list[Tensor] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if isinstance(leaf, nn.Module):
            attributes = [value for part in leaf.modules() for value in vars(part).values()]
            found += [*leaf.parameters(), *leaf.buffers(), *filter(torch.is_tensor, attributes)]
    return found


def moved(step: Step, device: torch.device) -> Step:
    """Return the same step on another device: copies of modules and tensors, ties kept.

    Args:
        step: A step that is called as `fn(params, *args)`.
        device: Where to run it.

    Returns:
        A step of its own.
    """
    from copy import deepcopy

    memo: dict[int, Any] = {}
    for tensor in tensors_in((step.tree, step.args)):
        if tensor.is_leaf and id(tensor) not in memo:
            memo[id(tensor)] = _on(tensor, device)
    tree, args = deepcopy((step.tree, step.args), memo)
    return read_step(step.fn, tree, args)


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    there = tensor.detach().to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(there, requires_grad=tensor.requires_grad)
    return there.requires_grad_(tensor.requires_grad)
