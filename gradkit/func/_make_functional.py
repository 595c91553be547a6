"""make_functional: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from gradkit._checks import recomputations
from gradkit._checks.checked import is_checked
from gradkit._compat.autograd import next_sequence_number, storage_key, without_function_modes
from gradkit._compat.dynamo import leave_uncompiled
from gradkit._compat.modules import own_parametrized_values
from gradkit._compat.transforms import BATCH, carries_graph, memory_of, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core import pytree
from gradkit._core.graph import nodes_below
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.params import refuse_distributed, require_tensor
from gradkit._core.user_code import (
    CAPTURED,
    captured_by,
    functions_alive,
    may_compute,
    name_of_function,
    user_functions,
)
from gradkit._state.copy_on_write import CopyOnWrite, CopyOnWriteMode, is_in_place
from gradkit._state.module_state import ModuleSnapshot, TensorSlots, alone, keeping_state, state_now
from gradkit._state.recomputed_tensors import is_recomputed
from gradkit._state.stale_reads import stale_reads_refused
from gradkit._torch_bugs.monitor import all_are_monitors, is_ordinary
from gradkit.errors import LeafTypeError, StructureError, UnsupportedGraphError, describe, message

Named: TypeAlias = dict[str, Tensor]
ModuleCall: TypeAlias = Callable[..., tuple[Any, Named]]  # returns the output and the new buffers
_Run: TypeAlias = Callable[[], Any]
_REFUSED_BY_TORCH = (nn.DataParallel, torch.jit.ScriptModule)
_TRACED: Any = vars(torch.jit)["TopLevelTracedModule"]
_OLD_PARAMETRIZATIONS = WeightNorm, SpectralNorm
_READS_ONLY = "a module that reads its parameters"
_READS_GIVEN = "a module that computes with the parameters that the call was given"


def make_functional(module: nn.Module) -> tuple[ModuleCall, Named, Named]:
    """Return a module's forward as a pure function, with the parameters and buffers to call it on.

    Example:
        >>> import torch, gradkit
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> call, params, buffers = gradkit.func.make_functional(norm)
        >>> out, new_buffers = call(params, buffers, torch.ones(3, 2))
        >>> buffers["running_mean"], new_buffers["running_mean"]
        (tensor([0., 0.]), tensor([0.1000, 0.1000]))

    Args:
        module: Any module of this process; its mode and attributes at the time of a call count. A
            call puts its tensors into the module while it runs: calls of other threads, of any
            module, wait (so that a forward pass that waits for one waits for ever), but the module
            itself must not run there meanwhile.

    Returns:
        `(call, params, buffers)`. `params` are the module's own parameters by name, a tied one by
        its first name, and `buffers` copies of its buffers.

        `call(params, buffers, *args, **kwargs)` returns `(out, new_buffers)`, where `out` is what
        the module returns for these tensors. It changes neither the module nor the trees it is
        given, also if it raises. What the module keeps in attributes, such as an auxiliary loss or
        a state, the function that made the call reads, and its next call starts from, until the
        outermost call of gradkit ends: this call itself, where no other is around, so that such a
        loss is to be read in a function that `func.value_and_grads` gets. Buffers that it assigns
        are read there, too (the next call starts from those that it is given). It raises
        `StructureError` for trees of other names, `LeafTypeError` for what is no tensor, and
        `UnsupportedGraphError` if the module assigns one of two names of a buffer, returns or keeps
        what would compute later with its own parameters, or reads what a pass with other parameters
        left in it. A non-reentrant checkpoint inside recomputes with the tensors of the call.

    Raises:
        LeafTypeError: It is no module, or a lazy one that has not run yet.
        UnsupportedGraphError: A module wrapped by DistributedDataParallel or FSDP, or an embedding
            with `max_norm`, which writes on its weight, or one compiled by torch.jit. `call` raises
            it for any module that writes on its parameters.

    Source:
        `torch.func.functional_call`,
        https://pytorch.org/docs/stable/generated/torch.func.functional_call.html, in the form of
        functorch's former `make_functional_with_buffers`.
    """
    require_module(module)
    refuse_distributed(module, lambda: "module")
    return functional(module)


def require_module(module: object) -> None:
    """Raise if this is no module."""
    if not isinstance(module, nn.Module):
        fix = "make_functional(model)"
        raise LeafTypeError(message("module", "an nn.Module", describe(module), fix))


def functional(module: nn.Module) -> tuple[ModuleCall, Named, Named]:
    """Return what `make_functional` does, also of a module that FSDP has sharded."""
    with alone():  # a call of another thread puts other tensors there
        params: Named = dict(module.named_parameters())
        own_buffers: Named = dict(module.named_buffers())
        all_buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in {**params, **own_buffers}.items():
        require_tensor(tensor, partial("module.{}".format, name))
    _refuse_writing(module)
    own, names, buffer_names = list(params.values()), list(params), list(own_buffers)
    first_name = {id(buffer): name for name, buffer in reversed(own_buffers.items())}
    # A buffer that stands in the module under several names is given, and looked for, under all.
    every_name = {name: first_name[id(buffer)] for name, buffer in all_buffers.items()}
    # functional_call gives back the module's own for the second name of a module under two names.
    second_names = {
        name: first
        for name, first in every_name.items()
        if _place(module, name) != _place(module, first)
    }

    # The old weight_norm and spectral_norm write these in each forward pass.
    reparametrized = [
        (part, hook.name)
        for part in module.modules()
        for hook in part._forward_pre_hooks.values()
        if isinstance(hook, _OLD_PARAMETRIZATIONS)
    ]

    def call(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, Named]:
        given = read_named(params, names, "params")
        # Copies: what the forward pass writes on is new.
        new = {name: t.clone() for name, t in read_named(buffers, buffer_names, "buffers").items()}
        is_traced = torch.compiler.is_compiling()
        if is_traced and new and BATCH in transforms():
            for one in (*given.values(), *args):  # batched, as what is written on them is
                if isinstance(one, Tensor):
                    new = {name: t + one.new_zeros((), dtype=t.dtype) for name, t in new.items()}

        def by_torch() -> tuple[Any, Named]:
            both = {**given, **{name: new[first] for name, first in every_name.items()}}
            return functional_call(module, both, args, kwargs), both

        # Names of operations cannot be asked for while torch.compile traces: none is refused.
        if is_traced:
            kept = [getattr(part, name) for part, name in reparametrized]
            out, after = by_torch()
            for (part, name), value in zip(reparametrized, kept, strict=True):
                setattr(part, name, value)  # the hook's was of the trace
        else:
            pairs = zip(names, own, strict=True)
            replaced = {name: t for name, t in pairs if t is not given[name]}
            run = partial(module, *args, **kwargs)
            out, after = _run_on(module, given, new, replaced, run, by_torch)
        for name, first in second_names.items():
            if name in after and after[name] is not after[first]:
                expected = f"one buffer under both its names, {first!r} and {name!r}"
                got = "two: the forward pass has assigned one of them"
                fix = "write on the buffer in place, or register two buffers"
                raise UnsupportedGraphError(message(f"buffers[{first!r}]", expected, got, fix))
        # A buffer that was assigned, and not written on, is in the dictionary.
        return out, {name: after[name] for name in buffer_names}

    vars(call)[CAPTURED] = module  # a walk through all names and tensors takes 20 us
    return call, params, {name: buffer.detach().clone() for name, buffer in own_buffers.items()}


def _run_on(
    module: nn.Module, given: Named, new: Named, replaced: Named, run: _Run, by_torch: _Run
) -> tuple[Any, Named]:
    """Return what a module returns for these tensors, put in place, and its buffers after it."""
    own: Any = INSIDE
    if new and BATCH in transforms():  # a buffer that is written on is as batched as what it gets
        memory = {memory_of(buffer) for buffer in new.values()}
        own = CopyOnWriteMode(CopyOnWrite(lambda tensor: memory_of(tensor) in memory))
    around, first_node = state_now(), next_sequence_number()
    with keeping_state() as state:
        snapshot = state.snapshot_of(module)
        tensors = list(given.values())
        stale = stale_reads_refused([snapshot], state=state, given=tensors)
        state.replaced |= set(map(id, replaced.values()))
        with snapshot.of_call() as changed:
            guard = ReadOnly(given.values(), replaced.values())
            with guard, stale, own, own_parametrized_values(), INSIDE:
                slots = TensorSlots(snapshot.parts)
                is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
                is_refused = is_tracing or isinstance(module, _REFUSED_BY_TORCH)
                if is_refused or not slots.fill({**given, **new}):
                    out, after = recomputations.exact(by_torch, module)
                else:
                    out, after = recomputations.exact(run, module), {**new, **slots.buffers()}
            result: tuple[Any, Named] = out, after
            if isinstance(own, CopyOnWriteMode):
                result = own.writes.values(result)
        if replaced:
            _refuse_later(out, snapshot, changed, replaced, first_node)
        if around is not None:
            state.note(snapshot, tensors, changed)
            if new:
                state.leave(module, {k: x for k, x in after.items() if new.get(k, x) is not x})
        elif is_checked():
            _refuse_left(snapshot)
        return result


def _refuse_left(snapshot: ModuleSnapshot) -> None:
    """Raise if an eager call has left a graph in an attribute, which is put back when it ends."""
    for key, (path, tensor) in snapshot.tensors_now().items():
        if key not in snapshot.tensors and carries_graph(tensor):
            expected = "a module that leaves no tensor with a graph in an attribute"
            got = "one, which is put back when the call ends: what reads the attribute afterwards, "
            got += "or the next call, gets what was there before"
            fix = "gradkit.func.value_and_grads(fn)(params), where fn calls it and reads what it "
            fix += f"has left; or return it from forward; or keep {path}.detach()"
            raise UnsupportedGraphError(message(path, expected, got, fix))


def _refuse_later(
    out: Any, snapshot: ModuleSnapshot, changed: Any, replaced: Named, first_node: int
) -> None:
    """Raise if what a module has returned, or kept, would compute with its own parameters later."""
    leaves, spec = pytree.flatten(out)
    later = [i for i, x in enumerate(leaves) if type(x) is not Tensor and may_compute(x)]
    values = [(pytree.path(spec, i, "out"), leaves[i]) for i in later]
    for path, table, key in snapshot.new_attributes(changed):
        value = table[key]
        inside = () if isinstance(value, Tensor) else pytree.flatten(value)[0]
        parts = (x for x in inside if not isinstance(x, nn.Module))  # a list of them computes not
        values += [(path, x) for x in parts if may_compute(x)]
    of_functions: list[tuple[str, Any]] = []
    if functions_alive().users:  # their backward may call the module
        roots = (x for x in leaves if isinstance(x, Tensor) and x.requires_grad)
        nodes = nodes_below(roots, oldest=first_node)  # the nodes of the call
        kinds = set(user_functions(set(map(type, nodes))))
        of_functions = [("out", node) for node in nodes if type(node) in kinds]
    if not (values or of_functions):
        return
    # A checkpoint around has put others in the place of the module's own.
    now = snapshot.module.named_parameters()
    own = {id(x) for name, x in now if name in replaced} | set(map(id, replaced.values()))
    for path, value in values + of_functions:
        modules = (x for x in captured_by(value) if isinstance(x, nn.Module))
        if any(id(param) in own for one in modules for param in one.parameters()):
            expected = "a module that has computed what it returns, or keeps, when its call ends"
            got = f"{describe(value)}, which refers to the module: it would compute with the "
            fix = "compute it inside: a module whose forward returns model(x).log_prob(y), say"
            if isinstance(value, Node):
                got = f"{name_of_function(type(value))}, whose backward refers to it, and may call "
                got += "it, as the adjoint of a differential equation does: with the "
                fix = "the module's own parameters: gradkit.value_and_grads(loss, module)"
            got += "module's own parameters, not with those of the call"
            raise UnsupportedGraphError(message(path, expected, got, fix))


def _place(module: nn.Module, name: str) -> tuple[int, str]:
    """Return which module holds a buffer, and under which name."""
    path, _, attribute = name.rpartition(".")
    return id(module.get_submodule(path)), attribute


def _refuse_writing(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            where = f"module.{name}".rstrip(".")
            got = "an embedding with max_norm, which writes on its weight in every forward pass"
            fix = "max_norm=None, and scale the output"
            raise UnsupportedGraphError(message(where, _READS_ONLY, got, fix))
        # A function of torch.jit reads some of its tensors as they were when it was compiled.
        is_compiled = isinstance(part, _TRACED) or (
            isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.buffers())
        )
        if is_compiled or (part is module and isinstance(part, _REFUSED_BY_TORCH)):
            where, got = f"module.{name}".rstrip("."), f"{describe(part)}, which does not"
            fix = "make_functional of the module inside of it, or that torch.jit has compiled; or, "
            fix += "for a first derivative, gradkit.value_and_grads(loss, module)"
            expected = "a module that takes other parameters"
            raise UnsupportedGraphError(message(where, expected, got, fix))


def read_named(tensors: Any, names: list[str], root: str) -> Named:
    """Return a dict that a call was given, checked, in the module's order."""
    is_plain = type(tensors) is dict and list(tensors) == names
    if is_plain and set(map(type, tensors.values())) <= PLAIN_TYPES:
        return {**tensors}
    if not isinstance(tensors, Mapping) or set(tensors) != set(names):
        got = _listed(list(tensors)) if isinstance(tensors, Mapping) else describe(tensors)
        expected = f"the {root} of make_functional, by name: {_listed(names)}"
        fix = f"pass a tensor for each name, and a tied one once: {{**{root}, name: tensor}}"
        fix = fix if names else f"pass an empty dict as {root}: call(params, {{}}, x)"
        raise StructureError(message(root, expected, got, fix))
    for name in names:
        if not isinstance(tensors[name], Tensor):
            where, got = f"{root}[{name!r}]", describe(tensors[name])
            raise LeafTypeError(message(where, "a tensor", got, "pass a tensor"))
    return {name: tensors[name] for name in names}


def _listed(names: list[Any]) -> str:
    shown = ", ".join(map(repr, names[:6])) or "none"
    return shown + (", ..." if len(names) > 6 else "")


_SET_DATA = cast("Any", torch.Tensor).data.__set__
# Arguments of these types are no parameters of a module's own, and no lists that may hold one.
_NO_PARAMETERS = {Tensor, int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device}


class ReadOnly(TorchFunctionMode):
    """Raises at operations that write on some tensors, also through views, `.data` and detach().

    And at those that read parameters in whose place the module has others: a list of the module's
    holds them, say, and would silently make constants of them.
    """

    def __init__(self, tensors: Iterable[Tensor], replaced: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._ids, self._replaced = set(map(id, self._tensors)), set(map(id, replaced))
        self._memory: dict[torch.layout, set[int]] = {}
        self._is_in_function = all_are_monitors()

    @leave_uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless it writes."""
        if self._is_in_function and not types and is_ordinary(func, kwargs):
            given = (*args, *kwargs.values()) if kwargs else args
            if _NO_PARAMETERS.issuperset(map(type, given)):
                with without_function_modes():  # half of the time, as in a monitor
                    return func(*args, **kwargs) if kwargs else func(*args)
        name = getattr(func, "__name__", "")
        is_write = is_in_place(name) and args and isinstance(args[0], Tensor)
        is_replaced = func == _SET_DATA and id(args[0]) in self._ids
        if is_replaced or (is_write and self._is_protected(args[0])):
            name = "an assignment to .data" if is_replaced else name
            got = f"one that writes on them in its forward pass, with {name}"
            fix = "compute a new tensor from the parameter, or write outside of the module"
            raise UnsupportedGraphError(message("module", _READS_ONLY, got, fix))
        result = func(*args, **(kwargs or {}))
        if not self._replaced:
            return result
        given = (*args, *kwargs.values()) if kwargs else args
        lists = chain.from_iterable(x for x in given if isinstance(x, list | tuple))
        reads_own = not self._replaced.isdisjoint(map(id, chain(given, lists)))
        if reads_own and pytree.tensors(result):
            got = f"one that reads its own in {name}, held in a list or a closure, and not by name"
            fix = "read them as attributes: self.layer.weight; or use a torch.nn.ParameterList"
            raise UnsupportedGraphError(message("module", _READS_GIVEN, got, fix))
        return result

    def _is_protected(self, tensor: Tensor) -> bool:
        if id(tensor) in self._ids or transforms():  # a transform's tensors show no memory
            return id(tensor) in self._ids
        if is_recomputed(tensor):  # gathered from the shards that are given
            return True
        if tensor.layout not in self._memory:  # once a call: every batch norm writes on its buffers
            alike = [t for t in self._tensors if t.layout == tensor.layout]
            self._memory[tensor.layout] = set(map(storage_key, alike))
        return storage_key(tensor) in self._memory[tensor.layout]
