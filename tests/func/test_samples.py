"""per_sample_grads is a loop over the samples, or a refusal: plain autograd is the oracle."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

import gradkit
from gradkit.func import make_functional, per_sample_grads
from tests.helpers import assert_owned, unchanged

B = 5
F64 = torch.float64
Make = Callable[[torch.device], Tensor]
Build = Callable[[], nn.Module]
Loss = Callable[..., Tensor]
Pair = namedtuple("Pair", "x y")
# Where torch has no batching rule it runs a loop of its own, says so, and is right.
slow_in_torch = pytest.mark.filterwarnings("ignore:There is a performance drop")
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@optree.dataclasses.dataclass(namespace="gradkit")
class Weights:
    weight: Any
    bias: Any


@optree.dataclasses.dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
class Batch:
    x: Any
    note: Any


def real(*shape: int) -> Make:
    return lambda device: torch.randn(B, *shape, device=device, dtype=F64)


def index(*shape: int, high: int = 7) -> Make:
    return lambda device: torch.randint(high, (B, *shape), device=device)


def total(out: Any) -> Tensor:
    """A loss that no symmetry of a layer makes constant."""
    if isinstance(out, Tensor):
        return out.sin().sum()
    return torch.stack([total(part) for part in out if part is not None]).sum()


def loop(module: nn.Module, inputs: list[Tensor], loss: Loss = total, *targets: Tensor) -> Any:
    """The oracle: each sample through the module itself, as a batch of one."""
    rows: dict[str, list[Tensor]] = {}
    for i in range(len(inputs[0])):
        one = copy.deepcopy(module)  # as a module may have changed its buffers for the last one
        named = {name: p for name, p in one.named_parameters() if p.requires_grad}
        value = loss(one(*(x[i : i + 1] for x in inputs)), *(t[i : i + 1] for t in targets))
        grads = torch.autograd.grad(value, list(named.values()), materialize_grads=True)
        by_name = dict(zip(named, grads, strict=True))
        for name, p in one.named_parameters():
            rows.setdefault(name, []).append(by_name.get(name, torch.zeros_like(p)))
    stacked = {name: torch.stack(row).detach() for name, row in rows.items()}
    assert any(not torch.allclose(row[0], row[1], rtol=1e-3) for row in stacked.values())
    return stacked


def ours(
    module: nn.Module, inputs: list[Tensor], loss: Loss = total, *targets: Tensor, **options: Any
) -> Any:
    call, params, buffers = make_functional(module)

    def fn(params: Any, inputs: list[Tensor], *targets: Tensor) -> Tensor:
        out, _ = call(params, buffers, *(x[None] for x in inputs))
        return loss(out, *(t[None] for t in targets))

    with unchanged(*module.parameters(), *module.buffers(), *inputs, *targets):
        grads = per_sample_grads(fn, **options, create_graph=False)(params, inputs, *targets)
    assert_owned(grads.values(), [torch.zeros_like(grad) for grad in grads.values()])
    return grads


class Attend(nn.Module):
    """Attention, of a sequence to itself or to another one."""

    def __init__(self, *, weights: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        self.weights = weights

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        other = x if other is None else other
        return self.attention(x, other, other, need_weights=self.weights)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Tied(nn.Module):
    """A small language model: its embedding is its head, and one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.twice = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.twice(self.twice(self.embedding(tokens)).tanh()))


def frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_submodule(name).requires_grad_(False)
    return module


def after(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2))


def conv_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2).eval(), nn.ReLU(), Residual()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 4), nn.Tanh(), nn.Linear(4, 3)),
    )


def layers() -> Iterator[tuple[str, Build, list[Make]]]:
    """Name, module and inputs: what Opacus and BackPACK test their layers on, and more."""
    # fmt: off
    yield "linear", lambda: nn.Linear(3, 2), [real(3)]
    yield "linear without bias", lambda: nn.Linear(3, 2, bias=False), [real(3)]
    yield "linear of a sequence", lambda: nn.Linear(3, 2), [real(4, 3)]
    yield "linear, 4-d, without bias", lambda: nn.Linear(3, 2, bias=False), [real(2, 4, 3)]
    yield "bilinear", lambda: nn.Bilinear(3, 2, 4), [real(3), real(2)]
    yield "embedding", lambda: nn.Embedding(7, 3), [index(4)]
    yield "embedding, padding", lambda: nn.Embedding(7, 3, padding_idx=1), [index(6)]
    yield "embedding, freq", lambda: nn.Embedding(7, 3, scale_grad_by_freq=True), [index(6)]
    yield "tied weights, a layer twice", Tied, [index(4)]
    yield "frozen body", lambda: frozen(after(nn.Tanh()), "0"), [real(3)]
    yield "frozen head", lambda: frozen(after(nn.Tanh()), "2"), [real(3)]
    yield "residual", lambda: nn.Sequential(Residual(), Residual()), [real(2, 4, 4)]
    yield "conv net", conv_net, [real(1, 8, 8)]
    yield "layer norm", lambda: nn.LayerNorm(3), [real(4, 3)]
    yield "layer norm of two dims", lambda: nn.LayerNorm((4, 3), bias=False), [real(4, 3)]
    yield "group norm", lambda: nn.GroupNorm(2, 4), [real(4, 3)]
    yield "rms norm", lambda: nn.RMSNorm(3), [real(4, 3)]
    yield "PReLU a channel", lambda: after(nn.PReLU(4)), [real(3)]
    yield "dropout in eval mode", lambda: after(nn.Dropout()).eval(), [real(3)]
    # fmt: on
    for mode in ("sum", "mean", "max"):
        yield f"embedding bag, {mode}", partial(nn.EmbeddingBag, 7, 3, mode=mode), [index(4)]
    weight, spectral = parametrizations.weight_norm, parametrizations.spectral_norm
    yield "weight norm", lambda: weight(nn.Linear(3, 2)), [real(3)]
    yield "weight norm, conv", lambda: weight(nn.Conv2d(3, 2, 2)), [real(3, 4, 4)]
    yield "spectral norm", lambda: spectral(nn.Linear(3, 2)), [real(3)]
    yield "orthogonal", lambda: parametrizations.orthogonal(nn.Linear(3, 3)), [real(3)]
    for name in (
        *("ReLU", "Sigmoid", "Tanh", "GELU", "SELU", "ELU", "LeakyReLU", "LogSigmoid", "PReLU"),
        *("SiLU", "Mish", "Softplus", "Hardtanh", "Hardswish"),
    ):
        yield name, partial(lambda name: after(getattr(nn, name)()), name), [real(3)]
    for n in (1, 2, 3):
        for name in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
            conv, pool = getattr(nn, f"Conv{n}d"), getattr(nn, f"{name}{n}d")
            build = partial(lambda c, p: nn.Sequential(c(2, 3, 2), p(2)), conv, pool)
            yield f"{name}{n}d", build, [real(2, *[5] * n)]
        norm = partial(getattr(nn, f"InstanceNorm{n}d"), 4, affine=True)
        yield f"InstanceNorm{n}d", norm, [real(4, *[3] * n)]
        tracked = partial(lambda norm: norm(track_running_stats=True).eval(), norm)
        yield f"InstanceNorm{n}d tracked", tracked, [real(4, *[3] * n)]
        norm = partial(lambda c: c(3).eval(), getattr(nn, f"BatchNorm{n}d"))
        yield f"BatchNorm{n}d in eval mode", norm, [real(3, *[2] * n)]
        yield from convolutions(n)
    yield from attentions()


def convolutions(n: int) -> Iterator[tuple[str, Build, list[Make]]]:
    for name, own in (
        ("Conv", [{"padding": "same", "kernel_size": 3}, {"padding": 1, "padding_mode": "reflect"},
                  {"padding": 1, "padding_mode": "replicate"},
                  {"padding": 1, "padding_mode": "circular"}]),
        ("ConvTranspose", [{"stride": 2, "output_padding": 1}]),
    ):  # fmt: skip
        for options in (
            *({}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"bias": False}, {"groups": 2}),
            *({"groups": 4}, {"stride": 2, "dilation": 2, "padding": 2, "groups": 2}, *own),
        ):
            build = partial(getattr(nn, f"{name}{n}d"), 4, 4, **{"kernel_size": 2, **options})
            yield f"{name}{n}d {options}", build, [real(4, *[5] * n)]


def attentions() -> Iterator[tuple[str, Build, list[Make]]]:
    x, other = real(3, 4), real(5, 4)
    layer = partial(nn.TransformerEncoderLayer, 4, 2, 6, dropout=0.0, batch_first=True)
    decoder = partial(nn.TransformerDecoderLayer, 4, 2, 6, dropout=0.0, batch_first=True)
    table: dict[str, tuple[Build, list[Make]]] = {
        "self-attention": (partial(Attend, weights=True), [x]),
        "self-attention, fused": (partial(Attend, weights=False), [x]),
        "cross-attention": (partial(Attend, weights=True), [x, other]),
        "cross-attention, fused": (partial(Attend, weights=False, add_bias_kv=True), [x, other]),
        "encoder": (layer, [x]),
        "encoder, norm first": (partial(layer, norm_first=True, activation="gelu"), [x]),
        "encoder, frozen": (lambda: frozen(nn.Sequential(layer(), nn.Linear(4, 2)), "0"), [x]),
        "decoder": (decoder, [x, other]),
    }
    for name, (build, inputs) in table.items():
        for mode in (True, False):
            yield f"{name} train={mode}", partial(lambda b, m: b().train(m), build, mode), inputs


@slow_in_torch
@pytest.mark.parametrize(
    ("build", "inputs"), [pytest.param(*case, id=name) for name, *case in layers()]
)
def test_a_layer_is_a_loop(device: torch.device, build: Build, inputs: list[Make]) -> None:
    module = build().to(device, F64)
    batch = [make(device) for make in inputs]
    assert_close(ours(module, batch), loop(module, batch))


@pytest.mark.parametrize(
    ("criterion", "target"),
    [
        (nn.CrossEntropyLoss(), index(high=2)),
        (nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1), index(high=2)),
        (nn.CrossEntropyLoss(weight=torch.tensor([0.3, 2.0])), real(2)),
        (nn.MSELoss(), real(2)),
        (nn.MSELoss(reduction="sum"), real(2)),
        (nn.BCEWithLogitsLoss(), real(2)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.3, 2.0])), real(2)),
        (nn.SmoothL1Loss(), real(2)),
    ],
)
def test_a_loss_is_a_loop(device: torch.device, criterion: nn.Module, target: Make) -> None:
    module = after(nn.Tanh()).to(device, F64)
    loss = copy.deepcopy(criterion).to(device, F64)
    x, y = real(3)(device), target(device)
    assert_close(ours(module, [x], loss, y), loop(module, [x], loss, y))


@slow_in_torch
@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_recurrent_net_is_a_loop(
    device: torch.device, kind: type[nn.Module], options: dict[str, Any]
) -> None:
    module = kind(3, 2, batch_first=True, **options).to(device, F64)
    x = real(4, 3)(device)
    expected = loop(module, [x], lambda out: total(out[0]))
    call, params, buffers = make_functional(module)

    def fn(params: Any, x: Tensor) -> Tensor:
        return total(call(params, buffers, x[None])[0][0])

    with unchanged(*params.values(), x):
        assert_close(per_sample_grads(fn)(params, x), expected)
    copies = {name: p.detach().expand(B, *p.shape) for name, p in params.items()}
    assert_close(per_sample_grads(fn, in_dims=0)(copies, x), expected)


def test_a_module_that_writes_on_its_weight_is_refused(device: torch.device) -> None:
    module = nn.Embedding(7, 3, max_norm=1.0).to(device, F64)
    with pytest.raises(gradkit.UnsupportedGraphError, match="max_norm"):
        ours(module, [index(4)(device)])  # which also sees that nothing has changed


def test_running_statistics_of_each_sample_are_its_own(device: torch.device) -> None:
    module = nn.InstanceNorm2d(4, affine=True, track_running_stats=True).to(device, F64)
    x = real(4, 3, 3)(device)
    assert_close(ours(module, [x]), loop(module, [x]))
    call, params, buffers = make_functional(module)

    def fn(params: Any, x: Tensor) -> Any:
        out, new = call(params, buffers, x[None])
        return total(out), new

    _, new = per_sample_grads(fn, has_aux=True)(params, x)
    rows = [call(params, buffers, one[None])[1] for one in x]
    for name in buffers:
        assert_close(new[name], torch.stack([row[name] for row in rows]))


@slow_in_torch
def test_sparse_gradients_are_those_of_a_loop(device: torch.device) -> None:
    module, x = nn.Embedding(7, 3, sparse=True).to(device, F64), index(4)(device)
    call, params, buffers = make_functional(module)
    with pytest.warns(gradkit.GradkitWarning, match="to a loop: .*[Ss]parse"):
        grads = per_sample_grads(lambda p, x: total(call(p, buffers, x[None])[0]))(params, x)
    dense = nn.Embedding.from_pretrained(module.weight.detach(), freeze=False)
    assert grads["weight"].is_sparse
    assert_close(grads["weight"].to_dense(), loop(dense, [x])["weight"])


@slow_in_torch
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 2), lambda: nn.LSTM(3, 2)])
def test_an_empty_batch_has_empty_gradients(
    device: torch.device, build: Build, chunk_size: int | None
) -> None:
    """The LSTM of the CPU cannot be batched over no samples: it need not be."""
    call, params, buffers = make_functional(build().to(device))
    x = torch.ones(0, 4, 3, device=device)

    def fn(params: Any, x: Tensor) -> Tensor:
        return total(call(params, buffers, x)[0])

    grads = per_sample_grads(fn, chunk_size=chunk_size)(params, x)
    for name, p in params.items():
        assert grads[name].shape == (0, *p.shape)
        assert grads[name].dtype == p.dtype
        assert not grads[name].requires_grad
    swapped = x.movedim(0, 1)
    both = per_sample_grads(fn, (0, 1), in_dims=(None, 1), chunk_size=chunk_size)(params, swapped)
    assert both[1].shape == (0, 4, 3)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_an_empty_batch_with_aux_and_unused(device: torch.device, chunk_size: int | None) -> None:
    w, v = torch.ones(2, device=device), torch.ones(3, device=device)
    x = torch.ones(0, 2, device=device)

    def fn(tree: Any, x: Tensor) -> Any:
        return (tree["w"] * x).sum(), {"out": tree["w"] * x, "first": x[0], "note": 3}

    options: Any = {"has_aux": True, "chunk_size": chunk_size}
    grads, aux = per_sample_grads(fn, **options)({"w": w, "v": v}, x)
    assert grads["w"].shape == (0, 2)
    assert grads["v"].shape == (0, 3)
    assert (aux["out"].shape, aux["first"].shape, aux["note"]) == ((0, 2), (0,), 3)
    grads, _ = per_sample_grads(fn, unused="none", **options)({"w": w, "v": v}, x)
    assert grads["v"] is None
    with pytest.raises(gradkit.UnreachedParamError):
        per_sample_grads(fn, unused="error", **options)({"w": w, "v": v}, x)


def test_aux_of_an_empty_batch_that_torch_cannot_tell(device: torch.device) -> None:
    w, x = torch.ones(1, 1, 2, 2, device=device), torch.ones(0, 1, 4, 4, device=device)

    def fn(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return functional.conv2d(x[None], w).amax(), x

    with unchanged(w, x), pytest.raises(gradkit.StructureError, match=r"at least one sample.*amax"):
        per_sample_grads(fn, has_aux=True)(w, x)
    assert per_sample_grads(lambda w, x: fn(w, x)[0])(w, x).shape == (0, 1, 1, 2, 2)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_dropout(device: torch.device, randomness: Any, chunk_size: int | None) -> None:
    w, x = torch.randn(32, device=device, dtype=F64), real(32)(device)

    def fn(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = functional.dropout(torch.ones_like(w))
        return (mask * w * x).sin().sum(), mask

    call = per_sample_grads(fn, has_aux=True, randomness=randomness, chunk_size=chunk_size)
    if randomness == "error":
        with pytest.raises(RuntimeError, match='randomness="different"'):
            call(w, x)
        return
    grads, masks = call(w, x)
    assert_close(grads, masks * x * (masks * w * x).cos())
    assert masks.unique().tolist() == [0, 2]
    assert len(masks.unique(dim=0)) == (1 if randomness == "same" else B)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (3,)),
        (lambda: nn.BatchNorm1d(3), (3, 4)),
        (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
        (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
        (lambda: nn.BatchNorm2d(3, momentum=None), (3, 2, 2)),
        (lambda: nn.BatchNorm2d(3, affine=False), (3, 2, 2)),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(), (3, 2, 2)),
    ],
)
def test_train_mode_batch_norm_is_refused(
    device: torch.device, norm: Build, shape: tuple[int, ...]
) -> None:
    module = nn.Sequential(nn.Identity(), nn.Sequential(norm(), nn.Dropout())).to(device)
    w, x = torch.ones(3, device=device, requires_grad=True), torch.randn(B, *shape, device=device)
    for p in (w, *module.parameters()):
        p.grad = torch.full_like(p, 3.0)
    call, net, buffers = make_functional(module)
    state = random_state(device)
    with unchanged(w, x, *module.parameters(), *module.buffers(), *buffers.values()):
        for function in (
            lambda p, x: call(p["net"], buffers, x)[0],
            lambda p, x: functional.batch_norm(x, None, None, p["w"], training=True),
            lambda p, x: torch.batch_norm(x, p["w"], None, None, None, True, 0.1, 1e-5, True),
        ):
            with pytest.raises(
                gradkit.UnsupportedGraphError,
                match=r"(?s)batch_norm in train mode, which mixes the samples.*module.eval\(\)",
            ):
                per_sample_grads(
                    lambda p, x, f=function: (f(p, x[None]) * p["w"].sum()).sum(),
                    randomness="different",
                )({"w": w, "net": net}, x)
        # And with buffers of the module itself, on which the pass would write:
        with pytest.raises(gradkit.UnsupportedGraphError, match=r"batch.norm in train mode"):
            per_sample_grads(
                lambda p, x: (functional_call(module, p["net"], (x[None],)) * p["w"].sum()).sum(),
                randomness="different",
            )({"w": w, "net": net}, x)
    assert torch.equal(random_state(device), state)


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda w, x: torch.as_strided_scatter(w * x, x, (4,), (1,)).sum(), "as_strided_scatter"),
        (lambda w, x: (w * x).as_strided_scatter(x, (4,), (1,)).sum(), "as_strided_scatter"),
        (lambda w, x: torch.roll((w * x).sum(), 1), "roll"),
        (lambda w, x: torch.roll(input=(w * x).sum(), shifts=1, dims=0), "roll"),
        (lambda w, x: (w * x).sum().roll(1), "roll"),
    ],
)
def test_what_torch_batches_wrongly_is_refused(device: torch.device, fn: Any, name: str) -> None:
    w, x = torch.randn(4, device=device), torch.randn(B, 4, device=device)
    with unchanged(w, x), pytest.raises(gradkit.UnsupportedGraphError, match=rf"{name}: expected"):
        per_sample_grads(fn)(w, x)


def test_a_roll_of_what_has_dimensions_is_a_loop(device: torch.device) -> None:
    w = torch.randn(4, 3, device=device, dtype=F64, requires_grad=True)
    x = real(4, 3)(device)
    for options in ({"shifts": 1}, {"shifts": (1, 2), "dims": (0, 1)}, {"shifts": -1, "dims": 1}):
        grads = per_sample_grads(lambda w, x, o=options: (torch.roll(w, **o) * x).sin().sum())(w, x)
        rows = [torch.autograd.grad((torch.roll(w, **options) * s).sin().sum(), w)[0] for s in x]
        assert_close(grads, torch.stack(rows))


@pytest.mark.parametrize("chunk_size", [1, 3, B, B + 3])
def test_chunks_change_nothing(device: torch.device, chunk_size: int) -> None:
    module = conv_net().to(device, F64)
    x, y = real(1, 8, 8)(device), index(high=3)(device)
    loss = functional.cross_entropy
    assert_close(ours(module, [x], loss, y, chunk_size=chunk_size), loop(module, [x], loss, y))
    # Batched in other dimensions, with aux, and variables that are batched themselves.
    w, x = (torch.randn(*s, device=device, dtype=F64) for s in ((2, B, 3), (3, B)))
    grads, aux = per_sample_grads(
        lambda w, x: ((w @ x).sin().sum(), {"out": w @ x, "name": "chunked"}),
        in_dims=(1, -1), has_aux=True, chunk_size=chunk_size,
    )(w, x)  # fmt: skip
    outs = [w[:, i] @ x[:, i] for i in range(B)]
    rows = [torch.outer(out.cos(), x[:, i]) for i, out in enumerate(outs)]
    assert_close(grads, torch.stack(rows))
    assert_close(aux["out"], torch.stack(outs))
    assert aux["name"] == "chunked"


class Live(TorchDispatchMode):
    """Sees the largest tensor that operations make, and the most memory in use at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in [t for t in optree.tree_leaves(out) if isinstance(t, Tensor)]:
            ref = StorageWeakRef(t.untyped_storage())
            self._alive[ref.cdata] = (ref, t.untyped_storage().nbytes())
            self.largest = max(self.largest, t.numel())
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def test_chunks_bound_the_memory(device: torch.device) -> None:
    n, batch = 32, 12
    w, x = torch.randn(n, device=device), torch.randn(batch, n, device=device)
    peaks = {}
    for size in (1, 3, 5, batch, None):
        call = per_sample_grads(lambda w, x: torch.outer(w, x).tanh().exp().sum(), chunk_size=size)
        with Live() as live:
            call(w, x)
        assert live.largest == (size or batch) * n * n  # no operation sees more samples
        peaks[size] = live.peak
    assert peaks[batch] == peaks[None] >= batch * 2 * n * n * 4  # tanh and exp are saved
    inputs_and_results = 3 * batch * n * 4
    for size in (1, 3, 5):
        assert peaks[size] <= peaks[None] * size / batch + inputs_and_results


@pytest.mark.parametrize(
    ("in_dims", "dims"),  # dims: of each argument, None for what all samples share
    [
        (None, (None, 0, 0)),
        ([None, 1, -1], (None, 1, 0)),
        ((None, -2, None), (None, 0, None)),
        ((None, None, 0), (None, None, 0)),
        (0, (0, 0, 0)),
        (-1, (1, 1, 0)),
        ((1, 0, None), (1, 0, None)),
        ((0, None, None), (0, None, None)),
    ],
)
def test_in_dims(device: torch.device, in_dims: Any, dims: tuple[int | None, ...]) -> None:
    def fn(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return ((w * x).sin() * y).sum()

    args = [
        torch.randn(shape, device=device, dtype=F64)
        if dim is None
        else torch.randn(B, *shape, device=device, dtype=F64).movedim(0, dim)
        for shape, dim in zip(((3,), (3,), ()), dims, strict=True)
    ]
    args = [arg.requires_grad_() for arg in args]
    rows = []
    for i in range(B):
        w, x, y = (a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True))
        rows.append(torch.autograd.grad(fn(w, x, y), w)[0])
    with unchanged(*args):
        grads = per_sample_grads(fn, in_dims=in_dims)(*args)
    assert_close(grads, torch.stack(rows))


def test_in_dims_may_begin_a_tree(device: torch.device) -> None:
    w, x, m = (torch.randn(*s, device=device, dtype=F64) for s in ((3,), (B, 3), (3, B)))
    batch = {"x": [x, (x + 1,)], "m": {"t": m, "shared": w + 1}, "none": None, "text": "sin"}
    in_dims = (None, {"text": None, "m": {"shared": None, "t": 1}, "none": 0, "x": 0})

    def fn(w: Tensor, batch: Any) -> Tensor:
        assert batch["none"] is None
        (a, (b,)), (t, shared) = batch["x"], batch["m"].values()
        return getattr(w * a * b * t * shared, batch["text"])().sum()

    factor = x * (x + 1) * m.t() * (w + 1)
    assert_close(per_sample_grads(fn, in_dims=in_dims)(w, batch), factor * (w * factor).cos())
    # By default whatever is no tensor is shared, too.
    batch["m"] = {"t": m.t(), "shared": (w + 1).expand(B, 3)}
    assert_close(per_sample_grads(fn)(w, batch), factor * (w * factor).cos())


def test_one_tensor_with_two_batch_dimensions_is_refused_or_two(device: torch.device) -> None:
    """One variable cannot be both the sample's part and the whole."""
    w = torch.randn(B, B, device=device, dtype=F64)
    seen = []

    def fn(p: Any, x: Tensor) -> Tensor:
        seen.append((p["mine"].shape, p["all"].shape))
        return (p["mine"] * x).sum() + p["all"].sum()

    try:
        per_sample_grads(fn, in_dims=({"mine": 0, "all": None}, 0))({"mine": w, "all": w}, w)
    except gradkit.StructureError:
        assert not seen
    else:
        assert seen == [((B,), (B, B))]


def test_losses_are_added_aux_is_stacked_and_keywords_are_shared(device: torch.device) -> None:
    w, x = torch.randn(3, device=device, dtype=F64, requires_grad=True), real(3)(device)

    def fn(w: Tensor, x: Tensor, *, scale: float, names: list[str]) -> Any:
        losses = {"a": (w * x).sin().sum() * scale, "b": [(w**3).sum().reshape(1, 1), x.sum()]}
        return losses, {"z": [x.sum(), *names], "a": Pair(None, (w * x, 7)), "w": w}

    grads, aux = per_sample_grads(fn, has_aux=True, create_graph=False)(
        w, x, scale=2.0, names=["text"]
    )
    d = w.detach()
    assert_close(grads, 2 * x * (d * x).cos() + 3 * d**2)
    assert list(aux) == ["z", "a", "w"]
    (z, text), (nothing, (product, number)) = aux["z"], aux["a"]
    assert_close([z, product, aux["w"]], [x.sum(1), d * x, d.expand(B, 3)])
    assert (text, nothing, number, type(aux["a"])) == ("text", None, 7, Pair)
    assert not any(t.requires_grad for t in (aux["w"], product, grads))


def test_trees_come_back_as_they_are(device: torch.device) -> None:
    a, b, c, d = (torch.randn(3, device=device, dtype=F64, requires_grad=True) for _ in range(4))
    params = OrderedDict(z=Weights(a, None), y=Pair(b, [c, None]), a={"tied": a, "again": [b]})
    batch = Batch(real(3)(device), "sin")

    def fn(batch: Batch, params: Any, d: Tensor) -> Tensor:
        w = params["z"].weight * params["y"].x * params["y"].y[0] + params["a"]["tied"] * d
        return getattr(w * batch.x + params["a"]["again"][0], batch.note)().sum()

    grads, of_d = per_sample_grads(fn, argnums=(1, -1), in_dims=None)(batch, params, d)
    rows = [torch.autograd.grad(fn(Batch(x, "sin"), params, d), (a, b, c, d)) for x in batch.x]
    of_a, of_b, of_c, expected_d = map(torch.stack, zip(*rows, strict=True))
    assert type(grads) is OrderedDict
    assert list(grads) == ["z", "y", "a"]
    assert type(grads["z"]) is Weights
    assert type(grads["y"]) is Pair
    assert grads["z"].bias is None
    assert grads["y"].y[1] is None
    got = [grads["z"].weight, grads["a"]["tied"], grads["y"].x, grads["a"]["again"][0]]
    assert_close([*got, grads["y"].y[0], of_d], [of_a, of_a, of_b, of_b, of_c, expected_d])


def test_results_are_owned(device: torch.device) -> None:
    w, v, t, c = (torch.randn(*s, device=device) for s in ((3, 2), (3, 2), (2, 3), (2, 3, 2, 2)))
    params = {
        "w": w.requires_grad_(),
        "v": nn.Parameter(v),
        "transposed": t.t().requires_grad_(),
        "channels_last": c.to(memory_format=torch.channels_last).requires_grad_(),
        "frozen": nn.Parameter(torch.ones(3, 2, device=device), requires_grad=False),
        "unused": torch.ones(2, device=device),
        "tied": w,
    }
    x = torch.randn(B, 3, 2, device=device)
    leaves = list(params.values())
    for fn in (
        lambda p, x: sum(t.sum() for k, t in p.items() if k != "unused"),  # expanded
        lambda p, x: (p["w"] + p["v"] + p["transposed"] + p["frozen"]).mul(x).sum(),  # one tensor
        lambda p, x: (p["w"].t() * x.t()).sum() + p["channels_last"].permute(3, 2, 1, 0).sum(),
    ):
        with unchanged(*leaves, x):
            grads = per_sample_grads(fn, create_graph=False)(params, x)
            rows = [
                torch.empty_strided((B, *p.shape), (p.numel(), *p.stride()), device=device)
                for p in leaves
            ]
            assert_owned(grads.values(), rows)
            memory = {g.untyped_storage().data_ptr() for g in grads.values()}
            assert memory.isdisjoint(t.untyped_storage().data_ptr() for t in (x, *leaves))
            assert not grads["frozen"].any()
            assert not grads["unused"].any()
            before = {name: grad.clone() for name, grad in grads.items()}
            for name, grad in grads.items():
                grad.fill_(float("nan"))
                before[name].fill_(float("nan"))
                torch.testing.assert_close(grads, before, equal_nan=True, rtol=0, atol=0)


def test_grad_dtype_is_honoured(device: torch.device) -> None:
    p = nn.Parameter(torch.ones(3, device=device, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    x = torch.full((B, 3), 2**-9, device=device, dtype=torch.bfloat16)
    grads = per_sample_grads(lambda p, x: (p * x + p).sum())(p, x)
    assert torch.equal(grads, torch.full((B, 3), 1 + 2**-9, device=device))  # not in bfloat16


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_no_samples_have_no_gradients_or_are_refused(
    device: torch.device, chunk_size: int | None
) -> None:
    """As Poisson sampling draws them now and then; many of torch's batching rules fail on them."""
    w, x = torch.randn(3, device=device), torch.randn(0, 3, device=device)
    refused = grads = None
    try:
        grads = per_sample_grads(lambda w, x: (w * x).sum() + w.sum(), chunk_size=chunk_size)(w, x)
    except gradkit.StructureError as error:
        refused = str(error)
    assert refused.startswith("args[1]") if refused else grads.shape == (0, 3)


@dataclass
class Opaque:
    x: Any


W, X, Y = torch.ones(3), torch.ones(B, 3), torch.ones(B)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        (
            (W, X, Y),
            {"in_dims": (None, 0)},
            r"(?s)^in_dims: .* a tuple of 3.*in_dims=\(None, 0, 0\)",
        ),
        ((W, X, Y), {"in_dims": (None, 0, 0, 0)}, "^in_dims: .* a tuple of 3"),
        ((W, X, Y), {"in_dims": "0"}, "^in_dims: .* got the str '0'"),
        ((W, X, Y), {"in_dims": {"x": 0}}, "^in_dims: .* got the dict"),
        ((W, X, Y), {"in_dims": (None, 2, 0)}, r"^args\[1\].* dimension 2, got .*5, 3"),
        ((W, X, Y), {"in_dims": (None, -3, 0)}, r"^args\[1\].* dimension -3"),
        ((W, X, Y), {"in_dims": (None, 0.0, 0)}, r"^args\[1\].* dimension 0.0"),
        ((W, X, Y), {"in_dims": (None, 0, False)}, r"^args\[2\].* dimension False"),
        ((W, X, Y), {"in_dims": (None, {"x": 0}, 0)}, r"^in_dims\[1\].*args\[1\]"),
        ((W, {"x": X}, Y), {"in_dims": (None, {"y": 0}, 0)}, r"^in_dims\[1\].*args\[1\]"),
        ((W, [X], Y), {"in_dims": (None, [0, 0], 0)}, r"^in_dims\[1\].*args\[1\]"),
        ((W, X, 2.0), {"in_dims": (None, 0, 0)}, r"^args\[2\].*got the float 2.0"),
        ((W, X, torch.ones(())), {}, r"^args\[2\].*shape \(\)"),
        ((W, X, Y), {"in_dims": 0}, r"^args\[1\].* of 3, as args\[0\] has.* of 5"),
        ((W, X, Y[:4]), {}, r"^args\[2\].* of 5, as args\[1\] has, got one of 4"),
        ((W, {"a": X, "b": [Y[1:]]}), {}, r"^args\[1\]\['b'\]\[0\].*args\[1\]\['a'\]"),
        ((W,), {}, "^args: .* at least one batched tensor"),
        ((W, X, Y), {"in_dims": (None, None, None)}, "^args: .*one batched tensor"),
        ((W, X, Y), {"argnums": (0, 1, 2)}, "^args: .*one batched tensor"),
        ((W, X), {"chunk_size": 0}, "^chunk_size: .* got 0"),
        ((W, X), {"chunk_size": -1}, "^chunk_size"),
        ((W, X), {"chunk_size": True}, "^chunk_size: .* got True"),
        ((W, X), {"chunk_size": 2.5}, "^chunk_size: .* got 2.5"),
        ((W, X), {"chunk_size": "2"}, "^chunk_size"),
        ((W, X), {"randomness": "random"}, "^randomness: .*'different'.* got 'random'"),
        ((W, X), {"randomness": None}, "^randomness"),
        # What every sample would be given whole, though it may hold the batch:
        ((W, X), {"keywords": {"scale": [Y]}}, "^scale: expected tensors in positional arguments"),
        ((W, X, Opaque(Y)), {}, r"^args\[2\]: .* no tree that optree knows"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    device: torch.device, args: Any, options: Any, words: str
) -> None:
    here = optree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, args)
    calls: list[Any] = []
    keywords = options.get("keywords", {})
    error: type[gradkit.GradkitError] = gradkit.StructureError
    options = {key: value for key, value in options.items() if key != "keywords"}
    if {"chunk_size", "randomness"} & options.keys():
        error = gradkit.OptionError
    elif "optree" in words:
        error = gradkit.LeafTypeError
    with pytest.raises(error, match=words):
        per_sample_grads(lambda *args: calls.append(args), **options)(*here, **keywords)
    assert not calls


class Noise(nn.Module):
    """Adds noise that a generator of its own draws."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator, device=x.device, dtype=x.dtype)


@pytest.mark.filterwarnings("ignore:.*fell back from torch.vmap:gradkit.GradkitWarning")
@pytest.mark.parametrize("of_module", [False, True])
@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_a_generator_of_the_caller_in_a_loop(
    device: torch.device, randomness: Any, of_module: bool
) -> None:
    noise = Noise(device)
    generator = noise.generator
    w, scales = torch.ones(2, device=device), torch.ones(3, device=device)

    def drawn(w: Tensor) -> Tensor:
        if of_module:
            return noise(0 * w)
        return torch.randn(w.shape, generator=generator, device=w.device)

    def loss(w: Tensor, scale: Tensor, *, is_loop: bool = False) -> Tensor:
        first = drawn(w)  # the attempt to batch it draws, too
        if is_loop:
            scale.item()
        return (w * first).sum() * scale

    grads: dict[bool, Tensor] = {}
    for is_loop in (False, True):
        generator.manual_seed(0)
        call = per_sample_grads(partial(loss, is_loop=is_loop), randomness=randomness)
        if randomness == "error":
            with pytest.raises(gradkit.UnsupportedGraphError, match='randomness="different"'):
                call(w, scales)
        else:
            grads[is_loop] = call(w, scales)
            count = 1 if randomness == "same" else 3
            assert len(grads[is_loop].unique(dim=0)) == count
    if randomness == "same":
        assert torch.equal(grads[False], grads[True])


def of_a_constant(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = w.sum()
    return (w * x).square().sum() * scale


def of_a_written_constant(w: Tensor, x: Tensor) -> Tensor:
    scale = torch.zeros_like(w)
    with torch.no_grad():
        scale.add_(w)
    return (w * x).square().sum() * scale.sum()


@pytest.mark.parametrize("loss", [of_a_constant, of_a_written_constant])
def test_what_is_under_no_grad_is_constant_in_a_jvp_around(
    device: torch.device, loss: Callable[..., Tensor]
) -> None:
    w, x = torch.tensor([1.0, 2.0], device=device), torch.tensor([[1.0, 3], [2, 5]], device=device)
    along = torch.tensor([1.0, 0.0], device=device)
    products = torch.func.jvp(lambda w: per_sample_grads(loss)(w, x), (w,), (along,))[1]
    # The scale, which is 3, is a constant in both derivatives.
    torch.testing.assert_close(products, 2 * 3 * x.square() * along)


class Absolute(torch.autograd.Function):
    """The absolute value; its backward indexes with a mask, which torch.vmap cannot batch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.where(x < 0, -x, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.negative = inputs[0] < 0

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (cotangent,) = cotangents
        kept = cotangent[~ctx.negative].sum() * 0
        return torch.where(ctx.negative, -cotangent, cotangent) + kept


def test_a_mask_in_the_backward_of_a_function_is_for_a_loop(device: torch.device) -> None:
    w = torch.tensor([1.0, -2.0], device=device)
    x = torch.tensor([[1.0, 2.0], [-3.0, 4.0]], device=device)
    with pytest.warns(gradkit.GradkitWarning, match="fell back from torch.vmap to a loop"):
        rows = per_sample_grads(lambda w, x: Absolute.apply(w * x).sum())(w, x)
    torch.testing.assert_close(rows, (w * x).sign() * x)
