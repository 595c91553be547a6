"""What gradkit cannot see, and gives as torch does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import Thread, current_thread, main_thread
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit import func
from gradkit._compat.versions import release
from tests.helpers import OnceCubed
from tests.silently_wrong import special_points
from tests.silently_wrong._row import Case, D, Row
from tests.silently_wrong.processes import factor_that_was_reduced, shown

CHECKED = "`checked()`: right"
UNCHECKED = "`func`, `checked()`: `UnsupportedGraphError`; `value_and_grads`"


def value_changed_behind_autograd(device: torch.device) -> Case:
    w = torch.ones(1, device=device, requires_grad=True)
    loss = (w * w).sum()
    right = grad(loss, w, retain_graph=True)[0].clone()
    w.data.add_(1)
    theirs = grad(loss, w, retain_graph=True)[0]
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss, w)[1])


def graph_from_before_a_fused_step(device: torch.device) -> Case:
    def of(step: Callable[[torch.optim.Optimizer], Any]) -> Any:
        d, g = (torch.nn.Parameter(torch.tensor([x], device=device)) for x in (2.0, 3.0))
        loss = (d * g).sum()
        d.grad = torch.ones_like(d)
        step(torch.optim.SGD([d], lr=1.0, fused=True))
        return loss, g

    loss, g = of(lambda optimizer: optimizer.step())
    with gradkit.checked():
        watched = of(lambda optimizer: optimizer.step())
    by_gradkit = of(lambda optimizer: gradkit.minimize_(optimizer, _first(optimizer).sum()))
    for refused in (watched, by_gradkit):
        with pytest.raises(gradkit.UnsupportedGraphError):
            gradkit.value_and_grads(*refused)
    theirs = grad(loss, g, retain_graph=True)[0]
    right = torch.tensor([2.0], device=device)
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss, g)[1])


def _first(optimizer: torch.optim.Optimizer) -> Tensor:
    first: Tensor = optimizer.param_groups[0]["params"][0]
    return first


class Meeting(torch.nn.Module):
    """Multiplies by a weight, after another thread has called it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=D, device=device))
        self.met: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if current_thread() is main_thread():
            other = Thread(target=lambda: self.met.append(self(x).detach()))
            other.start()
            other.join()
        return self.weight * x


class Remembers(torch.nn.Module):
    """Keeps what it makes of its parameter in the first pass, or computes later."""

    def __init__(self, device: torch.device, *, later: bool) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1, dtype=D, device=device))
        self.later = later
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.later:
            return self.w * x, lambda: self.w * x
        self.kept = self.w * 2 if self.kept is None else self.kept
        return self.w * x + self.kept


def output_computed_later(device: torch.device) -> Case:
    module, x = Remembers(device, later=True), torch.ones(1, dtype=D, device=device)

    def loss(p: Any) -> Tensor:
        now, later = torch.func.functional_call(module, p, (x,))
        return (now + later()).sum()

    p = {"w": torch.full_like(x, 3)}
    ours = func.value_and_grads(loss, create_graph=False)
    return Case(torch.func.grad(loss)(p)["w"], 2 * x, lambda: ours(p)[1]["w"])


class Listed(torch.nn.Module):
    """Reads its parameter by name, and from a list, in which no call puts another."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1, dtype=D, device=device))
        self.every = [self.w]

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x + self.every[0] * x


def parameter_in_a_list(device: torch.device) -> Case:
    module, x = Listed(device), torch.ones(1, dtype=D, device=device)

    def loss(p: Any) -> Tensor:
        return torch.func.functional_call(module, p, (x,)).sum()

    call, _, buffers = func.make_functional(module)
    p = {"w": torch.full_like(x, 3)}
    with pytest.raises(gradkit.UnsupportedGraphError, match="held in a list"):
        call(p, buffers, x)
    ours = func.value_and_grads(loss, create_graph=False)
    return Case(torch.func.grad(loss)(p)["w"], 2 * x, lambda: ours(p)[1]["w"])


def cache_without_a_graph(device: torch.device) -> Case:
    module, x = Remembers(device, later=False), torch.ones(1, dtype=D, device=device)
    with torch.no_grad():
        module(x)
    call, params, buffers = func.make_functional(module)

    def ours() -> Tensor:
        return func.value_and_grads(lambda p: call(p, buffers, x)[0].sum())(params)[1]["w"]

    def loss(p: Any) -> Tensor:
        result: Tensor = torch.func.functional_call(module, p, (x,)).sum()
        return result

    return Case(torch.func.grad(loss)(dict(module.named_parameters()))["w"], 3 * x, ours)


class HasPenalty(torch.nn.Module):
    """Keeps a part of its loss in an attribute."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1, dtype=D, device=device))

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.w**2
        return self.w * x


def penalty_read_after_an_eager_call(device: torch.device) -> Case:
    module, x = HasPenalty(device), torch.ones(1, dtype=D, device=device)
    module(x)  # in training, before
    call, _, buffers = func.make_functional(module)
    three = torch.full_like(x, 3)

    def loss(w: Tensor) -> Tensor:
        return (call({"w": w}, buffers, x)[0] + module.penalty).sum()

    w = three.clone().requires_grad_()
    theirs = grad(loss(w), w)[0]
    right = func.value_and_grads(loss)(three)[1]
    assert torch.equal(right, 1 + 2 * three)  # what to do
    with gradkit.checked(), pytest.raises(gradkit.UnsupportedGraphError, match=r"module\.penalty"):
        loss(w)
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss(w), w)[1])


def module_called_in_another_thread(device: torch.device) -> Case:
    module, x = Meeting(device), torch.ones(1, dtype=D, device=device)
    ten = {"weight": torch.full_like(module.weight, 10).detach()}
    torch.func.functional_call(module, ten, (x,))
    call, _, buffers = func.make_functional(module)

    def ours() -> Tensor:
        call(ten, buffers, x)
        return module.met[-1]

    return Case(module.met[0], module.weight.detach() * x, ours)


def proximal_term_that_changed(device: torch.device) -> Case:
    start = torch.ones(2, dtype=D, device=device)

    strength = [1.0]

    def distance(w: Tensor, *_: Any) -> Tensor:
        return strength[0] * (w - start).square().sum()

    def recomputed(w: Tensor) -> Tensor:
        with torch.enable_grad():
            (slope,) = grad(distance(w), w, create_graph=True)
            return w - 0.1 * slope

    def unrolled(w: Tensor, memory: Any) -> Tensor:
        opt = gradkit.meta.sgd(lr=0.1)
        return gradkit.meta.unroll(distance, w, [()], opt, memory=memory).params

    ways: list[Callable[[Tensor], Tensor]] = [
        lambda w: checkpoint(recomputed, w, use_reentrant=True),
        lambda w: unrolled(w, "store"),
        lambda w: unrolled(w, "recompute"),
    ]
    grads = []
    for way in ways:
        w = start.clone().requires_grad_()
        strength[0] = 1.0
        first = way(w).sum()
        strength[0] = 3.0
        (first + way(w).sum()).backward()
        grads.append(w.grad)
    theirs, right, ours = grads
    return Case(theirs, right, lambda: ours)


def by_input_of_as_strided_scatter(device: torch.device) -> Case:
    x = torch.tensor([1.0, 2.0, 3.0], dtype=D, device=device)
    zero = torch.zeros(1, dtype=D, device=device)
    middle = torch.arange(3, device=device) == 1
    return _eagerly(
        lambda x: torch.as_strided_scatter(x, zero, (1,), (1,), 1).square().sum(),
        lambda x: torch.where(middle, 0.0, x).square().sum(),
        x,
    )


def by_source_of_as_strided_scatter(device: torch.device) -> Case:
    x = torch.tensor([1.0], dtype=D, device=device)
    zeros = torch.zeros(2, dtype=D, device=device)
    factors = torch.arange(4, dtype=D, device=device)
    return _eagerly(
        lambda x: torch.cat([zeros, torch.as_strided_scatter(zeros, x, (1,), (1,), 1)]) @ factors,
        lambda x: torch.cat([zeros, zeros[:1], x]) @ factors,
        x,
    )


def bessel_without_graph(device: torch.device) -> Case:
    x = torch.ones(1, dtype=D, device=device)

    def fn(x: Tensor) -> Tensor:
        return (torch.special.bessel_j0(x) + x * x).sum()

    leaf = x.clone().requires_grad_()
    right = 2 * x - torch.special.bessel_j1(x)
    with gradkit.checked():
        torch.testing.assert_close(gradkit.value_and_grads(fn(leaf), leaf)[1], right)
    torch.testing.assert_close(gradkit.func.value_and_grads(fn)(x)[1], right)
    if release(torch.__version__) < BESSEL_MENDED:
        with pytest.raises(gradkit.GradientCheckError):
            gradkit.func.check_grads(fn, x)
    theirs = grad(fn(leaf), leaf)[0]
    return Case(theirs, right, lambda: gradkit.value_and_grads(fn(leaf), leaf)[1])


BESSEL_MENDED = (2, 15)  # of eight of them, those that are not spherical or scaled


def spherical_bessel_without_graph(device: torch.device) -> Case:
    x = torch.ones(1, dtype=D, device=device, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return (torch.special.spherical_bessel_j0(x) + x * x).sum()

    (right,) = grad((x.sin() / x + x * x).sum(), x)
    with gradkit.checked():
        torch.testing.assert_close(gradkit.value_and_grads(fn(x), x)[1], right)
    return Case(grad(fn(x), x)[0], right, lambda: gradkit.value_and_grads(fn(x), x)[1])


def airy_without_graph(device: torch.device) -> Case:
    x = torch.ones(1, dtype=D, device=device)
    step = 1e-5
    slope = (torch.special.airy_ai(x + step) - torch.special.airy_ai(x - step)) / (2 * step)

    def fn(x: Tensor) -> Tensor:
        return (torch.special.airy_ai(x) + x * x).sum()

    return _eagerly(fn, lambda x: (slope * x + x * x).sum(), x)


def sample_of_normal(device: torch.device) -> Case:
    std = torch.ones(1, dtype=D, device=device)

    def drawn(std: Tensor) -> Tensor:
        torch.manual_seed(0)
        return torch.normal(torch.zeros_like(std), std).sum()

    def right(std: Tensor) -> Tensor:
        torch.manual_seed(0)
        noise = torch.normal(torch.zeros_like(std.detach()), std.detach())
        return (noise * std).sum()

    return _eagerly(drawn, right, std)


def _eagerly(fn: Callable[[Tensor], Tensor], way: Callable[[Tensor], Tensor], x: Tensor) -> Case:
    """A gradient, and that of the same function in other words; gradkit.func refuses the first."""
    leaf = x.clone().requires_grad_()
    with pytest.raises(gradkit.UnsupportedGraphError, match="derivative torch gets right here"):
        gradkit.func.value_and_grads(fn)(x)
    with (
        gradkit.checked(),
        pytest.raises(gradkit.UnsupportedGraphError, match="derivative torch gets right here"),
    ):
        fn(leaf)
    return Case(
        grad(fn(leaf), leaf)[0],
        gradkit.func.value_and_grads(way)(x)[1],
        lambda: gradkit.value_and_grads(fn(leaf), leaf)[1],
    )


def retained_grad_inside(device: torch.device) -> Case:
    def after(differentiate: Callable[..., object]) -> Tensor | None:
        w = torch.ones(1, device=device, requires_grad=True)
        y = w * 2
        y.retain_grad()
        differentiate((3 * y).sum(), w)
        return y.grad

    return Case(after(grad), None, lambda: after(gradkit.value_and_grads))


def statistics_changed_since(device: torch.device) -> Case:
    w = torch.ones(1, dtype=D, device=device, requires_grad=True)
    x = torch.tensor([[1.0], [3.0]], dtype=D, device=device)
    norm = torch.nn.BatchNorm1d(1, affine=False, momentum=1.0, dtype=D, device=device).eval()
    loss = norm(x * w).square().sum()
    right = grad(loss, w, retain_graph=True)[0]
    norm.train()(x)
    theirs = grad(loss, w, retain_graph=True)[0]
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss, w)[1])


def _recomputed(
    device: torch.device, function: Callable[[Tensor, Tensor], Tensor], right: float
) -> Callable[..., Case]:
    """Return what shows a checkpoint of a function of `w`, at 2, and of 3."""
    w = torch.full((1,), 2.0, dtype=D, device=device, requires_grad=True)
    three = torch.full_like(w, 3.0, requires_grad=False)
    loss = checkpoint(lambda x: function(w, x), three, use_reentrant=False).sum()

    def show(between: Callable[[Tensor], Any] = lambda w: None) -> Case:
        between(w)
        theirs = grad(loss, w, retain_graph=True)[0]
        return Case(theirs, [right], lambda: gradkit.value_and_grads(loss, w)[1])

    return show


def weight_stepped_after_a_checkpoint(device: torch.device) -> Case:
    show = _recomputed(device, lambda w, x: (w * x) ** 2, 36.0)
    return show(lambda w: w.detach().mul_(2))


def buffer_written_in_a_checkpoint(device: torch.device) -> Case:
    calls = torch.zeros(1, dtype=D, device=device)

    def function(w: Tensor, x: Tensor) -> Tensor:
        calls.fill_(1 if calls == 0 else 2)
        return (w * x * calls.clone()) ** 2

    return _recomputed(device, function, 36.0)()


def numbers_of_numpy_in_a_checkpoint(device: torch.device) -> Case:
    generators = [numpy.random.default_rng(0) for _ in range(2)]
    right = 36 * generators[0].random() ** 2

    def function(w: Tensor, x: Tensor) -> Tensor:
        number = torch.full_like(x, generators[1].random())
        generators[1] = numpy.random.default_rng(1)  # in every later run
        return (w * x * number) ** 2

    return _recomputed(device, function, right)()


def factor_that_is_unfrozen_after_a_checkpoint(device: torch.device) -> Case:
    factor = torch.full((1,), 5.0, dtype=D, device=device)
    right = 3 * torch.full((), 30.0, dtype=D).cos().item() * 5
    show = _recomputed(device, lambda w, x: (w * x * factor).sin(), right)
    return show(lambda w: factor.requires_grad_())


def noise_of_rrelu_copied_by_a_hook(device: torch.device) -> Case:
    w = torch.full((1,), -2.0, dtype=D, device=device, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # what nothing has written yet is nan
    try:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda x: x):
            out = torch.nn.functional.rrelu(w, training=True)
    finally:
        torch.use_deterministic_algorithms(False)
    theirs = grad(out, w, retain_graph=True)[0].isnan()
    right = (out / w).isnan()
    return Case(theirs, right, lambda: gradkit.value_and_grads(out, w)[1].isnan())


def parameter_of_inference_mode(device: torch.device) -> Case:
    def loss(w: Tensor) -> Tensor:
        return (2 * w).sum() + torch.nn.functional.linear(torch.ones(1, 1, device=device), w).sum()

    with torch.inference_mode():
        w = torch.nn.Parameter(torch.ones(1, 1, device=device))
    right = gradkit.func.value_and_grads(loss)(torch.ones(1, 1, device=device))[1]
    return Case(grad(loss(w), w)[0], right, lambda: gradkit.value_and_grads(loss(w), w)[1])


def parameter_cast_between_two_losses(device: torch.device) -> Case:
    def losses() -> tuple[Tensor, Tensor]:
        w = torch.ones(1, device=device, requires_grad=True)
        first = (2 * w).sum()
        w.data = w.data.to(D)  # as module.double() does
        return first + (3 * w).sum(), w

    (loss, w), (again, other) = losses(), losses()
    again.backward()
    assert other.grad is not None
    theirs = grad(loss, w, retain_graph=True)[0]
    return Case(theirs, other.grad, lambda: gradkit.value_and_grads(loss, w)[1])


class InWorkspace(torch.autograd.Function):
    """The identity; its backward returns the memory of one array of numpy in every pass."""

    array = numpy.zeros(1)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        InWorkspace.array[:] = cotangents[0].numpy()
        return torch.from_numpy(InWorkspace.array)


def gradient_in_a_workspace(_: torch.device) -> Case:
    w = torch.ones(1, dtype=D, requires_grad=True)

    def first_of_two(call: Callable[[Tensor], Tensor]) -> Tensor:
        first, _ = (call((factor * InWorkspace.apply(w + 0)).sum()) for factor in (1, 5))
        return first

    def ours(loss: Tensor) -> Tensor:
        result: Tensor = gradkit.value_and_grads(loss, w)[1]
        return result

    theirs = first_of_two(lambda loss: grad(loss, w)[0])
    return Case(theirs, grad((1 * w).sum(), w)[0], lambda: first_of_two(ours))


_LIBRARY = torch.library.Library("gradkit_rows", "FRAGMENT")
_LIBRARY.define("cube(Tensor x) -> Tensor")
for _kernel in ("CPU", "CUDA"):
    _LIBRARY.impl("cube", lambda x: torch.empty_like(x).copy_(x.detach() ** 3), _kernel)


def operator_without_autograd(device: torch.device) -> Case:
    w = torch.ones(1, dtype=D, device=device, requires_grad=True)

    def loss() -> Tensor:
        cube: Tensor = torch.ops.gradkit_rows.cube(w)
        return (cube + w).sum()

    def quietly(call: Callable[[], Tensor]) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own
            return call()

    theirs, right = quietly(lambda: grad(loss(), w)[0]), grad((w**3 + w).sum(), w)[0]
    with gradkit.checked(), pytest.raises(gradkit.UnsupportedGraphError, match="autograd kernel"):
        loss()
    return Case(theirs, right, lambda: quietly(lambda: gradkit.value_and_grads(loss(), w)[1]))


@torch.library.custom_op("gradkit_rows::triple_", mutates_args=("x",))
def triple_(x: Tensor) -> None:
    """Triple a tensor."""
    x.mul_(3)


def operator_that_writes(device: torch.device) -> Case:
    w = torch.ones(1, dtype=D, device=device, requires_grad=True)

    def loss(write: Callable[[Tensor], object]) -> Tensor:
        x = w * 1
        write(x)
        return x.sum()

    with gradkit.checked(), pytest.raises(gradkit.UnsupportedGraphError, match="one that writes"):
        loss(triple_)
    right = grad(loss(lambda x: x.mul_(3)), w)[0]
    return Case(
        grad(loss(triple_), w)[0], right, lambda: gradkit.value_and_grads(loss(triple_), w)[1]
    )


@torch.library.custom_op("gradkit_rows::add_to_", mutates_args=("total",))
def add_to_(total: Tensor, x: Tensor) -> None:
    """Add a tensor to another, as a layer does to its statistics."""
    total.add_(x)


def operator_that_writes_on_a_constant(device: torch.device) -> Case:
    w = torch.ones(1, dtype=D, device=device, requires_grad=True)

    def loss(add: Callable[[Tensor, Tensor], object]) -> Tensor:
        total = torch.zeros_like(w)
        add(total, w * 1)
        return (total * w).sum()

    with gradkit.checked(), pytest.raises(gradkit.UnsupportedGraphError, match="one that writes"):
        loss(add_to_)
    right = grad(loss(lambda total, x: total.add_(x)), w)[0]
    return Case(
        grad(loss(add_to_), w)[0], right, lambda: gradkit.value_and_grads(loss(add_to_), w)[1]
    )


def captured_tensor_changed_behind_autograd(device: torch.device) -> Case:
    one = torch.ones(1, dtype=D, device=device)

    def pulled(vjp: Callable[..., Any], write: Callable[[Tensor], object]) -> Tensor:
        w = 2 * one
        pull = vjp(lambda x: w * x, one)[1]
        write(w)
        result: Tensor = pull(one)[0]
        return result

    def behind(w: Tensor) -> object:
        return w.data.add_(1)

    with pytest.raises(gradkit.UnsupportedGraphError, match="changed in place since"):
        pulled(func.vjp, lambda w: w.add_(1))
    theirs, right = pulled(torch.func.vjp, behind), pulled(torch.func.vjp, lambda w: None)
    return Case(theirs, right, lambda: pulled(func.vjp, behind))


REFUSED = "`UnsupportedGraphError`"
BY_CHECKED = f"`checked()`: {REFUSED}; `value_and_grads`"


def _times_ten(grad: Tensor) -> None:
    grad.mul_(10)


def _data_times_ten(grad: Tensor) -> None:
    grad.data.mul_(10)


def hook_that_writes_through_data(device: torch.device) -> Case:
    return _by_hook(_data_times_ten, lambda a, z: a + z, device)


def hook_that_writes_on_a_part_of_a_sum(device: torch.device) -> Case:
    a, b = (torch.ones(1, device=device, requires_grad=True) for _ in range(2))
    kept: list[Tensor] = []

    def loss() -> Tensor:
        c, z = a * 1, b * 1
        z.register_hook(_times_ten)
        z.register_hook(kept.append)  # so that the engine adds into another tensor
        return ((a + z + c) * torch.ones(1, device=device)).sum()

    (right,) = grad(loss(), a)
    theirs, _ = grad(loss(), (a, b))
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss(), [a, b])[1][0])


def hook_that_writes_where_torch_has_written(device: torch.device) -> Case:
    index = torch.tensor([0], device=device)
    return _by_hook(_times_ten, lambda a, z: (a + z)[index], device)


def hook_that_writes_below_a_sum(device: torch.device) -> Case:
    def twice(a: Tensor, z: Tensor) -> Tensor:
        y = a + z
        return y + y  # two parts of a gradient, which the engine might have added in place

    return _by_hook(_times_ten, twice, device)


def hook_that_writes_beside_another_operation(device: torch.device) -> Case:
    a, b = (torch.ones(1, device=device, requires_grad=True) for _ in range(2))

    def loss(hook: Callable[[Tensor], Tensor | None]) -> Tensor:
        y = 2 * a  # made before z, so that its backward runs after the hook
        z = b * 1
        z.register_hook(hook)
        return (z + y).sum()

    right, _ = grad(loss(lambda g: g * 10), [a, b])
    with gradkit.checked():
        assert torch.equal(gradkit.value_and_grads(loss(_times_ten), [a, b])[1][0], right)
    theirs = grad(loss(_times_ten), [a, b])[0]
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss(_times_ten), [a, b])[1][0])


def _by_hook(
    hook: Callable[[Tensor], None], fn: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> Case:
    """Differentiate `fn(a, z)` by `a`, where `z = b * 1` has the hook."""
    a, b = (torch.ones(1, device=device, requires_grad=True) for _ in range(2))

    def loss() -> Tensor:
        z = b * 1
        z.register_hook(hook)
        return (fn(a, z) * torch.ones(1, device=device)).sum()

    (right,) = grad(loss(), a)
    with gradkit.checked(), pytest.warns(gradkit.GradkitWarning, match="wrote on its gradient"):
        assert torch.equal(gradkit.value_and_grads(loss(), [a, b])[1][0], right)
    theirs, _ = grad(loss(), (a, b))
    return Case(theirs, right, lambda: gradkit.value_and_grads(loss(), [a, b])[1][0])


class CubedWithAConstant(OnceCubed):
    """Whose gradient depends on its cotangent, and no more on its input."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return cotangent * 3 * x.detach() ** 2


class CubedWithItsSlopeOutside(torch.autograd.Function):
    """The cube, whose forward pass keeps what the backward needs on the class."""

    slope: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CubedWithItsSlopeOutside.slope = 3 * x**2
        return x**3

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0] * CubedWithItsSlopeOutside.slope


def second_of_a_backward_with_a_constant(
    device: torch.device, function: type[torch.autograd.Function] = CubedWithAConstant
) -> Case:
    def second(fn: Callable[[Tensor], Tensor], slope: Callable[..., Tensor]) -> Tensor:
        w = torch.ones(1, device=device, requires_grad=True)
        return grad(slope((fn(w) + w**2).sum(), w).sum(), w)[0]

    def theirs(loss: Tensor, w: Tensor) -> Tensor:
        return grad(loss, w, create_graph=True)[0]

    def ours(loss: Tensor, w: Tensor) -> Tensor:
        return gradkit.value_and_grads(loss, w, create_graph=True)[1]

    constant: Any = function.apply
    if function is CubedWithAConstant:
        with pytest.raises(gradkit.GradientCheckError, match=r"order 2.*through CubedWithAConst"):
            gradkit.func.check_grads(constant, torch.ones(1, device=device))
    right = second(lambda x: x**3, theirs)
    return Case(second(constant, theirs), right, lambda: second(constant, ours))


def second_with_a_slope_outside(device: torch.device) -> Case:
    return second_of_a_backward_with_a_constant(device, CubedWithItsSlopeOutside)


ROWS = [
    *special_points.UNSEEN,
    Row(
        "`w.data.add_(1)` after the loss `w * w` is computed: w.r.t. `w`",
        [4.0], [2.0], "`value_and_grads`", value_changed_behind_autograd, same=True,
    ),
    Row(
        "`SGD([d], fused=True).step()`, which changes `d` from 2 to 1, after the loss `d * g` is "
        "computed: w.r.t. `g`",
        [1.0], [2.0],
        "`value_and_grads` after `minimize_`, `step_`, or `step()` in `checked()`: "
        "`UnsupportedGraphError`; `value_and_grads` after `step()`",
        graph_from_before_a_fused_step, same=True,
    ),
    Row(
        "`grad(x.as_strided_scatter(zero, (1,), (1,), 1).square().sum(), x)` at `[1, 2, 3]`",
        [0.0, 0.0, 0.0], [2.0, 0.0, 6.0],
        UNCHECKED, by_input_of_as_strided_scatter,
        same=True,
    ),
    Row(
        "`grad(torch.cat([zeros, zeros.as_strided_scatter(x, (1,), (1,), 1)]) @ "
        "[0, 1, 2, 3], x)`",
        [1.0], [3.0],
        UNCHECKED, by_source_of_as_strided_scatter,
        same=True,
    ),
    Row(
        "`grad((torch.special.bessel_j0(w) + w**2).sum(), w)`, and with 7 more functions of "
        "`torch.special`",
        [2.0], [1.5599],
        f"`func.value_and_grads`: right; {CHECKED}; `func.check_grads`: `GradientCheckError`; "
        "`value_and_grads`",
        bessel_without_graph, same=True, mended=BESSEL_MENDED,
    ),
    Row(
        "`grad((torch.special.spherical_bessel_j0(w) + w**2).sum(), w)`, and with 15 more "
        "functions of `torch.special`",
        [2.0], [1.6988], f"`func.value_and_grads`: right; {CHECKED}; `value_and_grads`",
        spherical_bessel_without_graph, same=True,
    ),
    Row(
        "`grad((torch.special.airy_ai(w) + w**2).sum(), w)`",
        [2.0], [1.8409], UNCHECKED, airy_without_graph, same=True,
    ),
    Row(
        "`grad(torch.normal(zero, std).sum(), std)`, where the normal draw is 1.5410",
        [0.0], [1.5410], UNCHECKED, sample_of_normal, same=True,
    ),
    Row(
        "two checkpointed SGD steps on `k * (w - start)**2` from `w = start`, the first with `k = "
        "1`, the second with `k = 3`: w.r.t. `w`",
        [0.8, 0.8], [1.2, 1.2],
        "`meta.unroll`, `k` in the batch: right; `meta.unroll(..., memory=\"recompute\")`",
        proximal_term_that_changed, same=True,
    ),
    Row(
        "`grad((cube(w) + w).sum(), w)`, where `cube` is an operator without an autograd kernel; "
        "torch warns once",
        [1.0], [4.0], UNCHECKED,
        operator_without_autograd, same=True,
    ),
    Row(
        "`grad(x.sum(), w)`, where an operator with `mutates_args` has tripled `x = w * 1` in "
        "place",
        [1.0], [3.0], UNCHECKED, operator_that_writes, same=True,
    ),
    Row(
        "`grad((y * w).sum(), w)`, where an operator with `mutates_args` has added `w * 1` to `y`, "
        "a constant of zero",
        [1.0], [2.0], UNCHECKED,
        operator_that_writes_on_a_constant, same=True,
    ),
    Row(
        "`vjp(lambda x: w * x, x)`, where `w` is 2, then `w.data.add_(1)`: what the vjp function "
        "returns for `one`",
        [3.0], [2.0],
        "`func.vjp`, `w.add_(1)`: `UnsupportedGraphError`; `func.vjp`, `w.data.add_(1)`",
        captured_tensor_changed_behind_autograd, same=True,
    ),
    Row(
        "`grad(3 * y, w)`, after `y.retain_grad()`: `y.grad`",
        [3.0], None, "`value_and_grads(loss, w)`", retained_grad_inside, same=True,
    ),
    Row(
        "`grad(norm(x * w).square().sum(), w)`, where `norm` is a batch norm in eval mode whose "
        "statistics have changed since the forward pass",
        [14.142], [20.0], "`value_and_grads`", statistics_changed_since, same=True,
    ),
    Row(
        "`grad(checkpoint(lambda x: (w * x) ** 2, x), w)` at 2, where `x` is 3; `w` was "
        "doubled after the forward pass",
        [72.0], [36.0], BY_CHECKED, weight_stepped_after_a_checkpoint, same=True,
    ),
    Row(
        "a checkpoint of `(w * x * b) ** 2` at the same `w` and `x`, where the function adds 1 to "
        "the buffer `b`",
        [144.0], [36.0], BY_CHECKED, buffer_written_in_a_checkpoint, same=True,
    ),
    Row(
        "a checkpoint of `(w * x * b) ** 2` at the same `w` and `x`, where `b` is a random number "
        "of numpy",
        [9.431], [14.606], BY_CHECKED, numbers_of_numpy_in_a_checkpoint, same=True,
    ),
    Row(
        "a checkpoint of `sin(w * x * v)` at the same `w` and `x`, where `v` is 5; "
        "`v.requires_grad_()` before the backward pass",
        [14.403], [2.314], BY_CHECKED, factor_that_is_unfrozen_after_a_checkpoint, same=True,
    ),
    Row(
        "`grad(rrelu(w, training=True), w).isnan()`, under saved-tensor hooks that copy; torch "
        "reads uninitialized memory",
        [True], [False],
        f"with `create_graph=True`: {REFUSED}; {BY_CHECKED}",
        noise_of_rrelu_copied_by_a_hook, same=True,
    ),
    Row(
        "`grad((2 * w).sum() + linear(x, w).sum(), w)`, where `w` was made in inference mode",
        [[2.0]], [[3.0]],
        f"`value_and_grads` without `2 * w`: {REFUSED}; `value_and_grads` with `2 * w`",
        parameter_of_inference_mode, same=True,
    ),
    Row(
        "`grad((2 * w).sum() + (3 * w).sum(), w)`, where `w` was cast to float64 in between",
        [3.0], [5.0], "`value_and_grads`", parameter_cast_between_two_losses, same=True,
    ),
    Row(
        "`grad(a + z, (a, b))`, where `z = b * 1` has a hook `g.data.mul_(10)`: w.r.t. `a`",
        [10.0], [1.0], f"{CHECKED}; `value_and_grads`", hook_that_writes_through_data, same=True,
    ),
    Row(
        "`grad(a + z + c, (a, b))`, where `z = b * 1` has the hook `g.mul_(10)` and one that keeps "
        "`g`, and `c = a * 1` is older than `z`: w.r.t. `a`",
        [20.0], [2.0], "`value_and_grads`", hook_that_writes_on_a_part_of_a_sum, same=True,
    ),
    Row(
        "`grad((a + z)[index], (a, b))`, where `z = b * 1` has the hook `g.mul_(10)`: w.r.t. `a`",
        [10.0], [1.0], f"{CHECKED}; `value_and_grads`", hook_that_writes_where_torch_has_written,
        same=True,
    ),
    Row(
        "`grad(y + y, (a, b))`, where `y = a + z`, and `z` has the hook `g.mul_(10)`: w.r.t. `a`",
        [20.0], [2.0], f"{CHECKED}; `value_and_grads`", hook_that_writes_below_a_sum, same=True,
    ),
    Row(
        "`grad(z + y, (a, b))`, where `y = 2 * a`, and `z = b * 1` has the hook `g.mul_(10)`: "
        "w.r.t. `a`",
        [20.0], [2.0], f"{CHECKED}; `value_and_grads`", hook_that_writes_beside_another_operation,
        same=True,
    ),
    Row(
        "`grad(f(w + 0), w)`, where the backward of `f` returns the same numpy array in every "
        "pass: the first gradient, after a second pass",
        [5.0], [1.0], "`value_and_grads(f(w), w)`: right; `value_and_grads(f(w + 0), w)`",
        gradient_in_a_workspace, same=True,
    ),
    Row(
        "a second derivative of `f(w) + w**2`, where the backward of the cube `f` is "
        "`g * 3 * x.detach()**2`",
        [2.0], [8.0],
        "`func.check_grads`: `GradientCheckError`; `value_and_grads(..., create_graph=True)`",
        second_of_a_backward_with_a_constant, same=True,
    ),
    Row(
        "a second derivative of `f(w) + w**2`, where the forward pass of the cube `f` keeps "
        "`3 * x**2` outside of `ctx`",
        [2.0], [8.0], "`value_and_grads(..., create_graph=True)`",
        second_with_a_slope_outside, same=True,
    ),
    Row(
        "`module(x)` in another thread, during `functional_call(module, params, x)`: its result, "
        "which should not depend on `params`",
        [10.0], [1.0], "`func.make_functional`", module_called_in_another_thread, same=True,
    ),
    Row(
        "`dist.all_reduce(x)` after the loss `w * x` is computed: w.r.t. `w`",
        [4.0], [1.0], "`value_and_grads`", shown(factor_that_was_reduced), same=True,
    ),
    Row(
        "`grad(f)`, where `f` returns `w * x + later()`: a `functional_call` has returned `w * x` "
        "and the function `later`, which reads the module's `w`",
        [1.0], [2.0],
        "`func.make_functional`: `UnsupportedGraphError`; `func.value_and_grads` of `f`",
        output_computed_later, same=True,
    ),
    Row(
        "`grad(f)`, where `f` is a `functional_call` of a module that returns `w * x + listed[0] * "
        "x`, and whose list `listed` holds `w`",
        [1.0], [2.0],
        "`func.make_functional`: `UnsupportedGraphError`; `func.value_and_grads` of `f`",
        parameter_in_a_list, same=True,
    ),
    Row(
        "`grad(f)`, where `f` is a `functional_call` of a module that returns `w * x + kept`, and "
        "`kept` is `2 * w` of an earlier pass, under `no_grad`",
        [1.0], [3.0], "`func.make_functional`", cache_without_a_graph, same=True,
    ),
    Row(
        "`grad(call({\"w\": w}, {}, x)[0] + module.penalty, w)` at 3, where `call` comes from "
        "`make_functional`, and an earlier call of the module has set `module.penalty = w**2`",
        [1.0], [7.0],
        "`func.value_and_grads` of the loss: right; `checked()`: `UnsupportedGraphError`; "
        "`value_and_grads`",
        penalty_read_after_an_eager_call, same=True,
    ),
]  # fmt: skip
