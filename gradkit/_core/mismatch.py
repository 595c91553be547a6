"""The first place where two trees differ, for errors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gradkit.errors import StructureError, describe, message

if TYPE_CHECKING:
    from gradkit._core.pytree import Structure

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
