"""per_sample_norms by one pass where the graph proves that the samples are independent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import gradkit
from gradkit._autograd import ghost_norms as ghost_norms_module
from gradkit._autograd import gramian
from gradkit._autograd.ghost_norms import ghost_norms
from gradkit._core import user_code
from tests.helpers import Halve, unchanged

SIZE = 4  # of every dimension, the samples' too: no shape tells them apart
Step: TypeAlias = Callable[["Layers", Tensor], Tensor]


@contextmanager
def watched(*, hooks: bool = False) -> Iterator[list[bool]]:
    """Yield whether each loss was proved to be of independent samples; without hooks of others."""
    proved: list[bool] = []

    def watch(*args: Any) -> Tensor | None:
        result = ghost_norms(*args)
        proved.append(result is not None)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gramian, "ghost_norms", watch)
        if not hooks:  # other tests of this process have registered some
            patch.setattr(user_code, "hooks_registered", lambda: False)
        yield proved


def proved_and_right(loss: Tensor, params: Any) -> bool:
    """Return whether one pass was enough, once the norms are found equal to those of the rows."""
    per_loss = gradkit.per_loss_grads(loss, params, retain_graph=True)
    matrix = gradkit.tree.to_matrix([per_loss], losses=[loss])[0]
    with watched() as proved, warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)  # of the batched pass
        ours = gradkit.per_sample_norms(loss, params, retain_graph=True)
        total = gradkit.clipped_sum(loss, params, 0.1, retain_graph=True)
        by_sample = gradkit.per_loss_grads(loss, params, strategy="batched")
    torch.testing.assert_close(by_sample, per_loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours, matrix.norm(dim=1), rtol=1e-10, atol=1e-10)
    clipped = (0.1 / (matrix.norm(dim=1) + 1e-6)).clamp(max=1) @ matrix
    torch.testing.assert_close(gradkit.tree.to_matrix([total])[0][0], clipped)
    assert proved[0] == proved[1]
    return proved[0]


class Layers(nn.Module):
    """What the steps of a random net share, so that some of it is used many times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, SIZE, padding_idx=2)
        self.linear = nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.both = nn.LayerNorm((SIZE, SIZE))
        self.groups = nn.GroupNorm(2, SIZE)
        self.still = nn.BatchNorm1d(SIZE).eval()
        self.conv = nn.Conv1d(SIZE, SIZE, 3, padding=1, groups=2)
        self.attention = nn.MultiheadAttention(SIZE, 2, batch_first=True)
        self.position = nn.Parameter(torch.randn(SIZE, SIZE))
        self.scale = nn.Parameter(torch.randn(1, SIZE, 1))
        self.square = nn.Parameter(torch.randn(SIZE, SIZE))
        self.vector = nn.Parameter(torch.randn(SIZE))
        self.moving = nn.BatchNorm1d(SIZE, affine=False)
        self.learned = nn.BatchNorm1d(SIZE)


def samples_second(layers: Layers, h: Tensor) -> Tensor:
    rows = layers.linear(h.transpose(0, 1).reshape(-1, SIZE))
    return rows.unflatten(0, (SIZE, -1)).transpose(0, 1)


def halves(_: Layers, h: Tensor) -> Tensor:
    first, second = h.split(2, dim=2)
    return torch.cat([second * first, first.flip(1)], 2)


# Of `[B, T, D]`: each sample's elements depend on its own alone.
INDEPENDENT: dict[str, Step] = {
    "linear": lambda m, h: m.linear(h),
    "linear, samples second": samples_second,
    "linear of rows": lambda m, h: m.linear(h.reshape(-1, SIZE)).view_as(h),
    "matrix": lambda m, h: h @ m.square,
    "transposed": lambda m, h: h @ m.square.T,
    "addmm": lambda m, h: torch.addmm(
        m.vector, h.flatten(0, 1), m.square, alpha=2, beta=3
    ).view_as(h),
    "addmm of values": lambda m, h: torch.addmm(h[:, 0], h[:, 1], m.square).unsqueeze(1) + h,
    "vector": lambda m, h: (h.flatten(0, 1) @ m.vector).view(-1, SIZE, 1) - h,
    "tied": lambda m, h: (h @ m.table.weight.T).softmax(-1)[..., :SIZE],
    "layer norm": lambda m, h: m.norm(h),
    "layer norm of two": lambda m, h: m.both(h),
    "group norm": lambda m, h: m.groups(h),
    "batch norm in eval mode": lambda m, h: m.still(h),
    "convolution": lambda m, h: m.conv(h) + h,
    "attention": lambda m, h: m.attention(h, h, h, need_weights=False)[0],
    "attention, written out": lambda m, h: (h @ h.mT).softmax(2) @ h,
    "position": lambda m, h: h + m.position,
    "less position": lambda m, h: torch.sub(h, m.position, alpha=2),
    "scale": lambda m, h: m.scale * h,
    "elementwise": lambda m, h: torch.where(h > 0, functional.gelu(h), h.sigmoid())
    / (h.square() + 1),
    "centred": lambda m, h: h - h.mean((1, 2), keepdim=True),
    "pool": lambda m, h: functional.max_pool1d(h, 3, 1, 1) + functional.avg_pool1d(h, 1),
    "halves": halves,
    "parts": lambda m, h: torch.stack(h.unbind(1)[::-1], 1).cumsum(2),
    "pad": lambda m, h: functional.pad(h, (1, -1)) + h.logsumexp(1, keepdim=True),
    "detached": lambda m, h: h / h.detach().std(0),
}  # fmt: skip
# One sample's elements depend on another's, or the samples are not where they seem to be.
MIXING: dict[str, Step] = {
    "mean": lambda m, h: h - h.mean(0),
    "mean, kept": lambda m, h: h - h.mean(0, keepdim=True),
    "amax": lambda m, h: h / h.abs().amax(0),
    "norm": lambda m, h: h / torch.linalg.vector_norm(h),
    "first": lambda m, h: h + h[0],
    "select": lambda m, h: h + h.select(0, 1).unsqueeze(1),
    "expand": lambda m, h: h * h[:1].expand_as(h),
    "permuted": lambda m, h: h + h.transpose(0, 1),
    "reversed": lambda m, h: h.permute(2, 1, 0),
    "viewed": lambda m, h: h.view(2, 2, SIZE, SIZE).flip(1).view_as(h),
    "shifted": lambda m, h: torch.cat([h[1:], h[:1]]),
    "stacked": lambda m, h: torch.stack(h.unbind(0)[::-1]),
    "stacked in another dimension": lambda m, h: torch.stack(h.unbind(1), 0),
    "split": lambda m, h: torch.cat(h.split(2)[::-1]),
    "flip": lambda m, h: h.flip(0, 2),
    "roll": lambda m, h: h.roll(1, 0),
    "sort": lambda m, h: h.sort(0).values,
    "indexed": lambda m, h: h[torch.arange(SIZE, device=h.device).flip(0)],
    "gather": lambda m, h: h.gather(0, torch.zeros_like(h, dtype=torch.long)),
    "cumsum": lambda m, h: h.cumsum(0),
    "softmax": lambda m, h: h.softmax(0),
    "log_softmax": lambda m, h: h.log_softmax(0),
    "layer norm": lambda m, h: functional.layer_norm(h, h.shape),
    "pool": lambda m, h: functional.avg_pool2d(h.transpose(0, 1), 3, 1, 1).transpose(0, 1),
    "pad": lambda m, h: functional.pad(h.transpose(0, 2), (1, -1)).transpose(0, 2),
    "convolution": lambda m, h: m.conv(h.transpose(0, 1)).transpose(0, 1),
    "group norm": lambda m, h: m.groups(h.transpose(0, 1)).transpose(0, 1),
    "batch norm": lambda m, h: m.moving(h),
    "batch norm with a weight": lambda m, h: m.learned(h),
    "batch norm by sample": lambda m, h: m.still(h.transpose(0, 1)).transpose(0, 1),
    "attention": lambda m, h: INDEPENDENT["attention"](m, h.transpose(0, 1)).transpose(0, 1),
    "products": lambda m, h: (h.flatten(1) @ h.flatten(1).T).unsqueeze(1) * h,
    "batched products": lambda m, h: h.transpose(0, 1) @ h,
    "matrix from the left": lambda m, h: (m.square @ h.flatten(1)).view_as(h),
    "custom": lambda m, h: Halve.apply(h, h),
    "computed weight": lambda m, h: h @ (m.square / m.square.norm()),
    "one for each sample": lambda m, h: h + m.position.unsqueeze(2),
}  # fmt: skip
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda h: h.square().sum((1, 2)),
    "mean": lambda h: functional.mse_loss(h, torch.ones_like(h), reduction="none").mean((-1, 1)),
    "cross_entropy": lambda h: functional.cross_entropy(
        h.mT, torch.arange(SIZE, device=h.device).expand(SIZE, SIZE), reduction="none"
    ).sum(1),
    "cross_entropy of rows": lambda h: functional.cross_entropy(
        h.flatten(0, 1), torch.arange(SIZE, device=h.device).repeat(SIZE), reduction="none"
    ).view(SIZE, SIZE).mean(1),
    "last": lambda h: h[:, -1].tanh().amax(1),
}  # fmt: skip


def net(device: torch.device) -> tuple[Layers, Tensor]:
    torch.manual_seed(0)
    layers = Layers().to(device, torch.float64)
    for buffer in (layers.still.running_mean, layers.still.running_var):
        assert buffer is not None
        buffer.uniform_(0.5, 1)
    return layers, torch.randint(7, (SIZE, SIZE), device=device)


def loss_of(layers: Layers, tokens: Tensor, steps: list[Step], loss: str) -> Tensor:
    h: Tensor = layers.table(tokens)
    for step in steps:
        h = step(layers, h)
    return LOSSES[loss](h)


steps_of = st.lists(st.sampled_from(list(INDEPENDENT)), max_size=6)


@settings(max_examples=settings.default.max_examples // 4)
@given(names=steps_of, loss=st.sampled_from(list(LOSSES)))
def test_independent_samples_take_one_pass(
    device: torch.device, names: list[str], loss: str
) -> None:
    layers, tokens = net(device)
    value = loss_of(layers, tokens, [INDEPENDENT[name] for name in names], loss)
    assert proved_and_right(value, layers)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_each_step_takes_one_pass(device: torch.device, name: str) -> None:
    layers, tokens = net(device)
    value = loss_of(layers, tokens, [INDEPENDENT["linear"], INDEPENDENT[name]], "square")
    assert proved_and_right(value, layers)


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_depend_on_each_other_do_not(device: torch.device, name: str) -> None:
    layers, tokens = net(device)
    steps = [INDEPENDENT["linear"], MIXING[name], INDEPENDENT["linear"]]
    assert not proved_and_right(loss_of(layers, tokens, steps, "square"), layers)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (3,)),
    "no bias": (lambda: nn.Linear(3, 4, bias=False), (2, 3)),
    "long sequence": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), (9, 2)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2, stride=2, padding=1, dilation=2), (2, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), (4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (2, 3, 3, 3)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(2, 3, 2, 2, output_padding=1), (2, 3, 3)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2),
            nn.BatchNorm2d(2).eval(), nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(2, 3),
        ),
        (2, 8, 8),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        (3, 4),
    ),
    "no parameter of a part": (lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(4)), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("count", [2, 5])
def test_layers(device: torch.device, name: str, count: int) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    model = make().to(device, torch.float64)
    x = torch.randn(count, *shape, device=device, dtype=torch.float64)
    assert proved_and_right(model(x).flatten(1).square().sum(1), model)


def mlp(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(device, dtype)
    return model, torch.randn(5, 3, device=device, dtype=dtype)


def test_a_layer_used_many_times(device: torch.device) -> None:
    model, x = mlp(device)
    for _ in range(3):
        x = model(x) + model[0](x)
    assert proved_and_right(x.square().sum(1), model)


def test_below_the_parameters_anything_goes(device: torch.device) -> None:
    model, x = mlp(device)
    trunk = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device, torch.float64)
    assert proved_and_right(model(trunk(x)).square().sum(1), model)
    assert not proved_and_right(model(trunk(x)).square().sum(1), [model, trunk])
    frozen = nn.BatchNorm1d(3, device=device, dtype=torch.float64).requires_grad_(False)
    assert proved_and_right(model(frozen(x)).square().sum(1), [model])
    assert not proved_and_right(frozen(model(x)).square().sum(1), [model])


@pytest.mark.parametrize("loss_dim", [0, 1, 2])
@pytest.mark.parametrize("order", ["data", "data, transposed"])
@pytest.mark.parametrize("name", sorted({*INDEPENDENT, *MIXING}))
def test_a_step_on_data_which_have_no_graph(
    device: torch.device, name: str, order: str, loss_dim: int
) -> None:
    """The samples need not be where the parameters' layer takes them to be."""
    layers, _ = net(device)
    data = torch.randn(SIZE, SIZE, SIZE, device=device, dtype=torch.float64)
    for steps in (INDEPENDENT, MIXING):
        if name in steps:
            h = steps[name](layers, data if order == "data" else data.transpose(0, 1))
            h = h.square().movedim(loss_dim, 0).flatten(1).sum(1)
            if h.requires_grad:
                proved = proved_and_right(h, layers)
                assert proved or (order, loss_dim, steps) != ("data", 0, INDEPENDENT)


@pytest.mark.parametrize("samples_in", [0, 1])
def test_layers_of_data_with_a_loss_for_each_output(device: torch.device, samples_in: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, device=device, dtype=torch.float64)
    for layer in (nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)):
        loss = layer.to(x)(x).tanh().square().mean(1 - samples_in)
        assert proved_and_right(loss, layer) == (samples_in == 0)
    for norm in (nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()):
        loss = norm.to(x)(x).tanh().square().mean(1 - samples_in)
        assert proved_and_right(loss, norm) == (samples_in == 0 and not norm.training)
    image = torch.randn(3, 3, 3, 3, device=device, dtype=torch.float64)
    for on_images in (nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1, bias=False), nn.GroupNorm(3, 3)):
        loss = on_images.to(x)(image).tanh().movedim(samples_in, 0).flatten(1).sum(1)
        assert proved_and_right(loss, on_images) == (samples_in == 0)


def test_a_parameter_without_a_gradient(device: torch.device) -> None:
    model, x = mlp(device)
    unused = torch.ones(2, device=device, requires_grad=True)
    assert proved_and_right(model(x).square().sum(1), [model, unused])
    with watched(), pytest.raises(gradkit.UnreachedParamError):
        gradkit.per_sample_norms(model(x).square().sum(1), [unused])


def test_gradients_scaled_by_how_often_a_word_is_in_the_batch(device: torch.device) -> None:
    table = nn.Embedding(3, 2, scale_grad_by_freq=True).to(device, torch.float64)
    tokens = torch.tensor([[0, 1], [1, 1], [2, 2]], device=device)
    assert not proved_and_right(table(tokens).square().sum((1, 2)), table)


def test_a_table_of_words_that_is_a_layer_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is large, so that the cross terms are products of rows, whichever use comes first."""
    pairs: set[tuple[int, int]] = set()

    def noted(left: Tensor, right: Tensor) -> Tensor:
        pairs.add((left.dim(), right.dim()))  # positions have two dimensions, rows three
        return products(left, right)

    products = ghost_norms_module._products
    monkeypatch.setattr(ghost_norms_module, "_products", noted)
    words, width = 200, 16
    table = nn.Embedding(words, width).to(device, torch.float64)
    tokens = torch.tensor([[3, 3, 7], [1, 7, 3], [0, 0, 0], [5, 6, 5]], device=device)
    hidden = table(tokens).tanh()
    logits = hidden @ table.weight.T
    assert proved_and_right(
        functional.cross_entropy(logits.mT, tokens.roll(1, 1), reduction="none").mean(1), table
    )
    mixed = functional.one_hot(tokens.roll(1, 1), words).to(hidden) * 0.5 @ table.weight
    assert proved_and_right((mixed.cos() * table(tokens)).sum((1, 2)), table)
    below = table(tokens) + (hidden.detach() @ table.weight.T).softmax(-1) @ table.weight
    assert proved_and_right(below.square().sum((1, 2)), table)
    assert pairs == {(2, 2), (2, 3), (3, 2), (3, 3)}


def test_a_parameter_with_a_row_for_each_sample(device: torch.device) -> None:
    model, x = mlp(device)
    rows = torch.zeros(5, 3, device=device, dtype=torch.float64, requires_grad=True)
    assert not proved_and_right(model(x + rows).square().sum(1), [model, rows])
    assert not proved_and_right(model(x).square().sum(1) + rows[:, 0], [model, rows])
    added = torch.addmm(rows, x, model[0].weight.T)
    assert not proved_and_right(added.square().sum(1), [model, rows])
    assert not proved_and_right(rows.sum(1), [rows])


@pytest.mark.parametrize("kind", ["hook", "module hook", "node hook"])
def test_a_hook_anywhere_takes_the_batched_pass(device: torch.device, kind: str) -> None:
    model, x = mlp(device)
    middle = model[1](model[0](x))
    loss = model[2](middle).square().sum(1)
    clean = gradkit.per_sample_norms(loss, model, retain_graph=True)
    if kind == "hook":
        middle.register_hook(lambda grad: grad.clamp(max=0.01))
    elif kind == "module hook":
        model[1].register_full_backward_hook(lambda *_: None)
    else:
        assert middle.grad_fn is not None
        middle.grad_fn.register_prehook(lambda grads: (grads[0] / 2,))
    with watched(hooks=True) as proved, warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        ours = gradkit.per_sample_norms(loss, model)
    assert proved == [False]
    assert torch.equal(ours, clean) == (kind == "module hook")


def test_saved_tensors_in_the_hands_of_a_hook(device: torch.device) -> None:
    model, x = mlp(device)
    unpacked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:  # of a checkpoint, it runs the forward pass again
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack):
        loss = model(x).square().sum(1)
    gradkit.per_loss_norms(loss, model, retain_graph=True)
    once = len(unpacked)
    with watched() as proved:
        gradkit.per_sample_norms(loss, model)
    assert proved == [False]
    assert len(unpacked) == 2 * once


def test_what_was_changed_in_place(device: torch.device) -> None:
    model, x = mlp(device)
    loss = model(x).square().sum(1)
    x += 1
    with watched(), pytest.raises(gradkit.UnsupportedGraphError, match="in place"):
        gradkit.per_sample_norms(loss, model)


def test_nothing_else_is_touched(device: torch.device) -> None:
    model, x = mlp(device)
    middle = model[1](model[0](x))
    loss = model[2](middle).square().sum(1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with watched() as proved, unchanged(*model.parameters(), loss):
        first = gradkit.per_sample_norms(loss, model, retain_graph=True)
        with gradkit.safe_retain(middle) as kept:
            retained = gradkit.per_sample_norms(loss, model, retain_graph=True)
        assert proved == [True, True]
        assert torch.equal(retained, first)
        assert torch.equal(gradkit.per_sample_norms(loss, model), first)
        with pytest.raises(gradkit.FreedGraphError):
            gradkit.per_sample_norms(loss, model)
    assert kept.grads is None  # of a pass whose gradients are not returned


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes_take_the_batched_pass(device: torch.device, dtype: torch.dtype) -> None:
    weight = torch.ones(3, device=device, dtype=dtype, requires_grad=True)
    x = torch.ones(4, 3, device=device, dtype=dtype)
    loss = (x * weight).abs().float().sum(1)
    with watched() as proved:
        norms = gradkit.per_sample_norms(loss, [weight])
    assert proved == [False]
    torch.testing.assert_close(norms, torch.full_like(norms, 3**0.5))


def test_mixed_dtypes_take_the_batched_pass(device: torch.device) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)
    x = torch.ones(4, 3, device=device, dtype=torch.float64)
    assert not proved_and_right((x * weight).sum(1), [weight])


def test_the_norm_of_each_sample_alone_overflows(device: torch.device) -> None:
    model, x = mlp(device)
    x[1] = torch.inf
    with watched() as proved:
        norms = gradkit.per_sample_norms(model[0](x).sum(1), model[0])
    assert proved == [True]
    assert norms.isfinite().tolist() == [True, False, True, True, True]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(2, 9),
    uses=st.integers(1, 2),
    digits=st.integers(0, 8),
    centred=st.booleans(),
    precision=st.sampled_from(["highest", "high"]),
)
def test_the_digits_that_are_left_where_positions_cancel(
    device: torch.device,
    seed: int,
    length: int,
    uses: int,
    digits: int,
    centred: bool,
    precision: str,
) -> None:
    """Of inputs that vary little, with a loss that is centred, the sum of products has none."""
    source = torch.Generator().manual_seed(seed)
    layer = nn.Linear(64, 64, bias=False).to(device)
    losses: list[Tensor] = []
    terms: list[Tensor] = []
    for _ in range(uses):
        inputs, factors = torch.randn(2, 3, length, 64, generator=source).to(device)
        inputs = 10 + inputs * 10.0**-digits
        factors = factors - factors.mean(1, keepdim=True) if centred else factors
        losses.append((layer(inputs) * factors).sum((1, 2)))
        terms.append(factors.double().unsqueeze(3) * inputs.double().unsqueeze(2))
    torch.set_float32_matmul_precision(precision)
    try:
        with watched() as proved:
            norms = gradkit.per_sample_norms(sum(losses), layer)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert proved == [True]
    every = torch.cat(terms, 1).flatten(2)
    expected = every.sum(1).norm(dim=1)
    rounding = 1e-7 * every.norm(dim=2).sum(1)  # of the gradient itself, in float32
    assert ((norms - expected).abs() <= 1e-3 * expected + rounding).all()


def test_no_sample_exceeds_the_norm_where_positions_cancel(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False).to(device)
    inputs = 10 + 3e-4 * torch.randn(4, 16, 64, device=device)

    def losses() -> Tensor:
        hidden = layer(inputs)
        return 1e6 * (hidden - hidden.mean(1, keepdim=True)).square().sum((1, 2))

    each = gradkit.tree.to_matrix([gradkit.per_loss_grads(losses(), layer)], losses=[losses()])[0]
    norms = each.norm(dim=1)
    with watched() as proved:
        total = gradkit.clipped_sum(losses(), layer, norms.min() / 5)
    assert proved == [True]
    expected = (norms.min() / 5 / norms) @ each
    torch.testing.assert_close(total["weight"].flatten(), expected, rtol=1e-2, atol=1e-2)


def test_in_float64_a_sum_of_nothing_but_rounding_errors_takes_the_batched_pass(
    device: torch.device,
) -> None:
    layer = nn.Linear(64, 64, bias=False).to(device, torch.float64)
    inputs = torch.randn(3, 1, 64, device=device, dtype=torch.float64).expand(3, 4, 64)
    factors = torch.tensor([1.0, -1, 0.1, -0.1], device=device, dtype=torch.float64)
    loss = (layer(inputs) * factors.view(4, 1)).sum((1, 2))
    with watched() as proved:
        norms = gradkit.per_sample_norms(loss, layer)
    assert proved == [False]
    assert (norms < 1e-12).all()


@given(
    seed=st.integers(0, 1000),
    length=st.integers(2, 9),
    digits=st.integers(0, 12),
    size=st.sampled_from([48, 96]),
)
def test_in_float64_ten_digits_are_right_where_positions_cancel(
    device: torch.device, seed: int, length: int, digits: int, size: int
) -> None:
    """The gradient is a sum of outer products, which einsum adds up without squares."""
    source = torch.Generator().manual_seed(seed)
    layer = nn.Linear(size, size, bias=False).to(device, torch.float64)
    inputs, factors = torch.randn(2, 3, length, size, generator=source, dtype=torch.float64)
    inputs = torch.cat([inputs, 10.0**-digits * inputs.flip(0) - inputs], 1).to(device)
    factors = factors.repeat(1, 2, 1).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)  # of the batched pass
        loss = (layer(inputs) * factors).sum((1, 2))
        norms = gradkit.per_sample_norms(loss, layer, retain_graph=True)
        clipped = gradkit.clipped_sum(loss, layer, 0.1)["weight"]
    each = torch.einsum("bti,bto->boi", inputs, factors)
    terms = inputs.norm(dim=2) * factors.norm(dim=2)  # of whose rounding the gradient itself is
    allowed = 1e-10 * each.flatten(1).norm(dim=1) + 1e-14 * terms.sum(1)
    assert ((norms - each.flatten(1).norm(dim=1)).abs() <= allowed).all()
    scale = (0.1 / (each.flatten(1).norm(dim=1) + 1e-6)).clamp(max=1)
    expected = torch.einsum("b,boi->oi", scale, each)
    assert (clipped - expected).norm() <= 1e-10 * expected.norm() + 1e-13 * terms.sum()


def test_several_vectors(device: torch.device) -> None:
    model, x = mlp(device)
    y = model(x)
    losses = {"square": y.square().sum(1), "centred": (y - y.mean(0)).sum(1), "all": y.sum()}
    expected = gradkit.tree.gram(
        gradkit.per_loss_grads(losses, model, retain_graph=True), losses=losses
    )
    with watched() as proved:
        ours = gradkit.per_loss_norms(losses, model)
    assert proved == [True, False]
    torch.testing.assert_close(ours, expected.diagonal().sqrt())
