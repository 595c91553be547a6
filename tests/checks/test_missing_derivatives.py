"""Operations without any derivative in torch: each call says so, and what has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from gradkit import func, meta
from gradkit._torch_bugs.missing import missing_derivative
from tests.helpers import unchanged

D = torch.float64
Function = Callable[[Tensor], Tensor]


def vector(device: torch.device) -> Tensor:
    return torch.tensor([1.5, 0.7, 2.2], dtype=D, device=device)


def square(device: torch.device) -> Tensor:
    return torch.tensor([[3.0, 0.5, 0.2], [0.1, 2.0, 0.3], [0.4, 0.6, 4.0]], dtype=D, device=device)


def tall(device: torch.device) -> Tensor:
    return torch.cat([square(device), vector(device)[None]])


def phases(a: Tensor) -> Tensor:
    return torch.linalg.svd(torch.complex(a, a.sin()))[0].real


def renormalized(a: Tensor) -> Tensor:
    words = torch.zeros(1, dtype=torch.long, device=a.device)
    return torch.embedding_renorm_(a * 1, words, 1.0, 2.0)


# By what the message names: a function, and where.
CASES: dict[str, tuple[Function, Callable[[torch.device], Tensor]]] = {
    r"gammainc\(a, x\) by a": (lambda a: torch.special.gammainc(a, a.detach()), vector),
    r"gammaincc\(a, x\) by a": (lambda a: torch.igammac(a, a.detach()), vector),
    r"zeta\(s, x\) by s": (lambda a: torch.special.zeta(a + 1, a.detach()), vector),
    "torch.geqrf": (lambda a: torch.geqrf(a)[0], square),
    "ldl_factor": (lambda a: torch.linalg.ldl_factor(a @ a.mT)[0], square),
    "ldl_solve": (
        lambda a: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a.detach() @ a.detach().mT), a),
        square,
    ),
    "mode='complete'": (lambda a: torch.linalg.qr(a, mode="complete")[0], tall),
    "mode='r'": (lambda a: torch.linalg.qr(a, mode="r")[1], tall),
    "torch.unique": (torch.unique, vector),
    "torch.unique with dim": (lambda a: torch.unique(a, dim=0), square),
    "unique_consecutive": (torch.unique_consecutive, vector),
    "acosh_": (lambda a: (a + 1).acosh_(), vector),
    "torch.histogram": (lambda a: torch.histogram(a, 3)[1], vector),
    "torch.heaviside": (lambda a: torch.heaviside(a, a), vector),
    "embedding_renorm_": (renormalized, square),
    "the loss takes the phase": (phases, square),
}


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def eagerly(call: Callable[..., object]) -> Callable[[Function, Tensor], object]:
    def run(fn: Function, x: Tensor) -> object:
        w = leaf(x)
        y = fn(w)
        with unchanged(w):
            return call([y.sum(), y.square().sum()], w)

    return run


def batched(losses: list[Tensor], w: Tensor) -> object:
    return gradkit.per_loss_grads(torch.stack(losses), w, strategy="batched")


WAYS: dict[str, Callable[[Function, Tensor], object]] = {
    "value_and_grads": eagerly(gradkit.value_and_grads),
    "create_graph": eagerly(
        lambda losses, w: gradkit.value_and_grads(losses, w, create_graph=True)
    ),
    "per_loss_grads": eagerly(gradkit.per_loss_grads),
    "batched": eagerly(batched),
    "gram": eagerly(gradkit.gram),
    "backward_": eagerly(lambda losses, w: gradkit.backward_(losses)),
    "func": lambda fn, x: func.value_and_grads(lambda w: fn(w).sum())(x),
    "func.vjp": lambda fn, x: func.vjp(fn, x)[1](torch.ones_like(fn(x))),
    "func.jvp": lambda fn, x: func.jvp(fn, (x,), (torch.ones_like(x),)),
    "func.per_loss_grads": lambda fn, x: func.per_loss_grads(lambda w: [fn(w).sum(), w.sum()])(x),
    "hvp": lambda fn, x: func.hvp(lambda w: fn(w).square().sum(), x, x),
    "hvp, reverse": lambda fn, x: func.hvp(
        lambda w: fn(w).square().sum(), x, x, mode="reverse-over-reverse"
    ),
    "unroll": lambda fn, x: meta.unroll(
        lambda p, _, b: fn(p).sum(), leaf(x), [None], meta.sgd(0.1)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_named_in_every_call(device: torch.device, name: str) -> None:
    fn, point = CASES[name]
    for way, run in WAYS.items():
        if name == "the loss takes the phase" and way in {"func.jvp", "batched", "gram"}:
            continue  # torch has it in forward mode, and cannot batch it
        x = point(device)
        match = f"operations that have a derivative in torch, got .*{name}.*\n.*What to do"
        with pytest.raises(gradkit.UnsupportedGraphError, match=match):
            run(fn, x)


ADVICE: dict[str, tuple[str, Function, Function, Callable[[torch.device], Tensor]]] = {
    "gammainc": (
        "a.detach()",
        lambda x: torch.special.gammainc(vector(x.device), x),
        lambda x: x ** (vector(x.device) - 1) * (-x - torch.lgamma(vector(x.device))).exp(),
        vector,
    ),
    "zeta": (
        "s.detach()",
        lambda x: torch.special.zeta(3.0 + x.detach() * 0, x),
        lambda x: -3 * torch.special.zeta(torch.full_like(x, 4.0), x),
        vector,
    ),
    "acosh_": (
        "x.acosh(), not in place",
        lambda x: (x + 1).acosh(),
        lambda x: ((x + 1) ** 2 - 1).rsqrt(),
        vector,
    ),
    "geqrf": (
        "torch.linalg.qr(a)",
        lambda a: torch.linalg.qr(a)[1].diagonal().abs().log(),
        lambda a: torch.linalg.inv(a).mT,
        square,
    ),
    "ldl_factor": (
        "torch.linalg.lu_factor(a)",
        lambda a: torch.linalg.lu_factor(a)[0].diagonal().abs().log(),
        lambda a: torch.linalg.inv(a).mT,
        square,
    ),
    "ldl_solve": (
        "torch.linalg.solve(a, b)",
        lambda b: torch.linalg.solve(square(b.device), b),
        lambda b: torch.linalg.inv(square(b.device)).sum(0)[:, None].expand_as(b),
        square,
    ),
    "unique": ("torch.sort(x)[0]", lambda x: torch.sort(x)[0], torch.ones_like, vector),
    "bincount": (
        "torch.zeros(size).index_add(0, indices, weights)",
        lambda x: x.new_zeros(2).index_add(0, torch.tensor([0, 1, 1], device=x.device), x),
        torch.ones_like,
        vector,
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_it_advises_is_right(device: torch.device, name: str) -> None:
    advice, fn, slope, point = ADVICE[name]
    torch_s = {"gammainc": "igamma: input", "ldl_factor": "aten::linalg_ldl_factor_ex"}
    torch_s |= {"ldl_solve": "aten::linalg_ldl_solve", "unique": "_unique2"}
    torch_s |= {"acosh_": "inplace version of acosh", "bincount": "aten::bincount"}
    reason = missing_derivative(
        RuntimeError(f"derivative for '{torch_s.get(name, name)}' is not implemented.")
    )
    assert reason is not None
    assert advice in reason[2]
    x = point(device)
    _, grad = gradkit.value_and_grads(fn(w := leaf(x)).sum(), w)
    torch.testing.assert_close(grad, slope(x))


def test_a_mode_of_qr_that_has_one(device: torch.device) -> None:
    a = tall(device)
    for index in (0, 1):  # q @ r is a, whatever the signs are
        other = torch.linalg.qr(a)[1 - index].detach()
        w = leaf(a)
        part = torch.linalg.qr(w)[index]
        product = part @ other if index == 0 else other @ part
        assert torch.isfinite(gradkit.value_and_grads(product.sum(), w)[1]).all()


def test_a_constant_of_it(device: torch.device) -> None:
    w = leaf(vector(device))
    _, grad = gradkit.value_and_grads((torch.heaviside(w.detach(), w.detach()) * w).sum(), w)
    assert torch.equal(grad, torch.ones_like(w))


def test_other_errors_are_left_alone(device: torch.device) -> None:
    assert missing_derivative(RuntimeError("out of memory")) is None
    other = "Trying to use forward AD with grid_sampler_2d that does not support it"
    assert missing_derivative(NotImplementedError(other)) is None
    second = missing_derivative(RuntimeError("derivative for aten::x_backward is not implemented"))
    assert second is not None
    assert "second derivative" in second[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_operation_of_torch_s_table_raises_torch_s_own(device: torch.device) -> None:
    from tests.op_db import op_db

    found: dict[str, str] = {}
    for info in op_db:
        if D in info.supported_dtypes("cpu") and "jiterator" not in info.name:
            for sample in info.sample_inputs("cpu", D, requires_grad=True):
                message = _own_error(info.op, sample)
                if message is not None:
                    found[info.full_name] = message
    assert found == {}


def _own_error(operation: Callable[..., Any], sample: Any) -> str | None:
    leaves = [x for x in (sample.input, *sample.args) if isinstance(x, Tensor) and x.requires_grad]
    try:
        result = operation(sample.input, *sample.args, **sample.kwargs)
        outputs = [result] if isinstance(result, Tensor) else [*result]
    except Exception:
        return None  # not the pass: the call itself
    outputs = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    outputs = [y for y in outputs if y.is_floating_point() and y.layout == torch.strided]
    try:
        if outputs and leaves:
            gradkit.value_and_grads([y.sum() for y in outputs], leaves)
    except gradkit.GradkitError:
        return None
    except Exception as error:
        return str(error)[:100]
    return None
