"""Whether the user's code could run in a pass: hooks, Functions, what a function refers to."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import chain
from operator import methodcaller
from threading import Lock
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ref

import torch
from torch import Generator, Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradkit._compat import distributed
from gradkit._compat.autograd import forward_class, tensor_hooks
from gradkit._compat.nodes import hooked_tensors
from gradkit._compat.transforms import is_transform_tensor, layers, transforms
from gradkit._compat.undoing import INSIDE
from gradkit._core.graph import edge, leaf_tensors, metadata, nodes_below
from gradkit._core.known_results import accumulate_grad_nodes
from gradkit._core.ownership import PLAIN_TYPES
from gradkit._core.pytree import tensors

CapturedObject: TypeAlias = Tensor | nn.Module | Generator

CAPTURED = "_gradkit_captured"  # the attribute of a function of gradkit's: all it refers to
_MAX_DEPTH = 4
_MAX_DEPTH_OF_FEW, _FEW = 8, 100  # deeper are methods of objects in containers of objects
_LIBRARIES = {"gradkit", "gradkit_parity", "torch"}
_LEAVES = {ModuleType, BuiltinFunctionType, type, str, int, float, bool, type(None), torch.dtype}
_MAX_LENGTH = 10_000  # a longer container is data, and not searched


def captured_by(*functions: object) -> list[CapturedObject]:
    """Return the tensors, modules and generators that functions, objects or containers refer to."""
    captured: dict[int, CapturedObject] = {}
    seen: set[int] = set()
    level = list(functions)
    for depth in range(_MAX_DEPTH_OF_FEW):
        new = {id(value): value for value in level if id(value) not in seen}
        if not new or (depth >= _MAX_DEPTH and len(new) > _FEW):
            break
        seen |= new.keys()
        level = []
        for key, value in new.items():
            # isinstance(value, Generator) calls a method of torch's, for each function and number.
            if isinstance(value, Tensor | nn.Module) or type(value) is Generator:
                captured[key] = value
            elif type(value) not in _LEAVES:
                level += _contents(value)
    return list(captured.values())


def may_compute(value: object) -> bool:
    """Return whether an object may compute something later: no tensor, number or text."""
    return not isinstance(value, Tensor) and (
        callable(value) or isinstance(value, Iterator) or hasattr(value, "__dict__")
    )


def _contents(value: Any) -> list[Any]:
    cls: Any = type(value)
    kind = _kind(cls)
    if kind is FunctionType:
        own = value.__dict__
        if CAPTURED in own:
            return [own[CAPTURED]]
        # The same is read that inspect.getclosurevars reads, in less time. Libraries refer to the
        # caller's objects by closures only.
        of_library = str(value.__module__).partition(".")[0] in _LIBRARIES
        names = () if of_library else _names(value.__code__)
        cells = chain.from_iterable(map(cell_contents, value.__closure__ or ()))
        read = [value.__globals__[name] for name in names if name in value.__globals__]
        return [*cells, *read, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if kind is Iterator:  # the frame of a generator, or a map, has them
        return gc.get_referents(value)
    if kind is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if kind is list or kind is Mapping:
        items = value.values() if kind is Mapping else value
        return list(items) if len(value) <= _MAX_LENGTH else []
    if kind is ModuleType or not hasattr(value, "__dict__"):
        return []
    return [*vars(value).values(), *([type(value).__call__] if callable(value) else [])]


@lru_cache(maxsize=4096)
def _kind(cls: Any) -> Any:
    """Return what objects of a class are searched as; `object` for one with attributes."""
    kinds: tuple[Any, ...] = (Iterator, partial, MethodType, FunctionType, Mapping)
    kind = next((one for one in kinds if issubclass(cls, one)), None)
    if kind is None and issubclass(cls, list | tuple | set | frozenset):
        return list
    if kind is None and issubclass(cls, type | BuiltinFunctionType | ModuleType):
        return ModuleType  # a module is not searched
    return kind or object


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function, and those that are defined in it, may read as globals."""
    inside = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return tuple(dict.fromkeys(chain(code.co_names, *inside)))


def cell_contents(cell: CellType) -> list[Any]:
    """Return the value of a variable of a closure, in a list; none if it has none yet."""
    try:
        return [cell.cell_contents]
    except ValueError:  # the variable has no value yet
        return []


Cotangents: TypeAlias = tuple[Tensor | None, ...]


def register_own_hooks(*registrations: Callable[[], RemovableHandle]) -> list[RemovableHandle]:
    """Register hooks of gradkit's, which `hooks_registered` does not count; all of them or none."""
    handles: list[RemovableHandle] = []
    try:
        with _own_hooks.lock, INSIDE:
            for register in registrations:
                handles.append(register())
                _own_hooks.count += 1
        return handles
    except BaseException:
        remove_hooks(handles)
        raise


def remove_hooks(handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks; to do so again does no harm."""
    for handle in handles:
        handle.remove()


def register_own_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register one hook of gradkit's, on a tensor."""
    return register_own_hooks(partial(tensor.register_hook, hook))[0]


def first_pre_hooked(leaves: Sequence[Tensor]) -> int | None:
    """Return the index of the first leaf whose AccumulateGrad node has a pre-hook."""
    # A look at one takes a microsecond or two, and holds until this process registers another hook
    # of any kind. Tensors that are no leaves are passed over.
    global _looked_at
    with _own_hooks.lock, INSIDE:
        made = hooks_made()  # read before the look: hooks made meanwhile are looked for again
    if not made:
        return None
    before, clean = _looked_at
    if before == made and clean.issuperset(map(id, leaves)):
        return None
    if before != made or len(clean) > _MOST_CLEAN:
        clean = set()
    unknown = [leaf for leaf in leaves if leaf.grad_fn is None and id(leaf) not in clean]
    if not unknown:
        return None
    first = _first_with_hooks(_nodes_of_leaves(unknown))
    if first is not None:
        return next(index for index, leaf in enumerate(leaves) if leaf is unknown[first])
    _looked_at = made, clean.union(map(id, unknown))
    return None


def _nodes_of_leaves(leaves: Sequence[Tensor]) -> list[Node]:
    plain = all(type(leaf) in PLAIN_TYPES and not leaf.is_nested for leaf in leaves)
    if plain and not transforms():
        return accumulate_grad_nodes(leaves)
    return [edge(x).node for x in leaves]


def any_hooked_nodes(leaves: Sequence[Tensor]) -> bool:
    """Return whether the AccumulateGrad node of a leaf has hooks, of either kind."""
    nodes = _nodes_of_leaves(leaves)
    return any(_first_with_hooks(nodes, of_kind=kind) is not None for kind in _NODE_HOOKS)


def _do_nothing(*_: object) -> None:
    pass


_NODE_HOOKS = tuple(methodcaller(f"register_{kind}", _do_nothing) for kind in ("prehook", "hook"))


def _first_with_hooks(
    nodes: Sequence[Node], of_kind: Callable[[Node], RemovableHandle] = _NODE_HOOKS[0]
) -> int | None:
    """Return the index of the first node on which someone has registered a hook of a kind."""
    with _own_hooks.lock, INSIDE:
        for index, node in enumerate(nodes):
            # All that Python has registered there, ours among them until it is removed.
            hooks = _removed(of_kind(node)).hooks_dict_ref()
            _own_hooks.count += 1
            if hooks:
                return index
    return None


def remove_hooks_since(nodes: Iterable[Node], first: int) -> None:
    """Remove from nodes the hooks whose handles have this number, or one that was given later."""
    for hooks, number in hooks_since(nodes, first):
        del hooks[number]


def hooks_since(nodes: Iterable[Node], first: int) -> list[tuple[Any, int]]:
    """Return the tables of such hooks of nodes, and the number of each."""
    result: list[tuple[Any, int]] = []
    with _own_hooks.lock, INSIDE:
        for node in nodes:
            for of_kind in _NODE_HOOKS:
                hooks: Any = _removed(of_kind(node)).hooks_dict_ref()
                _own_hooks.count += 1
                result += [(hooks, number) for number in hooks or () if number >= first]
    return result


def _removed(handle: RemovableHandle) -> RemovableHandle:
    try:
        handle.remove()
    finally:
        handle.remove()
    return handle


# How many hooks there were, and the ids of tensors without pre-hooks. One that is made later has
# none, either, until another hook is registered.
_looked_at: tuple[int, set[int]] = -1, set()
_MOST_CLEAN = 100_000


def hooks_of(tensor: Tensor) -> dict[object, Callable[[Tensor], Tensor | None]]:
    """Return the table of a tensor's hooks, which run in its order."""
    if tensor_hooks(tensor) is None:
        register_own_hook(tensor, lambda _: None).remove()
    return cast("dict[object, Callable[[Tensor], Tensor | None]]", tensor_hooks(tensor))


def hooks_registered() -> bool:
    """Return False only if nothing in this process but gradkit has ever registered a hook."""
    # A hook that changes its gradient in place, g.clamp_(-1, 1), changes every gradient that shares
    # memory with it, and a hook that stores it stores a result. torch numbers the handles of hooks
    # of all kinds; which tensors and modules have them cannot be seen from Python:
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/hooks.py#L26
    return RemovableHandle.next_id > _own_hooks.count


def hooks_made() -> int:
    """Return how many hooks this process has ever registered, but for gradkit's own."""
    return int(RemovableHandle.next_id) - _own_hooks.count


def user_code_may_run() -> bool:
    """Return whether a pass in this process could run a hook, or a Function of the user's."""
    return hooks_registered() or functions_alive().users


class _OwnHooks:
    def __init__(self) -> None:
        self.lock = Lock()
        self.count = 0


_own_hooks = _OwnHooks()


# Functions of torch's own in whose presence a functional gradient is incomplete or local.
REFUSED = frozenset({"CheckpointFunctionBackward", distributed.SINK, distributed.POST_BACKWARD})


class FunctionsAlive(NamedTuple):
    """Which nodes of Python Functions some graph in this process may hold."""

    refused: bool  # whether some Function makes functional gradients incomplete, or local
    users: bool  # whether some backward is the user's


def functions_alive() -> FunctionsAlive:
    """Return which Functions have nodes; False only if no graph in this process holds one."""
    # A graph need not be walked as long as none exists; a walk costs a tenth of a small pass. Such
    # a node is an instance of a class that `Function` makes, and CPython counts each instance as
    # one reference to its class, so a class with more references than an idle one may have
    # instances. Any other reference only causes a walk that was not needed.
    if _free_threaded():
        return FunctionsAlive(True, True)  # references are not counted exactly there
    watched = _classes_to_watch(repr(_functions_made))
    classes = [*map(_class_of, watched.classes)]
    counts = [*map(sys.getrefcount, classes)]
    if max(counts, default=0) <= watched.idle:
        return NONE_ALIVE
    alive = NONE_ALIVE
    for cls, count, (refused, users) in zip(classes, counts, watched.kinds, strict=True):
        if cls is not None and count > watched.idle:
            alive = FunctionsAlive(alive.refused or refused, alive.users or users)
    return alive


_class_of: Callable[[ref[type]], type | None] = ref.__call__  # a dead class is None
NONE_ALIVE = FunctionsAlive(False, False)


def most_nodes_of_users() -> dict[type, int]:
    """Return the largest number of nodes that each of the user's living Functions may have."""
    watched = _classes_to_watch(repr(_functions_made))
    most: dict[type, int] = {}
    classes = [*map(_class_of, watched.classes)]
    counts = [*map(sys.getrefcount, classes)]
    for cls, count, (_, users) in zip(classes, counts, watched.kinds, strict=True):
        if cls is not None and users:
            alive = sys.maxsize if _free_threaded() else count - watched.idle
            if alive > 0:
                most[cls] = alive
    return most


class _Watched(NamedTuple):
    classes: list[ref[type]]
    kinds: list[tuple[bool, bool]]  # whether each is refused, and the user's
    idle: int  # the references that a class without instances has, counted as above


# torch numbers the Functions that are defined; the count tells when to look for new ones.
_functions_made = torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER


@lru_cache(maxsize=1)
def _classes_to_watch(_: str) -> _Watched:
    every = [ref(cls) for cls in BackwardCFunction.__subclasses__()]
    classes = [*map(_class_of, every)]
    idle = min(map(sys.getrefcount, classes))  # most of torch's have no instances
    kinds_of = [
        (each, (cls.__name__ in REFUSED, not _from_torch(cls)))
        for each, cls in zip(every, classes, strict=True)
        if cls is not None
    ]
    del classes
    watched = [(each, kinds) for each, kinds in kinds_of if any(kinds)]
    return _Watched([each for each, _ in watched], [kinds for _, kinds in watched], idle)


@cache
def _free_threaded() -> bool:
    enabled = getattr(sys, "_is_gil_enabled", None)
    return enabled is not None and not enabled()


def user_functions(kinds: Iterable[type]) -> list[type]:
    """Return the types among `kinds` whose backward is code of the user's."""
    return [k for k in kinds if issubclass(k, BackwardCFunction) and not _from_torch(k)]


class FunctionLeaves(NamedTuple):
    """The leaves whose `.grad` the backward of a Function's node may write, by id."""

    node: Node
    returned: dict[int, Tensor]  # the leaves whose gradients it returns itself
    hidden: dict[int, Tensor]  # the others that it could find, and call torch.autograd.backward for
    constants: list[Tensor]  # aliases of tensors without a graph that it may hand out


def leaves_of_functions(functions: Iterable[Node]) -> list[FunctionLeaves]:
    """Return the leaves of each of some nodes of Functions."""
    by_class: dict[type, tuple[dict[int, Tensor], list[Tensor]]] = {}
    result = []
    for node in functions:
        kind = type(node)
        if kind not in by_class:
            by_class[kind] = _leaves_in(captured_by(forward_class(kind).backward), node)
        children = (child for child, _ in node.next_functions if child is not None)
        returned = leaf_tensors(children)
        own, constants = _leaves_in(captured_by(*vars(node).values()), node)
        leaves = by_class[kind][0] | own
        hidden = {key: leaves[key] for key in leaves.keys() - returned.keys()}
        result.append(FunctionLeaves(node, returned, hidden, by_class[kind][1] + constants))
    return result


def _leaves_in(
    captured: list[CapturedObject], function: Node
) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return the leaves among what a Function refers to, and aliases of tensors without a graph."""
    modules = (one for one in captured if isinstance(one, nn.Module))
    leaves = [x for x in captured if isinstance(x, Tensor)]
    leaves += [param for module in modules for param in module.parameters()]
    above = [x for x in leaves if x.grad_fn is not None and x.grad_fn is not function]
    own = {id(x): x for x in leaves if x.requires_grad and x.is_leaf}
    own |= leaf_tensors(nodes_below(above, [function])) if above else {}
    # Aliases: `kept_tensors` counts who else refers to the tensors themselves.
    constants = (x for x in captured if isinstance(x, Tensor) and not x.requires_grad)
    return own, [x.detach() for x in constants if type(x) is Tensor and _may_be_gradient(x)]


def _may_be_gradient(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not is_transform_tensor(tensor)
    return is_plain and is_floating(tensor) and not tensor.is_inference()


def name_of_function(kind: type) -> str:
    """Return the name of the Function whose nodes are of a type."""
    return kind.__name__.removesuffix("Backward").removesuffix("Generated")


def asks_for_backward(kind: type) -> bool:
    """Return whether a Function's backward asks torch if it runs under `.backward()`."""
    level: list[Any] = [forward_class(kind).backward]
    functions: list[FunctionType] = []
    for _ in range(_MAX_DEPTH):
        functions += [one for one in level if isinstance(one, FunctionType)]
        level = [part for one in level for part in _contents(one)]
        level = [part for part in level if isinstance(part, FunctionType | MethodType)]
    return any(not _ASKING.isdisjoint(one.__code__.co_names) for one in functions)


_ASKING = {"_is_checkpoint_valid", "is_checkpoint_valid"}


def kept_tensors(function: Any) -> list[Tensor]:
    """Return the floating tensors without a graph that a Function's node alone refers to."""
    # Such tensors were made in its forward pass, or are copies of what no one else has.
    kept = _private(tensors([*vars(function).values()]), _HELD_BY_ATTRIBUTE)
    with suppress(RuntimeError):  # a pass has freed them, or something has written on them
        # Hooks may recompute them; some Functions let them go as soon as they are read.
        is_cleared = getattr(forward_class(function), "clear_saved_tensors_on_access", False)
        if not is_cleared and not hooked_tensors(function):
            saved = [one for one in function.saved_tensors if one is not None]
            kept += _private(saved, _HELD_BY_NODE)
    return kept


def note_labels(results: object, given: Iterable[object]) -> None:
    """Note on a Function's nodes how many tensors it was given that are not floating: labels."""
    count = sum(isinstance(x, Tensor) and not is_floating(x) for x in given)
    for result in tensors(results) if count else ():
        for layer in layers(result):
            if layer.grad_fn is not None:
                metadata(layer.grad_fn)[_LABELS] = count


def labels_of(node: Node) -> int:
    """Return what `note_labels` has noted; in eager code nobody tells it."""
    return cast("int", metadata(node).get(_LABELS, 0))


_LABELS = "gradkit: labels"


def is_floating(tensor: Tensor) -> bool:
    """Return whether a tensor is of real or complex numbers, which alone have derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def _private(candidates: list[Tensor], references: int) -> list[Tensor]:
    return [
        one
        for one in candidates
        if type(one) in PLAIN_TYPES
        and one.layout == torch.strided
        and (is_lost_view(one) or (not one.requires_grad and sys.getrefcount(one) <= references))
        and is_floating(one)
    ]


def is_lost_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a leaf, made under no_grad: what uses it ends there."""
    return tensor.requires_grad and tensor.is_leaf and tensor._is_view()


# The references of Python to a tensor in such a list that nothing else refers to.
_HELD_BY_ATTRIBUTE, _HELD_BY_NODE = 4, 4


# The class of an operator made with torch.library is named after its namespace; these are torch's.
_TORCH_OPERATORS = tuple(
    f"GeneratedBackwardFor_{namespace}_"
    for namespace in (
        "prims", "rngprims", "debug_mode_ops", "_c10d_functional", "flex_lib", "onnx", "streams",
        "torch_nn",
    )
)  # fmt: skip


# Functions of torch's own that may have no derivative of their derivative, as those of users.
_NOT_TWICE_DIFFERENTIABLE = frozenset({"_Dirichlet", "CrossMapLRN2d", "LOBPCGAutogradFunction"})


def _from_torch(kind: Any) -> bool:
    forward = forward_class(kind)
    module: str = forward.__module__
    if module.startswith("torch._library"):  # may run what the user gave to register_autograd
        return bool(kind.__name__.startswith(_TORCH_OPERATORS))
    if module == accumulate_grad_nodes.__module__:  # gradkit's others run code of the user's
        return True
    if not module.startswith("torch.") or forward.__name__ in _NOT_TWICE_DIFFERENTIABLE:
        return False
    # torch.func wraps each Function, the user's too, in one of a class that it makes.
    return module != "torch._functorch.autograd_function"
