"""make_functional does what the module does, and nothing else; a training loop is the oracle."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import stack_module_state, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import gradkit
from gradkit.func import make_functional
from tests.helpers import assert_same_bits, unchanged

Build = Callable[[], nn.Module]
LR = 0.1


class Counts(nn.Module):
    """Has buffers that are assigned and written on, and keeps what it sees in containers."""

    steps: Tensor
    mean: Tensor
    grown: Tensor
    absent: Tensor
    seen: Tensor | None

    def __init__(self, *, fail: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("grown", torch.zeros(0))
        self.register_buffer("absent", None)
        self.fail, self.seen = fail, None
        self.all_seen: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}
        self.shapes: set[torch.Size] = set()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.steps, self.seen = self.steps + 1, x
        self.all_seen.append(x)
        self.cache["x"] = x
        self.shapes.add(x.shape)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.absent = self.mean * 2  # a cache, which a call leaves absent
        self.grown = torch.cat([self.grown, self.mean[:1]])
        if self.fail:
            raise ZeroDivisionError("after the buffers were written")
        return self.inner(x - self.mean) * self.steps * scale


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.a.register_buffer("scale", torch.ones(3))
        self.b.register_buffer("scale", self.a.scale)

    def forward(self, x: Tensor) -> Tensor:
        self.a.scale.mul_(0.9)
        return self.b(self.a(x).tanh()) * self.b.scale


class Twice(nn.Module):
    """One module under two names, of which functional_call leaves the tensors of the call in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def nested() -> nn.Module:
    inner = nn.Sequential(
        nn.BatchNorm1d(4), nn.Dropout(), nn.ModuleDict({"x": nn.Linear(4, 4)})["x"]
    )
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(inner, nn.ReLU()), nn.Linear(4, 2))


def conv(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 1), norm, nn.Flatten())


MODULES: dict[str, Build] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()),
    "batch norm without momentum": lambda: conv(nn.BatchNorm1d(4, momentum=None)),
    "batch norm without parameters": lambda: nn.BatchNorm1d(3, affine=False),
    "batch norm without buffers": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "batch norm in eval mode": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(),
    "instance norm": lambda: conv(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
    "nested, with dropout": nested,
    "tied": Tied,
    "one module under two names": Twice,
    "buffers of its own": Counts,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(3, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
    ),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 4),
    "frozen": lambda: nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)),
    "nothing": nn.Tanh,
}


def total(out: Any) -> Tensor:
    return torch.stack([t.sin().sum() for t in optree.tree_leaves(out)]).sum()


def is_same(device: torch.device, ours: Any, theirs: Any) -> None:
    ours, theirs = optree.tree_leaves(ours), optree.tree_leaves(theirs)
    if device.type == "cpu":
        assert_same_bits(ours, theirs)
    else:  # whose kernels may add in another order the second time
        torch.testing.assert_close(ours, theirs)


def places(module: nn.Module) -> list[Any]:
    """Which tensor, or other attribute, stands where, in order."""
    return [
        [(name, id(t)) for name, t in {**m._parameters, **m._buffers, **vars(m)}.items()]
        + [list(map(id, value)) for value in vars(m).values() if isinstance(value, list | set)]
        + [
            (key, id(v))
            for value in vars(m).values()
            if type(value) is dict
            for key, v in value.items()
        ]
        for m in module.modules()
    ]


@contextmanager
def pure(module: nn.Module, *trees: Any) -> Iterator[None]:
    """Assert that a block changes no bit or version of module or trees, and moves no tensor."""
    before = places(module)
    flat: list[Any] = optree.tree_leaves(cast(Any, trees))
    leaves = [t for t in flat if isinstance(t, Tensor)]
    try:
        with unchanged(*module.parameters(), *module.buffers(), *leaves):
            yield
    finally:
        assert places(module) == before


@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
@pytest.mark.parametrize("name", MODULES)
def test_a_functional_training_loop_is_the_module_s(device: torch.device, name: str) -> None:
    module = MODULES[name]().to(device)
    reference = copy.deepcopy(module)
    call, params, buffers = make_functional(module)
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained or [torch.ones(1)], LR, foreach=False)
    for step in range(4):
        x = torch.randn(5, 3, device=device)
        torch.manual_seed(step)
        expected = reference(x)
        torch.manual_seed(step)
        with pure(module, params, buffers, x):
            out, new_buffers = call(params, buffers, x)
        is_same(device, out, expected)
        assert list(new_buffers) == list(buffers)
        expected_buffers = dict(reference.named_buffers())
        is_same(device, list(new_buffers.values()), [expected_buffers[name] for name in buffers])
        buffers = new_buffers
        if not trained:
            continue
        with pure(module, params, buffers, x):
            _, grads = gradkit.value_and_grads(total(out), params)
        optimizer.zero_grad()
        total(expected).backward()
        optimizer.step()
        params = {
            name: p if grads[name] is None else p.detach().add(grads[name], alpha=-LR)
            for name, p in params.items()
        }
        params = {name: p.requires_grad_(grads[name] is not None) for name, p in params.items()}
        is_same(device, list(params.values()), list(reference.parameters()))


def test_params_are_the_module_s_own_and_buffers_are_copies(device: torch.device) -> None:
    module = nested().to(device)
    call, params, buffers = make_functional(module)
    assert list(params) == [name for name, _ in module.named_parameters()]
    assert all(a is b for a, b in zip(params.values(), module.parameters(), strict=True))
    assert list(buffers) == [name for name, _ in module.named_buffers()]
    x = torch.randn(5, 3, device=device)
    for mode in (True, False):
        module.train(mode)  # which counts when it is called
        new = call(params, buffers, x)[1]
        memory = [
            t.untyped_storage().data_ptr()
            for t in (*new.values(), *buffers.values(), *module.buffers())
        ]
        assert len(set(memory)) == 3 * len(buffers)
        assert int(new["1.0.0.num_batches_tracked"]) == mode
    with unchanged(*buffers.values(), *new.values()):
        module.train()(x)
        with torch.no_grad():
            params["0.bias"].add_(1)
    assert int(module[1][0][0].num_batches_tracked) == 1
    torch.manual_seed(0)
    out, _ = call(params, buffers, x)
    torch.manual_seed(0)
    assert_same_bits([out], [copy.deepcopy(module)(x)])  # it follows its parameters


def test_arguments_are_passed_on_and_trees_may_be_any_mapping(device: torch.device) -> None:
    module = Counts().to(device)
    call, params, buffers = make_functional(module)
    x = torch.randn(5, 3, device=device)
    out, new = call(
        OrderedDict(reversed(params.items())), OrderedDict(reversed(buffers.items())), x, scale=2.5
    )
    assert list(new) == ["steps", "mean", "grown"]
    assert_same_bits([out], [module(x=x, scale=2.5)])
    assert_same_bits([call(params=params, buffers=buffers, x=x)[0]], [call(params, buffers, x)[0]])


def test_a_call_within_a_loop_over_the_module(device: torch.device) -> None:
    module = nn.Linear(3, 2).to(device)
    module.register_parameter("scale", nn.Parameter(torch.ones(2, device=device)))
    weight = module.weight
    del module.weight  # which leaves a gap in the dictionary that the loop reads
    module.register_parameter("weight", weight)
    call, params, buffers = make_functional(module)
    names = []
    for name, _ in module.named_parameters():
        call(params, buffers, torch.ones(1, 3, device=device))
        names.append(name)
    assert names == ["bias", "scale", "weight"]


def test_other_tensors_take_the_place_of_the_module_s_own(device: torch.device) -> None:
    for build in (nested, Tied, MODULES["weight norm"], MODULES["spectral norm"]):
        module, other = build().to(device), build().to(device)
        x = torch.randn(5, 3, device=device)
        other(x)
        call, _, _ = make_functional(module)
        _, params, buffers = make_functional(other)
        with pure(module, params, buffers), pure(other):
            torch.manual_seed(0)
            out, new = call(params, buffers, x)
            grads = torch.autograd.grad(total(out), list(params.values()))
        torch.manual_seed(0)
        expected = other(x)
        is_same(device, [out, *new.values()], [expected, *other.buffers()])
        is_same(device, grads, torch.autograd.grad(total(expected), list(other.parameters())))


@pytest.mark.parametrize(
    ("build", "width", "error"),
    [
        (nested, 2, RuntimeError),
        (lambda: nn.Sequential(nn.BatchNorm1d(3), Tied(), nn.Linear(2, 2)), 3, RuntimeError),
        (lambda: nn.Sequential(nn.BatchNorm1d(3), Counts(fail=True)), 3, ZeroDivisionError),
        (lambda: nn.Sequential(MODULES["spectral norm"](), nn.Linear(2, 2)), 3, RuntimeError),
        (lambda: nn.LSTM(3, 4), 2, RuntimeError),
    ],
)
def test_a_call_that_raises_leaves_the_module_as_it_was(
    device: torch.device, build: Build, width: int, error: type[Exception]
) -> None:
    module, x = build().to(device), torch.ones(5, width, device=device)
    call, _, _ = make_functional(module)
    for other in (module, copy.deepcopy(module)):
        _, params, buffers = make_functional(other)
        with pure(module, params, buffers, x), pytest.raises(error):
            call(params, buffers, x)


PARAMS_AND_BUFFERS: list[tuple[Callable[[Any, Any], tuple[Any, Any]], str]] = [
    (lambda p, b: ({}, b), "^params: expected .*'a.weight', 'a.bias', 'b.bias', got none"),
    (
        lambda p, b: ({k: p[k] for k in ("a.weight", "a.bias")}, b),
        "^params: .*got 'a.weight', 'a.b",
    ),
    (lambda p, b: ({**p, "c.weight": p["a.weight"]}, b), "^params: .*'c.weight'"),
    (lambda p, b: ({**p, "b.weight": p["a.weight"]}, b), "(?s)^params: .*a tied one once"),
    (lambda p, b: (list(p.values()), b), "^params: .* got the list"),
    (lambda p, b: (b, p), "^params: .* got 'a.scale'"),
    (lambda p, b: (p, {}), "^buffers: expected .*'a.scale', got none"),
    (lambda p, b: (p, {**b, "b.scale": b["a.scale"]}), "^buffers: .*'b.scale'"),
    (lambda p, b: (p, None), "^buffers: .* got the NoneType None"),
    (lambda p, b: ({**p, "a.bias": 1.0}, b), r"^params\['a.bias'\]: expected a tensor.*float 1.0"),
    (lambda p, b: (p, {"a.scale": None}), r"^buffers\['a.scale'\]: expected a tensor.*None"),
]


@pytest.mark.parametrize(("given", "words"), PARAMS_AND_BUFFERS)
def test_trees_that_do_not_fit_are_refused(device: torch.device, given: Any, words: str) -> None:
    with device:  # `.to(device)` gives each name of a tied buffer one of its own
        module = Tied()
    call, params, buffers = make_functional(module)
    calls: list[Any] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    error = gradkit.LeafTypeError if "a tensor" in words else gradkit.StructureError
    with pure(module, params, buffers), pytest.raises(error, match=words):
        call(*given(params, buffers), torch.ones(2, 3, device=device))
    assert not calls


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda x: x, "^module: expected an nn.Module, got the function"),
        (nn.Linear(2, 2).state_dict(), "^module: expected an nn.Module"),
        (nn.LazyLinear(3), "^module.weight: .* a lazy module"),
        (nn.Sequential(nn.ReLU(), nn.LazyLinear(3)), "^module.1.weight: .* a lazy module"),
        (nn.LazyBatchNorm1d(affine=False), "^module.running_mean: .* a lazy module"),
    ],
)
def test_what_is_no_module_yet_is_refused(device: torch.device, module: Any, words: str) -> None:
    with pytest.raises(gradkit.LeafTypeError, match=words):
        make_functional(module)


def test_a_lazy_module_that_has_run_is_one(device: torch.device) -> None:
    module, x = nn.LazyLinear(3, device=device), torch.ones(1, 2, device=device)
    expected = module(x)
    call, params, buffers = make_functional(module)
    assert_same_bits([call(params, buffers, x)[0]], [expected])


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_distributed_module_is_refused(device: torch.device) -> None:
    module = nn.Linear(3, 3).to(device)
    wrapped = nn.parallel.DistributedDataParallel(module)
    for one in (wrapped, nn.Sequential(nn.ReLU(), wrapped)):
        with pytest.raises(gradkit.UnsupportedGraphError, match="DistributedDataParallel"):
            make_functional(one)
    make_functional(wrapped.module)


@dataclass
class Output:
    """What optree does not know: as the outputs of many a model library."""

    loss: Tensor


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class Checkpointed(nn.Module):
    """A module with a checkpoint inside, whose result leaves it in one way or another."""

    def __init__(self, out: str = "tensor", *, inside: bool = True) -> None:
        super().__init__()
        self.inside = inside
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
        self.register_buffer("last", torch.zeros(()))
        self.out = out

    def forward(self, x: Tensor) -> Any:
        inner = Square.apply if self.out == "function" else self.inner
        h = self.inner[0](x) if self.out == "function" else x
        y = (checkpoint(inner, h, use_reentrant=False) if self.inside else inner(h)).sum()
        if self.out == "buffer":
            self.last = y
            return x.sum()
        if self.out == "through a buffer":
            self.last.add_(y)
            return self.last * 2
        return {"tree": {"a": [y]}, "object": Output(y)}.get(self.out, y)


def other_params(params: Any) -> Any:
    return {name: p.detach().mul(2).requires_grad_() for name, p in params.items()}


@pytest.mark.parametrize(
    "out", ["tensor", "function", "tree", "object", "buffer", "through a buffer"]
)
def test_a_checkpoint_inside_recomputes_with_the_given_parameters(
    device: torch.device, out: str
) -> None:
    """By torch, it would run on the module's own: silently wrong [F3]."""
    module = Checkpointed(out).to(device)
    plain = Checkpointed(out, inside=False).to(device)
    plain.load_state_dict(module.state_dict())
    call, own, buffers = make_functional(module)
    x = torch.randn(2, 3, device=device, requires_grad=True)

    def results(call: Callable[..., Any], params: Any) -> Any:
        result, new = call(params, buffers, x)
        result = result.loss if out == "object" else result
        loss = total([result, *new.values()])
        options: Any = {"allow_unused": True}
        grads = torch.autograd.grad(loss, [x, *params.values()], create_graph=True, **options)
        present = [grad for grad in grads if grad is not None and grad.requires_grad]
        second = torch.autograd.grad(total(present), [x, *params.values()], **options)
        return [result, new, [grad for grad in (*grads, *second) if grad is not None]]

    for params in (own, other_params(own)):
        with pure(module, params, buffers, x):
            got = results(call, params)
        is_same(device, got, results(make_functional(plain)[0], params))
    with torch.no_grad():  # where nothing is recomputed
        result, new = call(other_params(own), buffers, x)
        module.load_state_dict({**other_params(own), **buffers})
        expected = module(x)
    if out == "object":
        result, expected = result.loss, expected.loss
    is_same(device, [result, *new.values()], [expected, *module.buffers()])


def test_a_checkpoint_of_the_whole_call_is_exact(device: torch.device) -> None:
    module = nested().to(device)
    call, own, buffers = make_functional(module)
    reference = copy.deepcopy(module)
    params = other_params(own)
    reference.load_state_dict({**params, **buffers})
    x = torch.randn(5, 3, device=device)
    torch.manual_seed(0)
    expected = torch.autograd.grad(total(reference(x)), list(reference.parameters()))
    torch.manual_seed(0)
    with pure(module, params, buffers, x):
        out, new = checkpoint(call, params, buffers, x, use_reentrant=False)
        _, grads = gradkit.value_and_grads(total(out), params)
    is_same(device, list(grads.values()), expected)
    is_same(device, list(new.values()), list(reference.buffers()))
    # It may have another one inside.
    results = []
    for inside in (True, False):
        torch.manual_seed(0)
        call, own, buffers = make_functional(Checkpointed(inside=inside).to(device))
        params = other_params(own)
        out, _ = checkpoint(call, params, buffers, x, use_reentrant=False)
        results.append(gradkit.value_and_grads(out.sum(), params)[1])
    is_same(device, *results)


@pytest.mark.parametrize("given", ["alive", "input", "keyword", "params", "buffers"])
def test_a_checkpoint_elsewhere_is_none_of_its_business(device: torch.device, given: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    module.register_buffer("shift", torch.zeros(3, device=device))
    module.register_forward_pre_hook(lambda module, args: args and args[0] + module.shift)
    body = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    call, own, buffers = make_functional(module)
    x = torch.randn(5, 3, device=device)

    def gradients(graph: Callable[..., Tensor]) -> Any:
        h = graph(body, x)
        params = {k: p * h.mean() for k, p in own.items()} if given == "params" else own
        shift = {"shift": h.mean(0)} if given == "buffers" else buffers
        inputs = {"input": h} if given == "keyword" else {}
        args = () if inputs else (h if given == "input" else x,)
        with pure(module, params, shift, h):
            out, _ = call(params, shift, *args, **inputs)
        return torch.autograd.grad(total([out, h]), [*body.parameters(), *own.values()])

    ours = gradients(lambda f, x: checkpoint(f, x, use_reentrant=False))
    is_same(device, ours, gradients(lambda f, x: f(x)))


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_ensemble_is_each_of_its_modules(device: torch.device, by_hand: bool) -> None:
    modules = [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(
            device, torch.float64
        )
        for _ in range(3)
    ]
    call, params, buffers = make_functional(modules[0])
    if by_hand:
        each = [make_functional(module)[1:] for module in modules]
        params = {name: torch.stack([p[name] for p, _ in each]) for name in params}
        buffers = {name: torch.stack([b[name] for _, b in each]) for name in buffers}
    else:
        params, buffers = stack_module_state(modules)
    x = torch.randn(3, 5, 3, device=device, dtype=torch.float64)
    for dim, inputs in ((0, x), (None, x[0])):
        with pure(nn.ModuleList(modules), params, buffers, x):
            outs, new = vmap(call, in_dims=(0, 0, dim))(params, buffers, inputs)
        _, grads = gradkit.value_and_grads(total(outs), params)
        for i, module in enumerate(map(copy.deepcopy, modules)):
            expected = module(x[i] if dim == 0 else x[0])
            torch.testing.assert_close(outs[i], expected)
            for name, buffer in module.named_buffers():
                torch.testing.assert_close(new[name][i], buffer)
            for name, grad in gradkit.value_and_grads(total(expected), module)[1].items():
                torch.testing.assert_close(grads[name][i], grad)


class Writes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Replaces(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize(
    "build",
    [lambda: nn.Embedding(5, 3, max_norm=0.1), lambda: Writes(5, 3), lambda: Replaces(5, 3)],
    ids=["norm", "clamp", "data"],
)
@pytest.mark.parametrize("own", [True, False])
def test_a_module_that_writes_on_its_parameters_is_refused_or_right(
    device: torch.device, build: Build, own: bool
) -> None:
    """max_norm writes in every forward pass: on the params that a call was given."""
    module = nn.Sequential(build()).to(device)
    x = torch.arange(5, device=device)
    x = x if isinstance(module[0], nn.Embedding) else x.float()
    expected = copy.deepcopy(module)(x)
    params: dict[str, Tensor] = dict(module.named_parameters())
    params = params if own else {name: p.detach().clone() for name, p in params.items()}
    with suppress(gradkit.UnsupportedGraphError), pure(module, params, x):
        call, _, buffers = make_functional(module)
        is_same(device, call(params, buffers, x)[0], expected)


def test_assigning_to_data_inside_a_transform_says_so(device: torch.device) -> None:
    module = Replaces(2, 2).to(device)
    call, params, buffers = make_functional(module)
    x = torch.ones(3, 2, device=device)
    with pure(module, params), pytest.raises(gradkit.UnsupportedGraphError, match=r"to \.data"):
        gradkit.func.value_and_grads(lambda p: call(p, buffers, x)[0].sum())(params)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def test_cached_parametrizations_are_those_of_the_call(device: torch.device) -> None:
    """torch's cache would give what was computed from other tensors."""
    module = nn.Linear(2, 2).to(device)
    parametrize.register_parametrization(module, "weight", Symmetric())
    call, params, buffers = make_functional(module)
    x = torch.ones(3, 2, device=device)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return call(params, buffers, x)[0].square().sum()

    twice = {name: 2 * p.detach() for name, p in params.items()}
    expected = [gradkit.func.value_and_grads(loss)(p) for p in (params, twice)]
    with parametrize.cached():
        own = module(x)
        got = [gradkit.func.value_and_grads(loss)(p) for p in (params, twice)]
        assert module(x) is not own
        assert torch.equal(module.weight, module.weight)
        assert module.weight is module.weight  # the module's own cache is as before
    for (value, grads), (right, right_grads) in zip(got, expected, strict=True):
        assert torch.equal(value, right)
        assert all(map(torch.equal, grads.values(), right_grads.values()))


class TwoNames(nn.Module):
    """One buffer under two names of one module, of which the forward pass assigns or writes one."""

    def __init__(self, name: str, *, in_place: bool) -> None:
        super().__init__()
        count = torch.zeros(2)
        self.register_buffer("a", count)
        self.register_buffer("b", count)
        self.name, self.in_place = name, in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            getattr(self, self.name).add_(1)
        else:
            setattr(self, self.name, getattr(self, self.name) + 1)
        return x * self.get_buffer("a") + x * self.get_buffer("b")


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_buffer_under_two_names_of_one_module(device: torch.device, name: str) -> None:
    x = torch.ones(2, device=device)
    with device:  # `.to(device)` gives each name a buffer of its own
        module, assigns = (TwoNames(name, in_place=here) for here in (True, False))
    call, params, buffers = make_functional(module)
    out, after = call(params, buffers, x)
    assert torch.equal(out, module(x))
    assert torch.equal(after["a"], module.get_buffer("a"))
    call, params, buffers = make_functional(assigns)
    with pytest.raises(gradkit.UnsupportedGraphError, match="under both its names, 'a' and 'b'"):
        call(params, buffers, x)


class Listed(nn.Module):
    """Holds its weights in a list, too, and computes with what stands there."""

    def __init__(self, *, of: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])
        self.weights = [layer.weight for layer in self.layers]
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "values":
            for weight in self.weights:
                x = nn.functional.linear(x, weight).tanh()
        elif self.of == "a list of values":
            x = x @ torch.cat(self.weights).sum(0)[:, None]
        else:  # nothing of which a derivative could be taken
            x = x.to(self.weights[0].device, self.weights[0].dtype).reshape(-1, *x.shape[1:])
            x = x[:, : self.weights[0].size(1)] * self.weights[0].dim()
            for layer in self.layers:
                x = layer(x)
        return x


@pytest.mark.parametrize("of", ["values", "a list of values"])
def test_parameters_in_a_list_are_not_those_of_the_call(device: torch.device, of: str) -> None:
    """Their gradients would be zeros, and the value that of the module's own."""
    with device:  # `to` makes new parameters on some, and leaves those of the list
        module, x = Listed(of=of), torch.randn(4, 3)
    call, params, buffers = make_functional(module)

    def loss(params: Any) -> Tensor:
        out: Tensor = call(params, buffers, x)[0]
        return out.square().mean()

    assert torch.equal(call(params, buffers, x)[0], module(x))  # they are the same here
    match = r"module: .*reads its own in (linear|cat), held in a list"
    with unchanged(*module.parameters()):
        for compute in (
            lambda: loss(other_params(params)),
            lambda: gradkit.func.value_and_grads(loss)(params),
            lambda: gradkit.meta.unroll(
                lambda p, *_: loss(p), params, [None] * 2, gradkit.meta.sgd(lr=0.1)
            ),
        ):
            with pytest.raises(gradkit.UnsupportedGraphError, match=match):
                compute()


def test_shapes_of_parameters_in_a_list_are_read(device: torch.device) -> None:
    with device:
        module, x = Listed(of="shapes"), torch.randn(4, 3)
    call, params, buffers = make_functional(module)
    others = other_params(params)
    expected = torch.func.functional_call(module, others, (x,))
    assert torch.equal(call(others, buffers, x)[0], expected)
