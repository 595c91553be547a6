"""Statistics of gradients: those of plain torch, read from the device once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gradkit
from gradkit.report import GradStats, norms
from tests.host_reads import host_reads

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
LEAVES = st.none() | st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([0.0, 1.0, 1e4, math.inf, math.nan]),
)


def made(device: torch.device, drawn: Any) -> Tensor | None:
    """Return a tensor with one special entry, if it has any."""
    if drawn is None:
        return None
    dtype, shape, special = drawn
    x = torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
    if x.numel():
        x.view(-1)[0] = special
    return x


def expected(grads: list[Tensor], scale: float = 1.0) -> GradStats:
    """Return the statistics of plain torch, in float64."""
    flat = torch.cat([x.flatten().to(torch.complex128) for x in grads]) / scale
    sizes = flat.abs()
    largest = sizes.nan_to_num(math.inf, math.inf).max().item() if len(flat) else 0.0
    norm = torch.linalg.vector_norm(flat).item()
    return GradStats(norm, largest, int((~flat.isfinite()).sum()), None)


def assert_equal(ours: GradStats | None, theirs: GradStats) -> None:
    assert ours is not None
    assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True)


@given(drawn=st.lists(LEAVES, min_size=1, max_size=5), scale=st.sampled_from([None, 1.0, 1024.0]))
def test_statistics_are_those_of_torch(
    device: torch.device, drawn: list[Any], scale: float | None
) -> None:
    leaves = [made(device, one) for one in drawn]
    grads: dict[str, Any] = {"part0": {}, "part1": {}, "last": leaves[0]}
    for index, leaf in enumerate(leaves):
        grads[f"part{index % 2}"][f"w{index}"] = leaf
    scaler = None if scale is None else torch.amp.GradScaler(device.type, init_scale=scale)
    each, by_part = (norms(grads, scaler=scaler, depth=depth) for depth in (None, 1))
    present = [x for x in [*leaves, leaves[0]] if x is not None]
    compared: list[tuple[GradStats | None, list[Tensor]]] = [
        (each.total, present),
        (by_part.total, present),
        (by_part.rows.get("part0"), [x for x in leaves[::2] if x is not None]),
    ]
    for index, leaf in enumerate(leaves):
        row = each.rows[f"part{index % 2}.w{index}"]
        assert (row is None) == (leaf is None)
        compared.append((row, [x for x in [leaf] if x is not None]))
    for ours, tensors in compared:
        if tensors:
            assert_equal(ours, expected(tensors, scale or 1.0))
    logged = each.to_dict("g")
    assert all(type(number) is float for number in logged.values())
    assert len(logged) == 3 * (1 + len(present))
    assert {name for name in logged if "/norm/" in name} == {
        f"g/norm/{name}" for name, row in each.rows.items() if row
    }


def step(device: torch.device) -> tuple[nn.Module, Any]:
    model = nn.ModuleDict({
        "body": nn.Linear(2, 3),
        "head": nn.Linear(3, 1),
        "off": nn.Linear(1, 1),
    })
    model.to(device)
    loss = model["head"](model["body"](torch.ones(4, 2, device=device))).sum()
    return model, gradkit.value_and_grads(loss, model, unused="none")[1]


def test_ratios_are_those_of_the_params(device: torch.device) -> None:
    model, grads = step(device)
    result = norms(grads, params=model, depth=1)
    head = model["head"]
    own = torch.cat([p.detach().flatten() for p in head.parameters()])
    row = result.rows["head"]
    assert row is not None
    assert row.ratio == pytest.approx(row.norm / own.norm().item())
    assert result.rows["off"] is None
    assert result.total.norm == pytest.approx(gradkit.tree.global_norm(grads).item())
    assert result.to_dict()["grad/ratio/head"] == row.ratio
    zero = {"w": torch.zeros(2, device=device)}
    assert norms({"w": torch.ones(2, device=device)}, params=zero).total.ratio == math.inf


def test_a_tied_tensor_is_in_the_total_once(device: torch.device) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    params = {"in": w, "out": [w]}
    _, grads = gradkit.value_and_grads((3 * w).sum(), params)
    assert norms(grads, params=params).total.norm == pytest.approx(3 * 2**0.5)
    assert norms(grads).total.norm == pytest.approx(6.0)  # nothing tells that it is tied


@pytest.mark.parametrize("scaled", [False, True])
def test_the_host_waits_once(device: torch.device, scaled: bool) -> None:
    model, grads = step(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0) if scaled else None
    with host_reads() as seen:
        norms(grads, params=model, scaler=scaler)
    assert seen == ["tolist"]


def test_it_prints(device: torch.device) -> None:
    _, grads = step(device)
    grads["head.bias"].fill_(math.nan)
    text = str(norms(grads))
    assert text.startswith("6 rows, norm nan; 2 without a gradient; not finite: 1 number.\n")
    assert re.search(r"\nhead.bias +nan +inf +1\n", text)
    assert re.search(r"\noff.weight +none\n", text)
    assert "head.bias" in norms(grads)._repr_html_()
    assert str(norms({"a": None})).startswith("1 row, norm 0; 1 without a gradient.")


def test_layouts(device: torch.device) -> None:
    """Sparse gradients, a scalar, float8, and an expanded tensor."""
    sparse = torch.eye(3, device=device).to_sparse()
    eighth = torch.full((2,), 2.0, device=device).to(torch.float8_e4m3fn)
    wide = torch.ones(1, device=device).expand(4)
    grads = {"s": sparse, "e": eighth, "w": wide, "n": torch.tensor(-3.0, device=device)}
    result = {name: row and (row.norm, row.max_abs) for name, row in norms(grads).rows.items()}
    assert result["n"] == (3.0, 3.0)
    assert result["w"] == (2.0, 1.0)
    assert result["e"] == pytest.approx((8**0.5, 2.0))
    assert result["s"] == pytest.approx((3**0.5, 1.0))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda g: norms(g, depth=0), gradkit.OptionError, "depth"),
        (lambda g: norms(g, depth=True), gradkit.OptionError, "depth"),
        (lambda g: norms(g, scaler=2.0), gradkit.OptionError, "scaler"),
        (lambda g: norms({"w": 1.0}), gradkit.LeafTypeError, r"grads\['w'\]"),
        (lambda g: norms({"w": g["w"].long()}), gradkit.LeafTypeError, r"grads\['w'\]"),
        (lambda g: norms(g, params={"x": g["w"]}), gradkit.StructureError, "params"),
        (lambda g: norms(g, params={"w": None}), gradkit.StructureError, r"params\['w'\]"),
        (lambda g: norms(g, params={"w": g["w"][:1]}), gradkit.StructureError, r"params\['w'\]"),
    ],
)
def test_what_is_refused(
    device: torch.device, call: Callable[[Any], object], error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        call({"w": torch.ones(2, device=device)})
