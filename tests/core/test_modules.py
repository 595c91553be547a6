"""The parameters of a module are listed as torch lists them, whatever its parts are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradkit._core import pytree
from gradkit._core.modules import list_distinct, named_parameters


class Container(nn.Module):
    """What holds parameters and parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))


class Renamed(nn.Module):
    """One that lists its parameter by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in super().named_parameters(*args, **options):
            yield f"{name}_", param


class Hiding(nn.Module):
    """One of whose parts nobody is told."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1)

    def named_modules(self, memo: Any = None, prefix: str = "", *_: Any) -> Iterator[Any]:
        yield prefix, self


def as_torch(module: nn.Module) -> tuple[dict[str, Tensor], set[type]]:
    return dict(module.named_parameters()), set(map(type, module.modules()))


def same(module: nn.Module) -> bool:
    """Whether both list the same: names in their order, the very tensors, the classes."""
    (ours, classes), (theirs, their_classes) = named_parameters(module), as_torch(module)
    order = list(ours) == list(theirs)
    alike = order and all(ours[n] is theirs[n] for n in theirs) and classes == their_classes
    distinct = list_distinct(module)
    if distinct is None:
        return alike
    tensors, spec, of_distinct = distinct
    tree = pytree.unflatten(spec, tensors)
    in_order = list(tree.items()) == list(theirs.items())
    return alike and in_order and spec == pytree.flatten(theirs)[1] and of_distinct == classes


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    """Modules in each other, in several places too, with parameters that may be tied or None."""
    tensors = [nn.Parameter(torch.ones(())) for _ in range(3)]
    nodes: list[nn.Module] = [Container()]
    for index in range(draw(st.integers(0, 6))):
        # Mostly containers: torch itself lists a tree in which one of the others is.
        node = draw(st.sampled_from([Container] * 10 + [Renamed, Hiding]))()
        parents = draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=2, unique=True))
        for parent in parents:
            parent.add_module(f"part{index}", node)
        nodes.append(node)
    for node in draw(st.lists(st.sampled_from(nodes), max_size=6)):
        name = draw(st.sampled_from("abc"))
        if draw(st.booleans()):
            node.register_parameter(name, draw(st.sampled_from([*tensors, None])))
        else:
            node.register_module(f"no_{name}", None)
    if draw(st.integers(0, 3)) == 0:  # a module inside of itself
        draw(st.sampled_from(nodes)).add_module("cycle", draw(st.sampled_from(nodes)))
    return nodes[0]


@given(module=trees())
def test_parameters_are_listed_as_torch_does(device: torch.device, module: nn.Module) -> None:
    assert same(module)


def test_names_follow_the_module(device: torch.device) -> None:
    module = nn.Sequential(Container(), nn.Sequential(nn.Linear(1, 1)))
    assert list_distinct(module) is not None
    for change in (
        lambda: module[0].register_parameter("bias", module[0].weight),  # tied
        lambda: module[0].register_parameter("bias", nn.Parameter(torch.ones(()))),
        lambda: module[0].register_parameter("bias", None),
        lambda: module[1].append(module[0]),  # the same part in two places
        lambda: setattr(module, "1", nn.Linear(1, 1, bias=False)),
        lambda: module.add_module("0", None),
        lambda: module.append(nn.Sequential(nn.Sequential(), Container())),
    ):
        change()
        assert same(module)


@pytest.mark.parametrize("name", ["named_parameters", "named_modules"])
def test_a_method_of_the_instance_is_called(device: torch.device, name: str) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    setattr(module, name, lambda *_, **__: iter(()))
    assert same(module)


def test_a_class_that_is_patched_later_is_asked(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    assert same(module)
    monkeypatch.setattr(nn.Sequential, "named_parameters", lambda *_, **__: iter(()))
    assert named_parameters(module)[0] == {}


def test_of_two_parameters_of_one_name_the_last_is_listed(device: torch.device) -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    setattr(module, "0.0", nn.Linear(1, 1))
    assert same(module)
    assert list_distinct(module) is None
