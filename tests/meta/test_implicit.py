"""implicit: against closed forms and differences, with a small memory."""

from __future__ import annotations

import re
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import meta
from tests.helpers import World, assert_same_bits, unchanged

D = torch.float64


class Ridge:
    """Ridge regression: its minimum, and what it does to other data, in closed form."""

    def __init__(self, device: torch.device) -> None:
        make = lambda *shape: torch.randn(shape, dtype=D, device=device)  # noqa: E731
        self.x, self.y, self.new = make(30, 6), make(30), make(10, 6)
        self.start = torch.zeros(6, dtype=D, device=device)
        self.decay = torch.tensor(-1.0, dtype=D, device=device, requires_grad=True)
        self.weight = make(30).requires_grad_()

    def outer(self) -> dict[str, Any]:
        return {"decay": self.decay, "weight": self.weight, "kind": "ridge", "none": None}

    def loss(self, w: Tensor, outer: Any) -> Tensor:
        assert outer["kind"] == "ridge"
        errors = outer["weight"].exp() * (self.x @ w - self.y) ** 2
        return errors.mean() / 2 + outer["decay"].exp() * (w**2).sum() / 2

    def closed(self, w: Tensor, outer: Any) -> Tensor:
        scaled = self.x.T * outer["weight"].exp() / len(self.x)
        eye = torch.eye(6, dtype=D, device=w.device)
        return torch.linalg.solve(scaled @ self.x + outer["decay"].exp() * eye, scaled @ self.y)

    def steps(self, w: Tensor, outer: Any, count: int = 400) -> Tensor:
        for _ in range(count):
            with torch.enable_grad():
                at = w.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.loss(at, outer), at)
            w = w - 0.3 * slope
        return w

    def loss_of_batch(self, w: Tensor, outer: Any, _: Any) -> Tensor:
        return self.loss(w, outer)

    def height(self, w: Tensor) -> Tensor:
        return (self.new @ w).sin().sum()

    def gradients(self, w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.height(w), [self.decay, self.weight])


def dense(product: Any, v: Tensor) -> Tensor:
    eye = torch.eye(v.numel(), dtype=v.dtype, device=v.device)
    return torch.linalg.solve(torch.stack([product(row) for row in eye], 1), v)


SOLVES = {"cg": "cg", "neumann": "neumann", "own": dense}


@pytest.mark.parametrize("solver", ["closed", "steps"])
@pytest.mark.parametrize("solve", SOLVES)
def test_ridge_regression_is_its_closed_form(device: torch.device, solve: str, solver: str) -> None:
    r = Ridge(device)
    expected = r.gradients(r.closed(r.start, r.outer()))
    world = World(r.start, r.decay, r.weight)
    find = meta.implicit(getattr(r, solver), r.loss, solve=SOLVES[solve], maxiter=400, tol=1e-12)
    w = find(r.start, r.outer())
    torch.testing.assert_close(w, r.closed(r.start, r.outer()), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(r.gradients(w), expected, rtol=1e-8, atol=1e-8)
    world.assert_unchanged()


def test_other_dtypes_and_backward(device: torch.device) -> None:
    r = Ridge(device)
    expected = r.gradients(r.closed(r.start, r.outer()))
    w = meta.implicit(r.closed, r.loss, tol=1e-12)(r.start, r.outer())
    r.height(w).backward()
    torch.testing.assert_close([r.decay.grad, r.weight.grad], list(expected), rtol=1e-8, atol=1e-8)
    single = torch.tensor(0.5, device=device, requires_grad=True)
    find = meta.implicit(
        lambda w, s: 3 / (1 + s) + 0 * w, lambda w, s: ((w - 3) ** 2 + s * w**2).sum()
    )
    got = find(torch.zeros(2, device=device), single)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), single)[0], torch.tensor(-2 * 3 / 2.25, device=device)
    )


def newton(loss: Any, params: Any, outer: Any, rounds: int = 7) -> Any:
    flat = {n: p.detach() for n, p in params.items()}
    for _ in range(rounds):
        whole = torch.cat([p.flatten() for p in flat.values()])

        def of_vector(v: Tensor, like: Any = flat) -> Tensor:
            return loss(split(v, like), outer)

        slope = torch.autograd.functional.jacobian(of_vector, whole)
        hessian = torch.autograd.functional.hessian(of_vector, whole)
        flat = split(whole - torch.linalg.solve(hessian, slope), flat)
    return flat


def split(v: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = v.split([p.numel() for p in like.values()])
    return {n: part.view_as(p) for (n, p), part in zip(like.items(), parts, strict=True)}


@pytest.mark.long
@pytest.mark.parametrize("solve", ["cg", "neumann"])
def test_logistic_regression_is_what_differences_say(device: torch.device, solve: Any) -> None:
    x = torch.randn(12, 3, dtype=D, device=device, requires_grad=True)
    y = torch.randint(2, (12,), device=device).double()
    decay = torch.randn(3, dtype=D, device=device, requires_grad=True)
    start = {"w": torch.zeros(3, dtype=D, device=device), "b": torch.zeros((), dtype=D).to(device)}

    def loss(p: Any, outer: Any) -> Tensor:
        out = outer["x"] @ p["w"] + p["b"]
        data = torch.nn.functional.binary_cross_entropy_with_logits(out, y)
        return data + (outer["decay"].exp() * p["w"] ** 2).sum() + 0.1 * p["b"] ** 2

    find = meta.implicit(
        lambda p, outer: newton(loss, p, outer), loss, solve=solve, maxiter=2000, tol=1e-11
    )

    def after(x: Tensor, decay: Tensor) -> Tensor:
        found = find(start, {"x": x, "decay": decay})
        return found["w"].sin().sum() + found["b"] ** 2

    assert gradcheck(after, (x, decay), eps=1e-6, atol=1e-6, rtol=1e-6, fast_mode=True)


def test_a_deep_equilibrium_layer(device: torch.device) -> None:
    """z = f(z, theta), found by iteration; its condition is that of a least squares problem."""
    a = (torch.randn(4, 4, dtype=D, device=device) / 6).requires_grad_()
    b = torch.randn(4, dtype=D, device=device, requires_grad=True)

    def layer(z: Tensor, theta: Any) -> Tensor:
        return (theta["a"] @ z + theta["b"]).tanh()

    def iterate(z: Tensor, theta: Any) -> Tensor:
        for _ in range(200):
            z = layer(z, theta)
        return z

    def loss(z: Tensor, theta: Any) -> Tensor:
        return 0.5 * (z - layer(z, theta)).square().sum()

    def after(a: Tensor, b: Tensor) -> Tensor:
        find = meta.implicit(iterate, loss, tol=1e-12, maxiter=50)
        return find(torch.zeros_like(b), {"a": a, "b": b}).sin().sum()

    assert gradcheck(after, (a, b), eps=1e-6, atol=1e-6, rtol=1e-6)
    unrolled = iterate(torch.zeros_like(b), {"a": a, "b": b}).sin().sum()
    torch.testing.assert_close(
        torch.autograd.grad(after(a, b), (a, b)), torch.autograd.grad(unrolled, (a, b))
    )


def test_trees_of_parameters_and_outer_variables(device: torch.device) -> None:
    make = lambda *s: torch.randn(s, dtype=D, device=device, requires_grad=True)  # noqa: E731
    params = {"a": make(2), "b": [make(), None]}
    xs, ys = make(2), (make(), make(3))
    outer = {"x": xs, "y": ys, "still": make().detach(), "n": 2, "none": None}

    def solver(p: Any, o: Any) -> Any:
        assert not any(t.requires_grad for t in (o["x"], *o["y"]))
        assert all(t.requires_grad and t.is_leaf for t in (p["a"], p["b"][0]))  # as they came
        return {"a": o["x"] ** 3 * o["still"], "b": [o["y"][0].sin() * o["n"], None]}

    def loss(p: Any, o: Any) -> Tensor:
        aim = solver_of(o)
        return ((p["a"] - aim["a"]) ** 2).sum() + (p["b"][0] - aim["b"][0]) ** 2

    def solver_of(o: Any) -> Any:
        return {"a": o["x"] ** 3 * o["still"], "b": [o["y"][0].sin() * o["n"], None]}

    world = World(params["a"], params["b"][0], xs, *ys)
    found = meta.implicit(solver, loss)(params, outer)
    assert found["b"][1] is None
    by = [params["a"], params["b"][0], xs, *ys]
    total = found["a"].sum() + found["b"][0] ** 2
    got = torch.autograd.grad(total, by, allow_unused=True, retain_graph=True)
    aim = solver_of(outer)
    expected = torch.autograd.grad(aim["a"].sum() + aim["b"][0] ** 2, by, allow_unused=True)
    torch.testing.assert_close(got[2:4], expected[2:4])
    assert got[0] is got[1] is got[4] is None
    only = torch.autograd.grad(found["a"].sum(), outer["x"])
    torch.testing.assert_close(only[0], 3 * outer["x"] ** 2 * outer["still"])
    world.assert_unchanged()


def test_without_outer_variables_that_require_grad(device: torch.device) -> None:
    r = Ridge(device)
    outer = {**r.outer(), "decay": r.decay.detach(), "weight": r.weight.detach()}
    find = meta.implicit(r.closed, r.loss)
    assert not find(r.start.requires_grad_(), outer).requires_grad
    with torch.no_grad():
        w = find(r.start, r.outer())
    assert not w.requires_grad
    assert_same_bits([w], [r.closed(r.start, outer)])


@pytest.mark.parametrize("solve", SOLVES)
def test_damping_is_added_to_the_hessian(device: torch.device, solve: str) -> None:
    r = Ridge(device)
    find = meta.implicit(r.closed, r.loss, solve=SOLVES[solve], maxiter=500, tol=1e-12, damping=0.7)
    got = r.gradients(find(r.start, r.outer()))
    w = r.closed(r.start, r.outer()).detach().requires_grad_()
    (v,) = torch.autograd.grad(r.height(w), w)
    hessian = torch.autograd.functional.hessian(lambda w: r.loss(w, r.outer()), w)
    u = torch.linalg.solve(hessian + 0.7 * torch.eye(6, dtype=D, device=device), v)
    (slope,) = torch.autograd.grad(r.loss(w, r.outer()), w, create_graph=True)
    expected = torch.autograd.grad(slope, [r.decay, r.weight], -u)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("solve", ["cg", "neumann", lambda product, v: 0.9 * v])
def test_a_solve_that_has_not_converged_warns_with_its_residual(
    device: torch.device, solve: Any
) -> None:
    r = Ridge(device)
    seen: list[Tensor] = []

    def keep(product: Any, v: Tensor) -> Tensor:
        u = solve(product, v)
        seen.append((v - product(u)).norm() / v.norm())
        return u

    options = {"maxiter": 2, "tol": 1e-6}
    for given in (solve, keep) if callable(solve) else (solve,):
        w = meta.implicit(r.closed, r.loss, solve=given, **options)(r.start, r.outer())
        with pytest.warns(gradkit.GradkitWarning, match="residual") as caught:
            r.gradients(w)
        (text,) = (str(one.message) for one in caught)
        said = float(re.search(r"residual of (\S+?),", text)[1])
        assert said > 1e-6
        assert "maxiter" in text
        if seen:
            assert abs(said / float(seen[-1]) - 1) < 0.01
    enough = meta.implicit(r.closed, r.loss, maxiter=7, tol=1e-6)(r.start, r.outer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r.gradients(enough)


def test_a_solve_that_is_cut_short_on_purpose_does_not_warn(device: torch.device) -> None:
    r = Ridge(device)

    def two_steps(product: Any, v: Tensor) -> Tensor:
        return 0.1 * (v + v - 0.1 * product(v))

    def run(warn: bool) -> Any:
        find = meta.implicit(r.closed, r.loss, solve=two_steps, warn=warn)
        return r.gradients(find(r.start, r.outer()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run(False)
    with pytest.warns(gradkit.GradkitWarning, match="warn=False"):
        expected = run(True)
    assert_same_bits(got, expected)


def test_over_tasks_it_is_refused_before_the_solver_runs(device: torch.device) -> None:
    """A solver may be anything, so that no vmap can enter it."""
    r = Ridge(device)
    never = lambda *_: pytest.fail("the solver has run")  # noqa: E731
    find = meta.implicit(never, r.loss)
    with pytest.raises(
        gradkit.UnsupportedGraphError, match="mean of their losses in a Python loop"
    ):
        meta.mean_value_and_grads(
            lambda decay, task: find(r.start, {**r.outer(), "decay": decay}).sum() + task,
            r.decay,
            torch.zeros(3, dtype=D, device=device),
        )


def test_a_hessian_that_is_not_positive_definite_warns(device: torch.device) -> None:
    s = torch.tensor(0.5, dtype=D, device=device, requires_grad=True)
    flat = meta.implicit(lambda w, s: w * 0, lambda w, s: (w[0] ** 2 * s) + 0 * w[1])
    w = flat(torch.zeros(2, dtype=D, device=device), s)
    with pytest.warns(gradkit.GradkitWarning, match="residual"):
        torch.autograd.grad(w.sum(), s)


@pytest.mark.parametrize("solve", ["cg", "neumann"])
def test_no_cotangent_gives_no_gradient(device: torch.device, solve: Any) -> None:
    """A zero right-hand side has a zero solution, and no residual."""
    r = Ridge(device)
    w = meta.implicit(r.closed, r.loss, solve=solve)(r.start, r.outer())
    grads = torch.autograd.grad((w * 0).sum(), [r.decay, r.weight])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_memory_is_flat_in_the_steps_of_the_solver(device: torch.device) -> None:
    r = Ridge(device)
    alive: list[int] = []

    def solver(w: Tensor, outer: Any) -> Tensor:
        refs = []
        for _ in range(20):
            w = w - 0.1 * (w - outer["decay"])  # a graph, if there were one
            refs.append(weakref.ref(w))
        assert not w.requires_grad
        alive.append(sum(ref() is not None for ref in refs))
        return w

    meta.implicit(solver, r.loss)(r.start, r.outer())
    assert alive == [1]


def test_what_the_solver_and_the_options_must_be(device: torch.device) -> None:
    r = Ridge(device)
    wrong = gradkit.StructureError

    def refused(error: Any, text: str, solver: Any = r.closed, loss: Any = r.loss) -> None:
        find = meta.implicit(solver, loss)
        with unchanged(r.start, r.decay, r.weight), pytest.raises(error, match=text):
            r.gradients(find(r.start, r.outer()))

    refused(wrong, r"^solver\(params, outer\): ", lambda w, o: [w])
    refused(wrong, r"^solver\(params, outer\)", lambda w, o: w[:2])
    refused(wrong, r"^solver\(params, outer\)", lambda w, o: None)
    refused(wrong, r"^solver\(params, outer\)", lambda w, o: 1.0)
    refused(gradkit.NotScalarLossError, "loss", loss=lambda w, o: w * o["decay"])
    refused(gradkit.LeafTypeError, "loss", loss=lambda w, o: 1.0)
    refused(gradkit.GradkitError, "depend", loss=lambda w, o: o["decay"] ** 2)
    for options in (
        {"solve": "lu"},
        {"solve": None},
        {"maxiter": 0},
        {"maxiter": 1.5},
        {"maxiter": True},
        {"tol": -1.0},
        {"tol": float("nan")},
        {"tol": True},
        {"tol": "small"},
        {"damping": -0.1},
        {"damping": float("nan")},
        {"warn": 1},
    ):
        with pytest.raises(gradkit.OptionError, match=rf"^{next(iter(options))}: expected"):
            meta.implicit(r.closed, r.loss, **options)
    with pytest.raises(gradkit.LeafTypeError, match=r"^params"):
        meta.implicit(r.closed, r.loss)("w", r.outer())
    for solve in (lambda product, v: v[:2], lambda product, v: None):
        w = meta.implicit(r.closed, r.loss, solve=solve)(r.start, r.outer())
        with pytest.raises(gradkit.GradkitError, match="solve"):
            r.gradients(w)


@pytest.mark.parametrize("how", ["leaf", "graph"])
def test_captured_tensors_that_require_grad_are_refused(device: torch.device, how: str) -> None:
    """Their gradient would be lost."""
    r = Ridge(device)
    captured = torch.tensor(0.3, dtype=D, device=device, requires_grad=True)
    used = captured * 2 if how == "graph" else captured

    def loss(w: Tensor, outer: Any) -> Tensor:
        return r.loss(w, outer) + used * (w**4).sum()

    for outer in (r.outer(), {**r.outer(), "decay": r.decay.detach(), "weight": r.weight.detach()}):
        with unchanged(captured), pytest.raises(gradkit.UnsupportedGraphError, match="outer"):
            meta.implicit(r.closed, loss)(r.start, outer)


def _norm() -> nn.Module:
    return nn.BatchNorm1d(2, affine=False, dtype=D)


def _spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2, bias=False, dtype=D))


@pytest.mark.parametrize("make", [_norm, _spectral])
def test_what_the_inner_loss_writes_on_is_written_once(device: torch.device, make: Any) -> None:
    module, x = make().to(device).requires_grad_(False), torch.ones(3, 2).to(device, D).cumsum(0)
    o = torch.tensor(0.5, dtype=D, device=device, requires_grad=True)

    def inner(w: Tensor, o: Tensor) -> Tensor:
        return (module(x * w) - o).square().sum() + w.square().sum()

    w = meta.implicit(lambda w, o: w, inner, warn=False)(torch.ones(2, dtype=D, device=device), o)
    buffers = [x.clone() for x in module.buffers()]
    first, again = (torch.autograd.grad(w.sum(), o, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, again)
    assert_same_bits(module.buffers(), buffers)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False, dtype=D)

    def forward(self, x: Tensor, reentrant: bool | None) -> Tensor:
        if reentrant is None:
            out: Tensor = self.layer(x)
            return out
        return checkpoint(self.layer, x, use_reentrant=reentrant)


def test_checkpoints_are_right_or_refused(device: torch.device) -> None:
    """By torch, a module's is recomputed with the parameters that the module has by then."""
    module, x = Checkpointed().to(device), torch.ones(3, 2, dtype=D, device=device)
    o = torch.tensor(0.5, dtype=D, device=device, requires_grad=True)
    start = {"layer.weight": torch.ones(2, 2, dtype=D, device=device)}

    def of_module(reentrant: bool | None, w: Any, o: Tensor) -> Tensor:
        given = x.detach().requires_grad_()
        out: Tensor = torch.func.functional_call(module, w, (given, reentrant))
        return (out - o).square().sum()

    results = []
    for reentrant in (False, None):
        found = meta.implicit(lambda w, o: w, partial(of_module, reentrant))(start, o)
        results.append(torch.autograd.grad(found["layer.weight"].square().sum(), o)[0])
    torch.testing.assert_close(*results)
    with pytest.raises(gradkit.UnsupportedGraphError, match="checkpoints"):
        meta.implicit(lambda w, o: w, partial(of_module, True))(start, o)


def test_a_solver_that_writes_on_outer_is_refused(device: torch.device) -> None:
    r = Ridge(device)

    def writes(w: Tensor, outer: Any) -> Tensor:
        outer["decay"].add_(1.0)
        return w

    for decay in (r.decay, r.decay.detach()):
        outer = {**r.outer(), "decay": decay}
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"^solver.*leaves outer as it is"):
            meta.implicit(writes, r.loss)(r.start, outer)


def test_arguments_that_are_no_functions(device: torch.device) -> None:
    r = Ridge(device)
    for name, given in (("solver", (3, r.loss)), ("inner_loss", (r.closed, 3))):
        with pytest.raises(
            gradkit.OptionError, match=rf"^{name}: expected a function, got the int"
        ):
            meta.implicit(*given)


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    r = Ridge(device)
    w = meta.implicit(r.closed, r.loss)(r.start, r.outer())
    with pytest.raises(gradkit.UnsupportedGraphError, match="create_graph"):
        torch.autograd.grad(r.height(w), r.decay, create_graph=True)


def test_implicit_is_what_a_long_unroll_comes_to(device: torch.device) -> None:
    r = Ridge(device)
    adapted = meta.unroll(r.loss_of_batch, r.start, [()] * 300, meta.sgd(lr=0.3), outer=r.outer())
    w = meta.implicit(r.steps, r.loss, tol=1e-12)(r.start, r.outer())
    torch.testing.assert_close(r.gradients(w), r.gradients(adapted.params), rtol=1e-6, atol=1e-8)


class Solvers:
    """Gradient descent, written with autograd, with gradkit and with an optimizer of torch."""

    def inner(self, w: Tensor, o: Tensor) -> Tensor:
        return ((w - o) ** 2).sum()

    def autograd(self, w: Tensor, o: Tensor) -> Tensor:
        for _ in range(60):
            w = w - 0.3 * torch.autograd.grad(self.inner(w, o), w)[0]
        return w

    def gradkit(self, w: Tensor, o: Tensor) -> Tensor:
        for _ in range(60):
            w = w - 0.3 * gradkit.value_and_grads(self.inner(w, o), w)[1]
        return w

    def optim(self, w: Tensor, o: Tensor) -> Tensor:
        optimizer = torch.optim.SGD([w], lr=0.3)
        for _ in range(60):
            optimizer.zero_grad()
            self.inner(w, o).backward()
            optimizer.step()
        return w


@pytest.mark.parametrize("name", ["autograd", "gradkit", "optim"])
def test_a_solver_gets_params_that_require_grad_where_they_do(
    device: torch.device, name: str
) -> None:
    solvers = Solvers()
    find = meta.implicit(getattr(solvers, name), solvers.inner)
    o = torch.randn(2, device=device, requires_grad=True)
    for start in (
        torch.zeros(2, device=device, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2, device=device)),
        torch.zeros(2, device=device, requires_grad=True) * 2,
    ):
        with unchanged(start.detach(), o):
            w = find(start, o)
            _, grad = gradkit.value_and_grads(w.sum(), o)
        torch.testing.assert_close(grad, torch.ones_like(o))
        assert start.is_leaf is False or start.grad is None
    constant = torch.zeros(2, device=device)
    with (
        unchanged(constant, o),
        pytest.raises(
            gradkit.UnsupportedGraphError, match=r"^params: expected a tensor that requires grad"
        ),
    ):
        find(constant, o)
    find(constant.requires_grad_(), o)


def test_what_a_solver_raises_itself_comes_unchanged(device: torch.device) -> None:
    error = RuntimeError("the solver has not converged")

    def solver(w: Tensor, o: Tensor) -> Tensor:
        raise error

    with pytest.raises(RuntimeError) as caught:
        meta.implicit(solver, lambda w, o: (w * o).sum())(
            torch.zeros(2, device=device), torch.ones(2, device=device)
        )
    assert caught.value is error


def test_outer_variables_of_inference_mode_are_constants(device: torch.device) -> None:
    with torch.inference_mode():
        goal = torch.ones(2, device=device)
    scale = torch.tensor(2.0, device=device, requires_grad=True)

    def inner(w: Tensor, outer: dict[str, Tensor]) -> Tensor:
        return ((w - outer["goal"] * outer["scale"]) ** 2).sum()

    find = meta.implicit(lambda _, outer: outer["goal"] * outer["scale"], inner)
    w = find(torch.zeros(2, device=device), {"goal": goal, "scale": scale})
    assert gradkit.value_and_grads(w.sum(), scale)[1] == 2
