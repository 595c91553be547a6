"""What a library is tried with: its own result and gradkit's, each compared with an oracle.

The oracle of a derivative is a difference quotient in float64, that of a step the plain loop.
`torch` is what plain torch gives with the library, `gradkit` what gradkit gives, `checked` what it
gives inside `gradkit.checked()`. Each is "right", "wrong by ...", "refused: ..." or "raises ...".
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

import gradkit

Tensors: TypeAlias = Sequence[Tensor]
Make: TypeAlias = Callable[[], nn.Module]
Loss: TypeAlias = Callable[..., Tensor]
EPS = 1e-5


@dataclass(frozen=True)
class Outcome:
    """What came of one try."""

    what: str
    torch: str
    gradkit: str
    checked: str


def tried(what: str, right: Any, theirs: Callable[[], Any], ours: Callable[[], Any],
          tol: float = 1e-5) -> Outcome:  # fmt: skip
    """Return how three ways to compute a tree of tensors compare with the right one."""

    def watched() -> Any:
        with gradkit.checked():
            return ours()

    try:
        oracle = right() if callable(right) else right
    except Exception as error:  # the library does not get as far as a first derivative
        said = f"raises {type(error).__name__}: {_first_line(error)}"
        return Outcome(what, said, said, said)
    words = (_said(way, oracle, tol) for way in (theirs, ours, watched))
    return Outcome(what, *words)


def _said(way: Callable[[], Any], right: Any, tol: float) -> str:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            off = _distance(way(), right)
    except gradkit.GradkitError as error:
        return f"refused: {type(error).__name__}: {_first_line(error)}"
    except Exception as error:  # the answer is what a user would see
        return f"raises {type(error).__name__}: {_first_line(error)}"
    return "right" if off <= tol else f"wrong by {off:.2g}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def _distance(ours: Any, right: Any) -> float:
    """Return the largest difference of two trees, relative to the largest entry of the second."""
    pairs = list(zip(_flat(ours), _flat(right), strict=True))
    size = max((float(b.abs().max()) for _, b in pairs if b.numel()), default=0.0)
    off = [float((a - b).abs().max()) for a, b in pairs if b.numel()]
    if any(value != value for value in off):
        return float("nan")
    return max(off, default=0.0) / (size or 1.0)


def _flat(tree: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf.detach().double() for leaf in leaves if isinstance(leaf, Tensor)]


def of_function(fn: Callable[[Tensor], Tensor], x: Tensor, what: str = "",
                tol: float = 1e-5, second: bool = True,
                eps: float = EPS) -> Iterator[Outcome]:  # fmt: skip
    """Try the first and second derivative of a scalar function of one tensor, and hvp."""
    x, along = x.detach(), _direction(x)

    def slope(at: Tensor) -> Tensor:
        point = at.clone().requires_grad_()
        (grad,) = torch.autograd.grad(fn(point), point)
        return grad

    def by_gradkit() -> Tensor:
        point = x.clone().requires_grad_()
        return gradkit.value_and_grads(fn(point), point)[1]

    quotient = (fn(x + eps * along) - fn(x - eps * along)).detach() / (2 * eps)
    yield tried(f"{what}gradient", quotient, lambda: (slope(x) * along).sum(),
                lambda: (by_gradkit() * along).sum(), tol)  # fmt: skip
    if not second:
        return

    def twice_by_torch() -> Tensor:
        point = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(fn(point), point, create_graph=True)
        return torch.autograd.grad((grad * along).sum(), point)[0]

    def twice() -> Tensor:
        point = x.clone().requires_grad_()
        _, grad = gradkit.value_and_grads(fn(point), point, create_graph=True)
        return gradkit.value_and_grads((grad * along).sum(), point)[1]

    def curved() -> Tensor:
        return (slope(x + eps * along) - slope(x - eps * along)) / (2 * eps)

    yield tried(f"{what}second derivative", curved, twice_by_torch, twice, tol)
    yield tried(f"{what}hvp", curved, lambda: _hvp_of_torch(fn, x, along),
                lambda: gradkit.func.hvp(fn, x, along)[1], tol)  # fmt: skip


def _hvp_of_torch(fn: Callable[[Any], Tensor], at: Any, along: Any) -> Any:
    return torch.func.jvp(torch.func.grad(fn), (at,), (along,))[1]


def _direction(x: Tensor) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(7))


def of_optimizer(make: Callable[[list[nn.Parameter]], Any], what: str = "", steps: int = 4,
                 max_norm: float | None = 1.0) -> Iterator[Outcome]:  # fmt: skip
    """Try steps on a small net: the weights are those of the plain loop, bit for bit."""
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def trained(step: Callable[[Any, nn.Module, Tensor], None]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        optimizer = make(list(model.parameters()))
        for _ in range(steps):
            step(optimizer, model, (model(x) - y).square().mean())
        return [p.detach().clone() for p in model.parameters()]

    def plain(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

    def two_calls(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
        _, grads = gradkit.value_and_grads(loss, model)
        gradkit.step_(optimizer, model, grads, max_norm=max_norm)

    def one_call(optimizer: Any, model: nn.Module, loss: Tensor) -> None:
        gradkit.minimize_(optimizer, loss, max_norm=max_norm)

    right = trained(plain)
    again = lambda: trained(plain)  # noqa: E731
    yield tried(f"{what}`minimize_`", right, again, lambda: trained(one_call), 0.0)
    yield tried(f"{what}`step_`", right, again, lambda: trained(two_calls), 0.0)


def of_each_optimizer(makers: dict[str, Callable[[list[nn.Parameter]], Any]]) -> Iterator[Outcome]:
    """Try each, and yield those that differ by name, and the others as one outcome."""
    right: dict[str, list[str]] = {}
    for name, make in makers.items():
        try:
            outcomes = list(of_optimizer(make, f"{name}: "))
        except Exception as error:  # the plain loop cannot step it
            right.setdefault(f"raises {type(error).__name__}", []).append(name)
            continue
        bad = [o for o in outcomes if {o.torch, o.gradkit, o.checked} != {"right"}]
        yield from bad
        if not bad:
            right.setdefault("right", []).append(name)
    for word, names in right.items():
        if word == "right":
            yield Outcome(f"steps of {len(names)} optimizers", word, word, word)
        else:
            yield Outcome(f"steps of {', '.join(names)}", word, word, word)


def of_module(make: Make, batch: Tensors, loss: Loss, what: str = "", only: str = "", *,
              tol: float = 1e-5, eps: float = EPS) -> Iterator[Outcome]:  # fmt: skip
    """Try a module: steps, the gradient, samples, hvp, make_functional and unroll.

    `loss(module, *batch)` is a mean over the first dimension of the tensors of the batch, which a
    sample has, too. `only` names some of the tries.
    """
    module = _Tried(make, tuple(batch), loss, tol, eps)
    for name in only.split() or ("steps", "gradient", "samples", "hvp", "functional", "unroll"):
        yield getattr(module, name)(what)


class _Tried:
    def __init__(self, make: Make, batch: tuple[Tensor, ...], loss: Loss, tol: float,
                 eps: float) -> None:  # fmt: skip
        self._make, self.batch, self.loss, self.tol, self.eps = make, batch, loss, tol, eps
        self.params = {
            name: p.detach().clone()
            for name, p in self.make().named_parameters()
            if p.requires_grad
        }
        generator = torch.Generator().manual_seed(7)
        self.along = {
            name: torch.randn(p.shape, dtype=p.dtype, generator=generator)
            for name, p in self.params.items()
        }

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self._make()

    def value(self, module: nn.Module, *batch: Tensor) -> Tensor:
        torch.manual_seed(1)  # dropout and the like draw the same
        return self.loss(module, *(batch or self.batch))

    def at(self, params: dict[str, Tensor]) -> nn.Module:
        module = self.make()
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name in params:
                    p.copy_(params[name])
        return module

    def moved(self, by: float) -> dict[str, Tensor]:
        return {name: p + by * self.along[name] for name, p in self.params.items()}

    def slopes(self, params: dict[str, Tensor], *batch: Tensor) -> dict[str, Tensor]:
        """Return the gradient by `.backward()` of a module that has these parameters."""
        module = self.at(params)
        self.value(module, *batch).backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in module.named_parameters()
            if name in params
        }

    def of_params(self, module: nn.Module) -> Callable[..., Tensor]:
        """Return the loss as a function of the parameters: the module is called with them."""

        class Called(nn.Module):
            def __init__(self, inner: nn.Module, value: Callable[..., Tensor]) -> None:
                super().__init__()
                self.inner, self.value = inner, value

            def forward(self, *batch: Tensor) -> Tensor:
                return self.value(self.inner, *batch)

        whole = Called(module, self.value)

        def fn(params: dict[str, Tensor], *batch: Tensor) -> Tensor:
            named = {f"inner.{name}": p for name, p in params.items()}
            out: Tensor = functional_call(whole, named, batch or self.batch)
            return out

        return fn

    def steps(self, what: str) -> Outcome:
        def trained(step: Callable[[Any, Tensor, nn.Module], Any]) -> list[Tensor]:
            module = self.make()
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
            for _ in range(3):
                step(optimizer, self.value(module), module)
            return [p.detach() for p in module.parameters() if p.requires_grad] + [
                *module.buffers()
            ]

        def plain(optimizer: Any, loss: Tensor, module: nn.Module) -> None:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

        def ours(optimizer: Any, loss: Tensor, module: nn.Module) -> None:
            gradkit.minimize_(optimizer, loss, max_norm=1.0)

        right = trained(plain)
        return tried(f"{what}steps", right, lambda: trained(plain), lambda: trained(ours), 0.0)

    def gradient(self, what: str) -> Outcome:
        def quotient() -> Tensor:
            after, before = (self.value(self.at(self.moved(s * self.eps))) for s in (1, -1))
            return (after - before).detach() / (2 * self.eps)

        def ours() -> Tensor:
            module = self.make()
            _, grads = gradkit.value_and_grads(self.value(module), module, unused="zeros")
            return self._dot({name: grads[name] for name in self.params})

        return tried(f"{what}gradient", quotient, lambda: self._dot(self.slopes(self.params)),
                     ours, self.tol)  # fmt: skip

    def _dot(self, grads: dict[str, Tensor]) -> Tensor:
        return sum(((grads[n] * self.along[n]).sum() for n in self.params), torch.zeros(()))

    def samples(self, what: str) -> Outcome:
        dims = (None, *(0 for _ in self.batch))

        def one(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda p, *sample: fn(p, *(s.unsqueeze(0) for s in sample))

        def looped() -> dict[str, Tensor]:
            each = [
                self.slopes(self.params, *(t[i : i + 1] for t in self.batch))
                for i in range(len(self.batch[0]))
            ]
            return {name: torch.stack([g[name] for g in each]) for name in self.params}

        def theirs() -> Any:
            fn = one(self.of_params(self.make()))
            return torch.func.vmap(torch.func.grad(fn), in_dims=dims, randomness="same")(
                self.params, *self.batch
            )

        def ours() -> Any:
            fn = one(self.of_params(self.make()))
            return gradkit.func.per_sample_grads(fn, in_dims=dims, randomness="same")(
                self.params, *self.batch
            )

        return tried(f"{what}per-sample", looped, theirs, ours, self.tol)

    def hvp(self, what: str) -> Outcome:
        def curved() -> dict[str, Tensor]:
            after, before = (self.slopes(self.moved(s * self.eps)) for s in (1, -1))
            return {n: (after[n] - before[n]) / (2 * self.eps) for n in self.params}

        def theirs() -> Any:
            module = self.make()
            params = [p for n, p in module.named_parameters() if n in self.params]
            value = self.value(module)
            grads = torch.autograd.grad(value, params, create_graph=True, allow_unused=True)
            pairs = zip(grads, self.along.values(), strict=True)
            dot = sum((g * a).sum() for g, a in pairs if g is not None)
            return torch.autograd.grad(dot, params, materialize_grads=True)

        def ours() -> Any:
            fn = self.of_params(self.make())
            return list(gradkit.func.hvp(fn, self.params, self.along)[1].values())

        return tried(f"{what}hvp", lambda: list(curved().values()), theirs, ours, self.tol)

    def functional(self, what: str) -> Outcome:
        def theirs() -> Any:
            fn = self.of_params(self.make())
            return torch.func.grad(fn)(self.params)

        def ours() -> Any:
            module = self.make()
            fn = self._by_make_functional(module)
            trained = [
                p for p in module.parameters() if p.requires_grad
            ]  # others may have no equal
            before = [t.clone() for t in (*trained, *module.buffers())]
            grads = gradkit.func.value_and_grads(fn, create_graph=False)(self.params)[1]
            after = (*trained, *module.buffers())
            assert all(map(torch.equal, before, after)), "the module was changed"
            return grads

        right = self.slopes(self.params)
        return tried(f"{what}`make_functional`", right, theirs, ours, self.tol)

    def _by_make_functional(self, module: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
        call, all_params, buffers = gradkit.func.make_functional(_WithLoss(module, self.value))

        def fn(params: dict[str, Tensor]) -> Tensor:
            named = {f"inner.{name}": p for name, p in params.items()}
            out: Tensor = call({**all_params, **named}, buffers, *self.batch)[0]
            return out

        return fn

    def unroll(self, what: str) -> Outcome:
        """By the rate, through two steps of SGD and the loss after them."""

        def after(rate: Tensor | float) -> Tensor:
            module = self.make()
            optimizer = torch.optim.SGD(module.parameters(), lr=float(rate))
            for _ in range(2):
                optimizer.zero_grad()
                self.value(module).backward()
                optimizer.step()
            return self.value(module).detach()

        def quotient() -> Tensor:
            return (after(0.1 + self.eps) - after(0.1 - self.eps)) / (2 * self.eps)

        def ours() -> Tensor:
            rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
            fn = self._by_make_functional(self.make())
            opt = gradkit.meta.sgd(lr=rate)
            adapted = gradkit.meta.unroll(lambda p, outer, batch: fn(p), self.params, [0, 0], opt)
            return gradkit.value_and_grads(fn(adapted.params), rate)[1]

        def theirs() -> Tensor:
            rate = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
            fn, params = self.of_params(self.make()), dict(self.params)
            for _ in range(2):
                leaves = {n: p if p.requires_grad else p.clone().requires_grad_()
                          for n, p in params.items()}  # fmt: skip
                grads = torch.autograd.grad(fn(leaves), list(leaves.values()), create_graph=True,
                                            materialize_grads=True)  # fmt: skip
                params = {n: p - rate * g for (n, p), g in zip(leaves.items(), grads, strict=True)}
            return torch.autograd.grad(fn(params), rate)[0]

        return tried(f"{what}`unroll`", quotient, theirs, ours, self.tol)


class _WithLoss(nn.Module):
    """Computes the loss of a module in its own forward pass."""

    def __init__(self, inner: nn.Module, value: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.value = inner, value

    def forward(self, *batch: Tensor) -> Tensor:
        return self.value(self.inner, *batch)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the default, for what a library makes by itself."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def mse(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error of what a module makes of x."""
    return (module(x) - y).square().mean()
