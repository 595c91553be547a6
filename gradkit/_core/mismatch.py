"""The first place where two trees differ, for errors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gradkit.errors import StructureError, describe, message

if TYPE_CHECKING:
    from gradkit._core.pytree import Structure

# optree matches these with each other, by key.
_MAPPINGS = (dict, OrderedDict, defaultdict)
_MOST_KEYS = 6


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


class Difference(NamedTuple):
    """Where two trees differ, and how."""

    where: str
    expected: str
    got: str

    def error(self, advice: str) -> StructureError:
        """Return the error that says so."""
        return StructureError(message(*self, advice))


def first_difference(expected: Subtree, got: Subtree, *, prefix: bool) -> Difference | None:
    """Return the first difference; one tree may be deeper: `expected` if `prefix`, else `got`."""
    if (got if prefix else expected).spec.is_leaf():
        return None
    here = _container_difference(expected, got) or _content_difference(expected, got)
    if here is not None:
        return Difference(got.path, *here)
    children = dict(got.children())
    below = (first_difference(x, children[key], prefix=prefix) for key, x in expected.children())
    return next((difference for difference in below if difference is not None), None)


def _container_difference(expected: Subtree, got: Subtree) -> tuple[str, str] | None:
    kinds = expected.spec.type, got.spec.type
    if kinds[0] is kinds[1] or all(kind in _MAPPINGS for kind in kinds):
        return None
    if expected.spec.is_leaf():
        return f"a leaf, as {expected.path} is", got.describe()
    if expected.spec.type in _MAPPINGS and expected.spec.num_children:
        keys = _keys(expected.spec.entries())
        return (
            f"{_container(expected.spec)} with the keys of {expected.path} ({keys})",
            got.describe(),
        )
    return f"{_sized(expected.spec)}, as {expected.path} is", got.describe()


def _content_difference(expected: Subtree, got: Subtree) -> tuple[str, str] | None:
    if expected.spec.type in _MAPPINGS:
        return _key_difference(expected, got)
    if expected.spec.num_children != got.spec.num_children:
        return f"{_sized(expected.spec)}, as {expected.path} is", _sized(got.spec)
    if expected.spec.one_level() != got.spec.one_level():
        same = f"{_container(expected.spec)} with the metadata of {expected.path}"
        return same, "one with other metadata"
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
