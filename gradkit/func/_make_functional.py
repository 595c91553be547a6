"""make_functional: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradkit._checks import checkpoints
from gradkit._core.params import require_tensor
from gradkit._core.wrapped_modules import refuse_distributed
from gradkit._state.module import attributes_put_back
from gradkit.errors import LeafTypeError, StructureError, UnsupportedGraphError, describe, message
from gradkit.func._read_only import ReadOnly

Named: TypeAlias = dict[str, Tensor]


def make_functional(
    module: nn.Module,
) -> tuple[Callable[..., tuple[Any, Named]], Named, Named]:
    """Return a module's forward as a pure function, with the parameters and buffers to call it on.

    Example:
        >>> import torch, gradkit
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> call, params, buffers = gradkit.func.make_functional(norm)
        >>> out, new_buffers = call(params, buffers, torch.ones(3, 2))
        >>> buffers["running_mean"], new_buffers["running_mean"]
        (tensor([0., 0.]), tensor([0.1000, 0.1000]))

    Args:
        module: Any module of this process. Its train or eval mode counts at the time of a call, as
            do its Python attributes; one call runs at a time, as in `torch.func.functional_call`.

    Returns:
        `(call, params, buffers)`. `params` are the module's own parameters by name, a tied one by
        its first name, and `buffers` copies of its buffers.

        `call(params, buffers, *args, **kwargs)` returns `(out, new_buffers)`, where `out` is what
        the module returns for these tensors, whatever its own are. It changes neither the module
        (what a forward pass assigns to it is put back) nor the trees it is given, also if it
        raises. It raises `StructureError` for trees of other names, `LeafTypeError` for what is no
        tensor, and `UnsupportedGraphError` if the module runs a non-reentrant checkpoint in an
        eager graph (its recomputation would use the module's own parameters), or assigns one of
        two names of a buffer.

    Raises:
        LeafTypeError: It is no module, or a lazy one that has not run yet.
        UnsupportedGraphError: A module wrapped by DistributedDataParallel or FSDP, or an embedding
            with `max_norm`, which writes on its weight. `call` raises it for any module that does.

    Source:
        `torch.func.functional_call`,
        https://pytorch.org/docs/stable/generated/torch.func.functional_call.html, in the form of
        functorch's former `make_functional_with_buffers`.
    """
    if not isinstance(module, nn.Module):
        raise LeafTypeError(
            message("module", "an nn.Module", describe(module), "make_functional(model)")
        )
    refuse_distributed(module, lambda: "module")
    params: Named = dict(module.named_parameters())
    own_buffers: Named = dict(module.named_buffers())
    for name, tensor in {**params, **own_buffers}.items():
        require_tensor(tensor, partial("module.{}".format, name))
    _refuse_writing(module)
    names, buffer_names = list(params), list(own_buffers)
    first_name = {id(buffer): name for name, buffer in reversed(own_buffers.items())}
    # A buffer that stands in the module under several names is given, and looked for, under all.
    every_name = {
        name: first_name[id(buffer)]
        for name, buffer in module.named_buffers(remove_duplicate=False)
    }
    # Of one module under two names, functional_call gives back the module's own for the second.
    second_names = {
        name: first
        for name, first in every_name.items()
        if _owner(module, name) is not _owner(module, first)
    }

    def call(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, Named]:
        given = _read(params, names, "params")
        # Copies: what the forward pass writes on is new.
        new = {name: t.clone() for name, t in _read(buffers, buffer_names, "buffers").items()}
        both = {**given, **{name: new[first] for name, first in every_name.items()}}
        snapshot = checkpoints.before((given, new, args, kwargs))
        with attributes_put_back(module), _reading_only(given.values()):
            out = functional_call(module, both, args, kwargs)
        checkpoints.refuse(out, snapshot)
        _refuse_different_buffers(both, second_names)
        # A buffer that was assigned, and not written on, is in the dictionary.
        return out, {name: both[name] for name in buffer_names}

    return call, params, {name: buffer.detach().clone() for name, buffer in own_buffers.items()}


def _reading_only(params: Iterable[Tensor]) -> AbstractContextManager[object]:
    # While torch.compile traces, names of operations cannot be asked for, and nothing is refused.
    return nullcontext() if torch.compiler.is_compiling() else ReadOnly(params)


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _refuse_different_buffers(tensors: Named, second_names: Mapping[str, str]) -> None:
    for name, first in second_names.items():
        if tensors[name] is not tensors[first]:
            raise UnsupportedGraphError(
                message(
                    f"buffers[{first!r}]",
                    f"one buffer under both its names, {first!r} and {name!r}",
                    "two: the forward pass has assigned one of them",
                    "write on the buffer in place, or register two buffers",
                )
            )


def _refuse_writing(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise UnsupportedGraphError(
                message(
                    f"module.{name}".rstrip("."),
                    "a module that reads its parameters",
                    "an embedding with max_norm, which writes on its weight in every forward pass",
                    "max_norm=None, and scale the output",
                )
            )


def _read(tensors: object, names: Iterable[str], root: str) -> Named:
    """Return a dict that a call was given, checked, in the module's order."""
    names = list(names)
    if not isinstance(tensors, Mapping) or set(tensors) != set(names):
        got = _listed(list(tensors)) if isinstance(tensors, Mapping) else describe(tensors)
        raise StructureError(
            message(
                root,
                f"the {root} of make_functional, by name: {_listed(names)}",
                got,
                f"pass a tensor for each name, and a tied one once: {{**{root}, name: tensor}}",
            )
        )
    for name in names:
        if not isinstance(tensors[name], Tensor):
            raise LeafTypeError(
                message(f"{root}[{name!r}]", "a tensor", describe(tensors[name]), "pass a tensor")
            )
    return {name: tensors[name] for name in names}


def _listed(names: list[Any]) -> str:
    shown = ", ".join(map(repr, names[:6])) or "none"
    return shown + (", ..." if len(names) > 6 else "")
