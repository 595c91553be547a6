"""Operations in what torch.compile compiles: right, or refused, as they are without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import exc
from torch.overrides import get_testing_overrides

import gradkit
from gradkit import func
from gradkit._torch_bugs import table
from gradkit._torch_bugs.traced_operations import name_of
from tests.helpers import others_slow

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    # What torch says of itself while it compiles a frame whose argument is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning"),
]

D = torch.float64
LIBRARY = torch.library.Library("gradkit_compiled", "FRAGMENT")
LIBRARY.define("cube(Tensor x) -> Tensor")
LIBRARY.impl("cube", lambda x: x**3, "CompositeExplicitAutograd")
torch.library.register_fake("gradkit_compiled::cube", torch.empty_like, lib=LIBRARY)


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager", fullgraph=True)


# --- what torch.compile shows to no mode: functions that torch does not list as overridable

UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.normal": lambda x: torch.normal(x, 1.0),
    "torch.sinc_": lambda x: torch.sinc_(x.clone()),
    "torch.xlogy_": lambda x: torch.xlogy_(x.clone(), x),
    "torch.ops.gradkit_compiled.cube": torch.ops.gradkit_compiled.cube,
}


@pytest.mark.parametrize("name", others_slow(UNSEEN, ["torch.normal", "torch.sinc_"]))
def test_a_function_of_which_no_mode_is_told_is_refused(device: torch.device, name: str) -> None:
    x = torch.tensor([0.0, 0.5], dtype=D, device=device)
    call = compiled(lambda x: func.hvp(lambda x: (UNSEEN[name](x) + x).sum(), x, x)[1])
    with pytest.raises(exc.Unsupported, match=rf"{name}: expected.*What to do"):
        call(x)


def test_of_constants_it_is_not_refused(device: torch.device) -> None:
    x, mean = torch.tensor([[0.0, 0.5], [1.0, 2.0]], dtype=D, device=device)
    call = compiled(func.value_and_grads(lambda x: (torch.normal(mean, 1.0).sum() * x).sum()))
    torch.manual_seed(0)
    grads = call(x)[1]
    torch.manual_seed(0)
    assert torch.equal(grads, torch.normal(mean, 1.0).sum().expand(2))


# What the table has, and torch does not list; of another torch, fewer. The rest are private.
UNLISTED = {
    "i0_",
    "linspace",
    "logspace",
    "normal",
    "sinc_",
    "sparse_coo_tensor",
    "vander",
    "xlogy_",
}


def test_what_torch_does_not_list_is_known_and_looked_up(device: torch.device) -> None:
    listed = get_testing_overrides()
    functions = {
        name: getattr(torch, name)
        for name in table.ALIASES
        if hasattr(torch, name) and getattr(torch, name) not in listed
    }
    public = {name for name in functions if not name.startswith("_")}
    assert public
    assert public <= UNLISTED | {"solve", "eig"}  # of which torch has only an error
    assert all(name_of(function) in table.EVERY for function in functions.values())


# --- what torch.compile cannot trace as the monitor first did it

TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor.unflatten": lambda x: x.unflatten(0, (1, -1)).square().sum(),
    "nn.Unflatten": lambda x: nn.Unflatten(0, (1, 2))(x).square().sum(),
    "torch.func.jacfwd": lambda x: torch.func.jacfwd(torch.sin)(x).square().sum(),
    "torch.linspace of ends": lambda x: torch.linspace(x[0], x[1], 2).sin().sum(),
    "torch.linspace": lambda x: (torch.linspace(0, 1, 2, dtype=D, device=x.device) * x).sum(),
    "torch.logspace": lambda x: (torch.logspace(0, 1, 2, dtype=D, device=x.device) * x).sum(),
    "torch.xlogy": lambda x: torch.xlogy(x + 1, x + 1).sum(),
}


@pytest.mark.parametrize("name", others_slow(TRACED, ["nn.Unflatten", "torch.xlogy"]))
def test_it_is_traced(device: torch.device, name: str) -> None:
    x = torch.tensor([0.3, 0.5], dtype=D, device=device)
    call = func.value_and_grads(TRACED[name])
    torch.testing.assert_close(compiled(call)(x), call(x))


def test_a_method_that_torch_wraps_is_looked_up_once(device: torch.device) -> None:
    """A guard that a dictionary has no such key would fail at once for `Tensor.norm`."""
    x = torch.tensor([0.3, 0.5], dtype=D, device=device)
    call: Any = lambda x: func.hvp(lambda x: x.norm(), x, x.cos())[1]  # noqa: E731
    torch.testing.assert_close(compiled(call)(x), call(x))


# --- torch.export

EXPORTED: dict[str, Callable[[Tensor], Any]] = {
    "value_and_grads": lambda x: func.value_and_grads(lambda x: (x**3).sum())(x)[1],
    "per_loss_grads": func.per_loss_grads(lambda x: x**3),
    "per_sample_grads": lambda x: func.per_sample_grads(lambda w, x: (w * x).sum())(x, x[None]),
    "hvp": lambda x: func.hvp(lambda x: (x**3).sum(), x, x)[1],
    "jvp": lambda x: func.jvp(torch.sin, x, x)[1],
    "vjp": lambda x: func.vjp(torch.sin, x)[1](x),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", others_slow(EXPORTED, ["value_and_grads"]))
def test_an_export_of_a_call_is_refused(device: torch.device, name: str, strict: bool) -> None:
    """The program would return what was never written."""

    class Calling(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return EXPORTED[name](x)

    x = torch.ones(2, dtype=D, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            exc.Unsupported if strict else gradkit.UnsupportedGraphError, match=r"got torch\.export"
        ):
            torch.export.export(Calling(), (x,), strict=strict)


def test_the_model_is_exported_and_then_differentiated(device: torch.device) -> None:
    """As the message advises."""
    model, x = nn.Linear(2, 1).to(device), torch.ones(2, device=device)
    program = torch.export.export(model, (x,)).module()
    _, grads = gradkit.value_and_grads(program(x).sum(), program)
    torch.testing.assert_close(grads["weight"], x[None])


# --- dynamic=True, which makes symbols of Python's integers, too

DYNAMIC: dict[str, Callable[..., Any]] = {
    "argnums": func.value_and_grads(lambda x, y: (x * y).square().sum(), argnums=(1, 0)),
    "the last": func.value_and_grads(lambda x, y: (x * y).square().sum(), argnums=-1),
    "per_loss_grads": func.per_loss_grads(lambda x, y: x**2 * y, chunk_size=1),
    "per_sample_grads": func.per_sample_grads(lambda x, y: (x * y).square().sum()),
}


@pytest.mark.parametrize("name", others_slow(DYNAMIC, ["argnums"]))
def test_dynamic_shapes(device: torch.device, name: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(DYNAMIC[name], backend="eager", fullgraph=True, dynamic=True)
    for size in (2, 3):
        x = torch.arange(1.0, size + 1, dtype=D, device=device)
        torch.testing.assert_close(call(x, x.cos()), DYNAMIC[name](x, x.cos()))


# --- a graph break inside of fn, which torch.func runs uncompiled

BROKEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "value_and_grads": lambda fn, x: func.value_and_grads(fn)(x),
    "per_loss_grads": lambda fn, x: func.per_loss_grads(lambda x: [fn(x), x.sum()])(x),
    "hvp": lambda fn, x: func.hvp(fn, x, x),
    "jvp": lambda fn, x: func.jvp(fn, x, x),
    "vjp": lambda fn, x: func.vjp(fn, x)[1](torch.ones((), dtype=D, device=x.device)),
    "per_sample_grads": lambda fn, x: func.per_sample_grads(lambda x, y: fn(x) * y)(x, x),
}


@pytest.mark.parametrize("name", others_slow(BROKEN, ["value_and_grads", "jvp"]))
def test_a_graph_that_breaks_inside_of_fn(device: torch.device, name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return (x**3).sum()

    torch._dynamo.reset()
    x = torch.tensor([0.3, 0.5], dtype=D, device=device)
    call = torch.compile(lambda x: BROKEN[name](fn, x.sin()), backend="eager")
    torch.testing.assert_close(call(x), BROKEN[name](fn, x.sin()))
    torch.testing.assert_close(call(x + 1), BROKEN[name](fn, (x + 1).sin()))
