"""Trees, with optree; and the first place where two of them differ, for errors."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import repeat
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from gradkit._compat.versions import require
from gradkit._core.ownership import PLAIN_TYPES
from gradkit.errors import StructureError, describe, message, with_article

try:
    import optree
except ModuleNotFoundError:
    require("optree", None)
require("optree", optree.__version__)

PyTree: TypeAlias = Any
Structure: TypeAlias = optree.PyTreeSpec

_NAMESPACE = "gradkit"

# The insertion order is a mode of the namespace, which only gradkit uses. Entering it once and for
# all saves some microseconds a call; the name keeps the context from being garbage collected.
_INSERTION_ORDER = optree.dict_insertion_ordered(True, namespace=_NAMESPACE)
_INSERTION_ORDER.__enter__()


def flatten(tree: PyTree) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of `tree` in order, None among them, and its structure."""
    if torch.compiler.is_compiling():
        plain = _PLAIN_LEAF
        leaves: list[Any] = []
        if isinstance(tree, torch.Tensor):
            return [tree], cast("Structure", plain)
        traced = _plain(tree, leaves)
        if traced is not None:
            return leaves, cast("Structure", traced)
    else:
        # optree looks up the type of each leaf: common trees need not be looked at so.
        kind = type(tree)
        if kind in PLAIN_TYPES:
            return [tree], LEAF
        if kind in _FLAT:
            leaves = list(tree.values() if kind is dict else tree)
            if PLAIN_TYPES.issuperset(map(type, leaves)):
                if kind is not dict:
                    return leaves, spec_of_items(cast("Any", kind), len(leaves))
                if _STRING.issuperset(map(type, tree)):
                    return leaves, spec_of_keys(tuple(tree))
    try:
        return optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    except RecursionError as error:
        got = f"{with_article(type(tree).__name__)} that holds itself, or is nested too deeply"
        fix = "leave out the item that refers to what it is in"
        raise StructureError(message("a tree", "containers that end", got, fix)) from error


class Plain(NamedTuple):
    """The structure of dictionaries, lists and tuples, as torch.compile traces it.

    The structures that torch makes there of those of optree take most of the time of a trace.
    """

    type: type | None  # a leaf has None
    keys: tuple[Any, ...] | None
    parts: tuple[Plain | None, ...]  # a leaf is None

    @property
    def num_children(self) -> int:
        """How many items the container has."""
        return len(self.parts)

    def unflatten(self, leaves: Iterable[Any]) -> PyTree:
        """Return the tree with these leaves."""
        rest = iter(leaves)
        if self.type is None:
            return next(rest)
        if self.keys is not None:
            pairs = zip(self.keys, self.parts, strict=True)
            return {k: next(rest) if part is None else part.unflatten(rest) for k, part in pairs}
        parts = [next(rest) if part is None else part.unflatten(rest) for part in self.parts]
        return parts if self.type is list else tuple(parts)

    def flatten_up_to(self, tree: Any) -> list[Any] | None:
        """Return the subtrees at the leaves; None if this is no prefix of the tree."""
        if self.type is None:
            return [tree]
        kind: Any = type(tree)
        keys = tuple(tree) if kind is dict else None
        if kind is not self.type or keys != self.keys or len(tree) != len(self.parts):
            return None
        subtrees: list[Any] = []
        for part, item in zip(self.parts, tree if keys is None else tree.values(), strict=True):
            below = [item] if part is None else part.flatten_up_to(item)
            if below is None:
                return None
            subtrees += below
        return subtrees


_PLAIN_LEAF = Plain(None, None, ())
_KNOWN_LEAVES = torch.Tensor, type(None), int, float, str


def _plain(tree: PyTree, leaves: list[Any]) -> Plain | None:
    """Return the structure of a tree, and add its leaves to a list; None if optree has to look."""
    kind = type(tree)
    if kind not in (dict, list, tuple):
        leaves.append(tree)
        return _PLAIN_LEAF if isinstance(tree, _KNOWN_LEAVES) else None
    items = [*tree.values()] if kind is dict else [*tree]
    are_leaves = [isinstance(item, _KNOWN_LEAVES) for item in items]
    parts: list[Plain | None] = [None] * len(items)
    if False not in are_leaves:
        leaves += items
    else:
        for index, item in enumerate(items):
            if are_leaves[index]:
                leaves.append(item)
            elif (part := _plain(item, leaves)) is None:
                return None
            else:
                parts[index] = part
    return Plain(kind, tuple(tree) if kind is dict else None, tuple(parts))


def _by_optree(spec: Structure) -> Structure:
    return _spec(spec.unflatten(repeat(0))) if isinstance(spec, Plain) else spec


def _spec(tree: PyTree) -> optree.PyTreeSpec:
    return optree.tree_structure(tree, none_is_leaf=True, namespace=_NAMESPACE)


LEAF = _spec(0)
_FLAT = frozenset({dict, list, tuple})
_STRING = frozenset({str})


@lru_cache(maxsize=64)
def spec_of_keys(keys: tuple[str, ...]) -> optree.PyTreeSpec:
    """Return the structure of a dictionary with these keys; not inside of what is compiled."""
    spec = _spec(dict.fromkeys(keys, 0))
    if len(_keys_of_spec) >= _MOST_SPECS:
        _keys_of_spec.clear()
    _keys_of_spec[id(spec)] = spec, keys
    return spec


# The keys are ids of structures, which stay theirs as long as the structures stand here. One that
# has been dropped is still right, and takes longer.
_MOST_SPECS = 1024
_keys_of_spec: dict[int, tuple[optree.PyTreeSpec, tuple[str, ...]]] = {}


@lru_cache(maxsize=64)
def spec_of_items(kind: Any, count: int) -> optree.PyTreeSpec:
    """Return the structure of a list or tuple of so many leaves; not inside what is compiled."""
    return _spec(kind([0] * count))


def unflatten(spec: optree.PyTreeSpec, leaves: Iterable[Any]) -> PyTree:
    """Return the tree of structure `spec` with these leaves."""
    return spec.unflatten(leaves) if torch.compiler.is_compiling() else rebuild(spec, leaves)


def rebuild(spec: optree.PyTreeSpec, leaves: Iterable[Any]) -> PyTree:
    """Return that tree; for code that torch.compile never traces."""
    known = _keys_of_spec.get(id(spec))
    if known is None:
        return spec.unflatten(leaves)
    return dict(zip(known[1], leaves, strict=True))  # in half the time


def tensors(tree: PyTree) -> list[torch.Tensor]:
    """Return the leaves of `tree` that are tensors."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: PyTree) -> PyTree:
    """Return `tree` with `fn` of each tensor in its place."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [fn(x) if isinstance(x, torch.Tensor) else x for x in leaves])


_TENSOR = object()


def partition_tensors(
    tree: PyTree,
) -> tuple[list[torch.Tensor], Callable[[Iterable[torch.Tensor]], PyTree]]:
    """Return the tensors of a tree, and a function that puts others in their places."""
    leaves, spec = flatten(tree)
    # The tensors are left out: the function must not keep them alive.
    constants = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: Iterable[torch.Tensor]) -> PyTree:
        rest = iter(tensors)
        return unflatten(spec, [next(rest) if c is _TENSOR else c for c in constants])

    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], rebuild


def as_known_tree(value: object, where: str) -> str | None:
    """Return the call that makes a tree of a container that optree does not know."""
    if isinstance(getattr(value, "loss", None), torch.Tensor):  # a model of transformers gives such
        return f"{where}.loss"
    if isinstance(value, Mapping | ItemsView):
        return f"dict({where})"
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and hasattr(value, "__dict__")):
        return f"vars({where})"
    if is_dataclass(value) and not isinstance(value, type):  # a dataclass of slots
        names = (field.name for field in fields(value))
        return f"{{{', '.join(f'{name!r}: {where}.{name}' for name in names)}}}"
    is_array = str(getattr(value, "dtype", "")) == "object"
    return f"list({where})" if is_array or isinstance(value, AbstractSet) else None


def path(spec: optree.PyTreeSpec, index: int, root: str) -> str:
    """Return the path of a leaf as a caller would write it: `losses['aux'][0]`."""
    return _by_optree(spec).accessors()[index].codify(root)


def paths(spec: optree.PyTreeSpec, root: str) -> list[str]:
    """Return the paths of all leaves; each by itself would take as long."""
    return [accessor.codify(root) for accessor in spec.accessors()]


def mutable_entry(tree: PyTree, spec: optree.PyTreeSpec, index: int) -> tuple[Any, Any] | None:
    """Return the list or dict that holds a leaf, and its index or key; None if another does."""
    accessor = spec.accessors()[index]
    container = accessor[:-1](tree) if len(accessor) else None
    is_mutable = type(container) in (*MAPPINGS, list)
    return (container, accessor[-1].entry) if is_mutable else None


def labels(spec: optree.PyTreeSpec, lone: str) -> list[str]:
    """Return short, distinct names of all leaves: `encoder.weight`, or `loss[0]` with a `lone`."""
    full = paths(spec, "")
    dotted = [re.sub(r"\['([^'\]]*)'\]", r".\1", path) for path in full]
    short = [path.removeprefix(".") if path.startswith(".") else f"{lone}{path}" for path in dotted]
    return short if len(set(short)) == len(short) else full


def flatten_up_to(spec: optree.PyTreeSpec, spec_root: str, tree: PyTree, root: str) -> list[Any]:
    """Return the subtrees of `tree` at the leaves of `spec`, which must be a prefix of it."""
    kind = type(tree)
    if kind in _FLAT and not torch.compiler.is_compiling():  # in a fifth of the time
        if kind is not dict:
            if spec_of_items(cast("Any", kind), len(tree)) is spec:
                return list(tree)
        elif _STRING.issuperset(map(type, tree)) and spec_of_keys(tuple(tree)) is spec:
            return list(tree.values())
    try:
        subtrees: list[Any] | None = spec.flatten_up_to(tree)
        if subtrees is None:
            subtrees = _by_optree(spec).flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        leaves, tree_spec = flatten(tree)
        spec, tree_spec = _by_optree(spec), _by_optree(tree_spec)
        expected, got = Subtree(spec_root, spec), Subtree(root, tree_spec, leaves)
        fallback = f"the structure of {spec_root}", str(error)
        fix = f"give {root} the containers and keys of {spec_root}"
        raise mismatch(expected, got, fallback, fix) from None
    return subtrees


def broadcast_prefix(
    prefix: PyTree, prefix_root: str, tree: PyTree, root: str, value: str = "one value"
) -> list[Any]:
    """Return the leaves of `prefix`, each repeated for the leaves of `tree` below it."""
    values, prefix_spec = flatten(prefix)
    spec, prefix_spec = _by_optree(flatten(tree)[1]), _by_optree(prefix_spec)
    try:
        below = cast("list[Any]", prefix_spec.flatten_up_to(tree))
        # The whole tree gives the order: optree.broadcast_prefix has the key order of the prefix.
        parts = [flatten(part) for part in below]
        full = [
            part_spec.unflatten([value] * len(leaves))
            for value, (leaves, part_spec) in zip(values, parts, strict=True)
        ]
        return cast("list[Any]", spec.flatten_up_to(prefix_spec.unflatten(full)))
    except (ValueError, TypeError) as error:
        expected, got = Subtree(root, spec), Subtree(prefix_root, prefix_spec, values)
        fallback = f"a prefix of the structure of {root}", str(error)
        fix = f"give {prefix_root} the containers and keys of {root}, or {value} for a branch"
        raise mismatch(expected, got, fallback, fix, prefix=True) from None


def children(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Return the top level of `tree`, and the function that builds such a level."""
    spec = top_level(tree)
    return cast("list[Any]", spec.flatten_up_to(tree)), spec.unflatten


def top_level(tree: PyTree) -> optree.PyTreeSpec:
    """Return the structure of the top level of `tree`."""
    options: Any = {"none_is_leaf": True, "namespace": _NAMESPACE}
    if not optree.tree_is_leaf(tree, **options):  # torch.compile traces it since 2.11
        below, metadata, _, rebuild = optree.tree_flatten_one_level(tree, **options)
        tree = cast("Any", rebuild)(metadata, [None] * len(below))
    return optree.tree_structure(tree, **options)


# optree matches these with each other, by key.
MAPPINGS = (dict, OrderedDict, defaultdict)
_MOST_KEYS = 6  # in an error


class Subtree(NamedTuple):
    """A part of a tree, with its path; the leaves are needed where they are to be described."""

    path: str
    spec: Structure
    leaves: Sequence[Any] = ()

    def children(self) -> Iterator[tuple[Any, Subtree]]:
        """Yield the keys, or indices, of the top level, and what is there."""
        begin = 0
        top: Any = self.spec.one_level()
        entries = zip(self.spec.entries(), top.accessors(), self.spec.children(), strict=True)
        for key, accessor, spec in entries:
            end = begin + spec.num_leaves
            yield key, Subtree(accessor.codify(self.path), spec, self.leaves[begin:end])
            begin = end

    def describe(self) -> str:
        """Return what this is: a leaf by its type and size, a container by its type."""
        return describe(self.leaves[0]) if self.spec.is_leaf() else _container(self.spec)


def mismatch(
    expected: Subtree, got: Subtree, fallback: tuple[str, str], fix: str, *, prefix: bool = False
) -> StructureError:
    """Return the error that says where two trees differ; `fallback` if nothing here tells."""
    difference = _first_difference(expected, got, prefix) or (got.path, *fallback)
    return StructureError(message(*difference, fix))


def _first_difference(expected: Subtree, got: Subtree, prefix: bool) -> tuple[str, str, str] | None:
    """Return where, what was expected, and what came; `expected` may be deeper if `prefix`."""
    if (got if prefix else expected).spec.is_leaf():
        return None
    here = _difference_here(expected, got)
    if here is not None:
        return got.path, *here
    children = dict(got.children())
    below = (_first_difference(x, children[key], prefix) for key, x in expected.children())
    return next((difference for difference in below if difference is not None), None)


def _difference_here(expected: Subtree, got: Subtree) -> tuple[str, str] | None:
    spec, mapping = expected.spec, expected.spec.type in MAPPINGS
    sized = f"{_sized(spec)}, as {expected.path} is"
    if spec.type is not got.spec.type and not (mapping and got.spec.type in MAPPINGS):
        if spec.is_leaf():
            return f"a leaf, as {expected.path} is", got.describe()
        if mapping and spec.num_children:
            keys = f"with the keys of {expected.path} ({_keys(spec.entries())})"
            return f"{_container(spec)} {keys}", got.describe()
        return sized, got.describe()
    if mapping:
        return _key_difference(expected, got)
    if spec.num_children != got.spec.num_children:
        return sized, _sized(got.spec)
    if spec.one_level() != got.spec.one_level():
        return f"{_container(spec)} with the metadata of {expected.path}", "one with other metadata"
    return None


def _key_difference(expected: Subtree, got: Subtree) -> tuple[str, str] | None:
    keys, other_keys = expected.spec.entries(), got.spec.entries()
    extra = [key for key in other_keys if key not in set(keys)]
    missing = [key for key in keys if key not in set(other_keys)]
    if not missing and not extra:
        return None
    same = f"the keys of {expected.path} ({_keys(keys)})"
    if not missing:
        return same, f"also the key {extra[0]!r}"
    other = f", but {_closest(missing[0], extra)!r}" if extra else ""
    return same, f"no key {missing[0]!r}{other}"


def _closest(key: object, candidates: Sequence[Any]) -> object:
    from difflib import get_close_matches  # for errors only: it takes time to import

    by_text = {str(candidate): candidate for candidate in reversed(candidates)}
    close = get_close_matches(str(key), by_text, 1)
    return by_text[close[0]] if close else candidates[0]


def _keys(keys: Sequence[object]) -> str:
    shown = ", ".join(map(repr, keys[:_MOST_KEYS]))
    return shown if len(keys) <= _MOST_KEYS else f"{shown}, ... {len(keys)} in all"


def _sized(spec: Structure) -> str:
    count = spec.num_children
    return f"{_container(spec)} of {count} item{'' if count == 1 else 's'}"


def _container(spec: Structure) -> str:
    name = getattr(spec.type, "__name__", "container")
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
