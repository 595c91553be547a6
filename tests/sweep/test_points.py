"""At degenerate points torch gives no wrong number that is not known, and gradkit none at all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from gradkit._compat import versions
from tests.sweep.cases import D, modules, operations
from tests.sweep.degenerate import at_limits, points_of
from tests.sweep.extra import extra
from tests.sweep.findings import Found, at_points
from tests.sweep.points import derivatives, differences, directions
from tests.sweep.programs import Case

here = pytest.mark.skipif(versions.is_untested(), reason="a torch that gradkit was not run on")
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about sparse tensors and old names

# Operations that torch gets wrong at a point, and gradkit right: of its table, or called here.
MENDED = {
    "pow": ("pow", "all 0 in [1]"),
    "polar": ("polar", "all 0 in [0]"),
    "block_diag": ("block_diag", "no rows in [1]"),
    "linalg.vander": ("vander", "all 0 in [0]"),
    "det: matrix": ("det", "a row of zeros in [0]"),
    "logcumsumexp: all": ("logcumsumexp", "rising far in [0]"),
    "sinc": ("sinc", "all 0 in [0]"),
    "softshrink: of nothing": ("softshrink", "all 0 in [0]"),
    "hardshrink: of nothing": ("hardshrink", "all 0 in [0]"),
    "cosine_similarity: below eps": ("cosine_similarity", "as it is"),
    "binary_cross_entropy: of a sigmoid": ("binary_cross_entropy", "as it is"),
}


def cases_of(name: str, count: int) -> list[Case]:
    given = extra() | at_limits()
    return [given[name]] if name in given else dict(operations())[name](count)


@here
@pytest.mark.slow
@pytest.mark.parametrize("name", MENDED)
def test_what_torch_gets_wrong_at_a_point_is_found_and_right_here(
    device: torch.device, name: str
) -> None:
    operation, point = MENDED[name]
    found = at_points(cases_of(name, 3), named={point, "as it is"})
    wrong = [one for one in found.findings if one.torch == "wrong"]
    assert {one.operation for one in wrong} == {operation}
    assert any(one.gradkit == "right" for one in wrong)
    assert [one for one in found.findings if one.is_new] == []


@here
@pytest.mark.slow
def test_no_number_is_wrong_at_a_point_that_is_not_known(device: torch.device) -> None:
    """A sample of one in eighty; `python -m tests.sweep --points` tries all."""
    total = Found()
    for _, make in list(chain(operations(), modules()))[7::80]:
        total.add(at_points(make(2), most=12))
    assert [one for one in total.findings if one.is_new] == []
    assert total.judged > 50


class Branching(torch.autograd.Function):
    """A square plus the thing itself, whose derivative is lost at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x + x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.where(x == 0, 0, 2 * x + 1)


def test_the_sweep_sees_a_derivative_that_is_lost_at_zero(device: torch.device) -> None:
    case = Case("branching", Branching.apply, (torch.tensor([0.5, 1.5], dtype=D),))
    found = at_points([case])
    new = {one.where for one in found.findings if one.is_new and one.program == "eager 1"}
    zeros = {"all 0", "one zero", "a zero in each row", "two zeros", "a row of zeros"}
    assert {f"call 0, {name} in [0]" for name in zeros} <= new
    assert not any("all 1 " in where or "as it is" in where for where in new)


def mean_of_a_sort(x: Tensor) -> Tensor:
    return x.sort().values[:1] - x.sort().values[1:2]


def homogeneous(x: Tensor) -> Tensor:
    """Odd, so that the slopes along a line agree, and not linear."""
    return (x[:1] ** 3 / x.square().sum().clamp_min(1e-300)).reshape(1)


@pytest.mark.parametrize("fn", [torch.abs, torch.relu, mean_of_a_sort, homogeneous])
def test_where_there_is_no_derivative_none_is_judged(
    device: torch.device, fn: Callable[[Tensor], Tensor]
) -> None:
    zeros = (torch.zeros(3, dtype=D),)
    assert derivatives(Case("", fn, zeros), directions(zeros, relative=False)) == [None, None]


def test_the_differences_are_derivatives(device: torch.device) -> None:
    point = (torch.tensor([0.0, 2.0, -1.0], dtype=D),)
    along = directions(point, relative=False)
    cubes = Case("", lambda x: x**3 + x.exp(), point)
    value = cubes.outputs(*point).sum()
    first = differences(lambda x: cubes.outputs(x).sum(), value, point, along[:2])
    right = ((3 * point[0] ** 2 + point[0].exp()) * along[0][0]).sum()
    assert first is not None
    torch.testing.assert_close(first, right, rtol=1e-7, atol=1e-7)
    assert differences(lambda x: x.sum(), value, point, along[:2]) is None  # it jumps


def test_the_points_are_of_every_kind(device: torch.device) -> None:
    case = Case("", lambda x, y: x + y, (torch.randn(3, 3, dtype=D), torch.randn(3, 3, dtype=D)))
    points = dict(points_of(case))
    (x, y) = points["of rank n - 1 in [0]"].point
    assert torch.linalg.matrix_rank(x) == 2
    assert torch.equal(y, case.point[1])
    assert torch.equal(*points["1 equal to 0"].point)
    singular = torch.linalg.svdvals(points["rotation in [1]"].point[1])
    torch.testing.assert_close(singular, torch.ones(3, dtype=D))
    assert len(points) > 100
