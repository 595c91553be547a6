"""The first place where two trees differ: its path, and what each of them has there."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from typing import Any, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradkit
from gradkit import tree
from gradkit._core import pytree

Pair = namedtuple("Pair", "x y")
Other = namedtuple("Other", "x y")
LEAF = torch.zeros(())


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["weight", "bias", "0.w", 3, None, ("a", 1)])
    lists = st.lists(children, max_size=3)
    dicts = st.dictionaries(keys, children, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        dicts,
        dicts.map(OrderedDict),
        st.tuples(children, children).map(lambda pair: Pair(*pair)),
        st.tuples(children, children).map(lambda pair: Other(*pair)),
    )


any_tree = st.recursive(st.just(LEAF), containers, max_leaves=8)


def at(root: Any, path: str) -> Any:
    """What stands at a path as an error shows it; KeyError and the like if nothing does."""
    return eval("root" + path, {}, {"root": root})


def kind(node: Any) -> Any:
    """What optree tells apart at one level; a tensor is a leaf."""
    if isinstance(node, dict):
        return "dict", set(node)
    return type(node), None if isinstance(node, Tensor) else len(node)


@given(expected=any_tree, got=any_tree)
def test_the_first_difference_exists_and_differs(
    device: torch.device, expected: Any, got: Any
) -> None:
    _, spec = pytree.flatten(expected)
    try:
        pytree.flatten_up_to(spec, "params", got, "grads")
    except gradkit.StructureError as error:
        text = str(error)
        path = text.partition(": expected")[0]
        assert path.startswith("grads")
        path = path.removeprefix("grads")
        assert kind(at(expected, path)) != kind(at(got, path))
        assert "PyTreeSpec" not in text
        assert len(text) < 400
        with pytest.raises(gradkit.StructureError) as again:
            pytree.flatten_up_to(spec, "params", got, "grads")
        assert str(again.value) == text
    else:
        assert_prefix(expected, got)


def assert_prefix(prefix: Any, full: Any) -> None:
    if not isinstance(prefix, Tensor):
        assert kind(prefix) == kind(full)
        keys = prefix if isinstance(prefix, dict) else range(len(prefix))
        for key in keys:
            assert_prefix(prefix[key], full[key])


@given(prefix=any_tree, full=any_tree)
def test_the_first_difference_of_a_prefix(device: torch.device, prefix: Any, full: Any) -> None:
    try:
        pytree.broadcast_prefix(prefix, "weights", full, "losses")
    except gradkit.StructureError as error:
        path = str(error).partition(": expected")[0].removeprefix("weights")
        assert kind(at(prefix, path)) != kind(at(full, path))
    else:
        assert_prefix(prefix, full)


@pytest.mark.parametrize(
    ("expected", "got", "text"),
    [
        (
            {"encoder": {"weight": 1, "bias": 2}},
            {"encoder": {"weight": 1}},
            "grads['encoder']: expected the keys of params['encoder'] ('weight', 'bias'), "
            "got no key 'bias'.",
        ),
        (
            {"weight": 1, "bias": 2},
            {"z": 0, "weight": 1, "bais": 2},
            "grads: expected the keys of params ('weight', 'bias'), "
            "got no key 'bias', but 'bais'.",
        ),
        (
            {"w": 1},
            {"w": 1, "v": 2},
            "grads: expected the keys of params ('w'), got also the key 'v'.",
        ),
        (
            dict.fromkeys(map(str, range(50))),
            {},
            "grads: expected the keys of params ('0', '1', '2', '3', '4', '5', ... 50 in all), "
            "got no key '0'.",
        ),
        (
            [0, [1, 2, 3]],
            [0, [1, 2]],
            "grads[1]: expected a list of 3 items, as params[1] is, got a list of 2 items.",
        ),
        (
            {"a": {"w": 1}},
            {"a": [1]},
            "grads['a']: expected a dict with the keys of params['a'] ('w'), got a list.",
        ),
        ((1,), [1], "grads: expected a tuple of 1 item, as params is, got a list."),
        (Pair(1, 2), Other(1, 2), "grads: expected a Pair of 2 items, as params is, got an Other."),
        (
            {"a": {"w": 1}},
            {"a": torch.zeros(2)},
            "grads['a']: expected a dict with the keys of params['a'] ('w'), "
            "got a float32 tensor of shape (2,) on cpu.",
        ),
        (
            {"a": []},
            {"a": None},
            "grads['a']: expected a list of 0 items, as params['a'] is, got the NoneType None.",
        ),
    ],
)  # fmt: skip
def test_how_a_difference_reads(device: torch.device, expected: Any, got: Any, text: str) -> None:
    with pytest.raises(gradkit.StructureError) as caught:
        pytree.flatten_up_to(pytree.flatten(expected)[1], "params", got, "grads")
    assert str(caught.value).partition("\n")[0] == text


def test_registered_classes_with_other_metadata_differ(device: torch.device) -> None:
    class Tagged:
        def __init__(self, x: Any, tag: str) -> None:
            self.x, self.tag = x, tag

    optree.register_pytree_node(
        cast("Any", Tagged),
        lambda t: ((cast("Any", t).x,), cast("Any", t).tag),
        lambda tag, xs: cast("Any", Tagged(xs[0], tag)),
        namespace="gradkit",
    )
    try:
        one, other = Tagged(LEAF, "one"), Tagged(LEAF, "other")
        assert tree.add({"t": one}, {"t": one})["t"].tag == "one"
        with pytest.raises(gradkit.StructureError, match=r"^b\['t'\]: expected a Tagged with"):
            tree.add({"t": one}, {"t": other})
    finally:
        optree.unregister_pytree_node(Tagged, namespace="gradkit")
