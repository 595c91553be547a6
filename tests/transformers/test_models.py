"""Models of Hugging Face transformers and PEFT, made from a config: every public call.

They compute attention by `scaled_dot_product_attention`; the same model without fused kernels,
which plain autograd differentiates any number of times, is the oracle.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradkit
from gradkit import func, meta
from tests.helpers import assert_same_bits

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")
peft = pytest.importorskip("peft", reason="pip install -e '.[transformers]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
Tensors = dict[str, Tensor]
SMALL = {"vocab_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
# GPT-2 looks for padding among the tokens, which no vmap can, unless there is none.
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(attention: str) -> nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = hf.GPT2Config(**sizes, **none, **IDS, use_cache=False)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def llama(attention: str) -> nn.Module:
    sizes = {**SMALL, "intermediate_size": 16, "num_key_value_heads": 1}
    config = hf.LlamaConfig(**sizes, **IDS, max_position_embeddings=8, use_cache=False)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def bert(attention: str) -> nn.Module:
    sizes = {**SMALL, "intermediate_size": 16, "max_position_embeddings": 8, "num_labels": 2}
    config = hf.BertConfig(**sizes, **NO_DROPOUT, **{**IDS, "pad_token_id": 2})
    kind = hf.AutoModelForSequenceClassification
    return kind.from_config(config, attn_implementation=attention)


def lora(attention: str) -> nn.Module:
    options = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    model = peft.get_peft_model(gpt2(attention), peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # which starts at zero, so that nothing reaches lora_A
            nn.init.normal_(p)
    return model


MODELS = {"GPT-2": gpt2, "Llama": llama, "BERT": bert, "LoRA": lora}
every_model = pytest.mark.parametrize("name", MODELS)


class Setting:
    """A model, its parameters, a batch, and the loss of these."""

    def __init__(self, name: str, device: torch.device, *, math: bool = False) -> None:
        torch.manual_seed(0)
        self.math = math
        self.model = MODELS[name]("sdpa").to(device).double().train()
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        ids = torch.randint(3, 32, (3, 6), device=device)
        labels = ids[:, 0] % 2 if name == "BERT" else ids
        self.batch = {"input_ids": ids, "labels": labels}

    def loss(self, params: Any, _: Any = None, batch: Any = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self.math else nullcontext():
            out = functional_call(self.model, params, (), {**self.batch, **(batch or {})})
        loss: Tensor = out.loss
        return loss

    def own_loss(self) -> Tensor:
        loss: Tensor = self.model(**self.batch).loss
        return loss


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def penalty(grads: Tensors) -> Tensor:
    return torch.stack([g.square().sum() for g in grads.values() if g is not None]).sum()


# --- the first derivative: the bits of `.backward()`


@every_model
def test_eager_gradients_are_those_of_backward(device: torch.device, name: str) -> None:
    s, reference = Setting(name, device), Setting(name, device)
    reference.own_loss().backward()
    expected = [p.grad for p in reference.params.values()]
    _, grads = gradkit.value_and_grads(s.own_loss(), s.model)
    assert_same_bits([grads[n] for n in s.params], expected)
    assert all(p.grad is None for p in s.params.values())
    by_loss = gradkit.per_loss_grads({"a": s.own_loss(), "b": s.own_loss()}, s.params)
    assert_same_bits(by_loss["b"].values(), expected)
    assert gradkit.report.explain(s.own_loss(), s.params)
    _, grads = gradkit.simultaneous_grads((s.own_loss(), s.own_loss()), (s.params, s.params))
    assert_same_bits(grads.values(), expected)
    with gradkit.capture_grads(s.params) as captured:
        s.own_loss().backward()
    assert_same_bits(captured.grads.values(), expected)
    gradkit.backward_(s.own_loss(), s.params)
    assert_same_bits([p.grad for p in s.params.values()], expected)


@every_model
def test_a_step_is_that_of_the_loop(device: torch.device, name: str) -> None:
    s, reference = Setting(name, device), Setting(name, device)
    optimizers = [torch.optim.AdamW(x.params.values(), lr=0.01) for x in (s, reference)]
    for _ in range(2):
        _, grads = gradkit.value_and_grads(s.own_loss(), s.params)
        gradkit.step_(optimizers[0], s.params, grads)
        optimizers[1].zero_grad()
        reference.own_loss().backward()
        optimizers[1].step()
    assert_same_bits(s.params.values(), reference.params.values())


@every_model
def test_safe_retain_of_its_head(device: torch.device, name: str) -> None:
    s = Setting(name, device)
    *_, place = (n for n, m in s.model.named_modules() if isinstance(m, nn.Linear))
    with gradkit.safe_retain(s.model, [place]) as kept:
        loss = s.own_loss()
        gradkit.value_and_grads(loss, s.params, retain_graph=True)
    (expected,) = torch.autograd.grad(loss, kept.values[place])
    assert_same_bits([kept.grads[place]], [expected])


# --- gradkit.func


@every_model
def test_functional_gradients(device: torch.device, name: str) -> None:
    s = Setting(name, device)
    expected = torch.autograd.grad(s.own_loss(), list(s.params.values()))
    for option in (None, False):
        _, grads = func.value_and_grads(s.loss, create_graph=option)(s.params)
        close([g.detach() for g in grads.values()], list(expected))
    call, params, buffers = func.make_functional(s.model)
    _, grads = func.value_and_grads(lambda p: call(p, buffers, **s.batch)[0].loss)(params)
    close([grads[n].detach() for n in s.params], list(expected))
    values, pull = func.vjp(s.loss, s.params)
    close(list(pull(torch.ones_like(values))[0].values()), list(expected))
    rows = func.per_loss_grads(lambda p: torch.stack([s.loss(p)] * 2))(s.params)
    close([row[1].detach() for row in rows.values()], list(expected))


@every_model
def test_gradients_of_each_sample(device: torch.device, name: str) -> None:
    s = Setting(name, device)

    def of_sample(params: Tensors, sample: Tensors) -> Tensor:
        return s.loss(params, None, {key: part[None] for key, part in sample.items()})

    grads = func.per_sample_grads(of_sample, in_dims=(None, 0))(s.params, s.batch)
    for i in range(3):
        sample = {key: part[i] for key, part in s.batch.items()}
        expected = torch.autograd.grad(of_sample(s.params, sample), list(s.params.values()))
        close([g[i].detach() for g in grads.values()], list(expected))


# --- the second derivative: that of the model without fused kernels


def second_order(s: Setting) -> Tensors:
    _, grads = func.value_and_grads(lambda p: penalty(func.value_and_grads(s.loss)(p)[1]))(s.params)
    return {n: g.detach() for n, g in grads.items()}


def func_then_eager(s: Setting) -> Tensors:
    grads = func.value_and_grads(s.loss)(s.params)[1]
    return gradkit.value_and_grads(penalty(grads), s.params)[1]


def hvp(s: Setting) -> Tensors:
    params = {n: p.detach() for n, p in s.params.items()}
    return func.hvp(s.loss, params, {n: p.cos() for n, p in params.items()})[1]


def unrolled(s: Setting, memory: Any) -> Tensors:
    opt = meta.sgd(lr=0.1, momentum=0.5)
    adapted = meta.unroll(s.loss, s.params, [s.batch] * 2, opt, memory=memory)
    return gradkit.value_and_grads(s.loss(adapted.params), s.params)[1]


def by_implicit(s: Setting) -> Tensors:
    def inner(p: Tensors, weight: Tensor) -> Tensor:
        return s.loss(p) + weight * penalty(p)

    find = meta.implicit(lambda p, _: p, inner, maxiter=2, damping=10.0)
    weight = torch.ones_like(next(iter(s.params.values())).flatten()[0]).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradkit.GradkitWarning)
        return {"": gradkit.value_and_grads(s.loss(find(s.params, weight)), weight)[1]}


def by_tasks(s: Setting) -> Tensors:
    def meta_loss(params: Tensors, task: Tensors) -> Tensor:
        adapted = meta.unroll(s.loss, params, [task], meta.sgd(lr=0.1))
        return s.loss(adapted.params, None, task)

    tasks = {key: torch.stack([part, part.flip(0)]) for key, part in s.batch.items()}
    grads = meta.mean_value_and_grads(meta_loss, s.params, tasks)[1]
    return {n: g.detach() for n, g in grads.items()}


SECOND: dict[str, Callable[[Setting], Tensors]] = {
    "func, nested": second_order,
    "func, then eager": func_then_eager,
    "hvp": hvp,
    "unroll": lambda s: unrolled(s, "store"),
    "unroll, recomputed": lambda s: unrolled(s, "recompute"),
    "unroll, two at a time": lambda s: unrolled(s, 2),
    "implicit": by_implicit,
    "tasks": by_tasks,
}


@every_model
@pytest.mark.parametrize("way", SECOND)
def test_the_second_derivative(device: torch.device, name: str, way: str) -> None:
    ours, expected = (SECOND[way](Setting(name, device, math=math)) for math in (False, True))
    close(list(ours.values()), list(expected.values()))


@every_model
def test_create_graph_is_right_with_and_without_fused_kernels(
    device: torch.device, name: str
) -> None:
    s = Setting(name, device)
    expected = second_order(s)
    losses = [s.own_loss()]
    with sdpa_kernel(SDPBackend.MATH):
        losses.append(s.own_loss())
    torch.manual_seed(0)
    model = MODELS[name]("eager").to(device).double().train()
    losses.append(model(**s.batch).loss)
    models = zip(losses, (s.model, s.model, model), (1e-8, 1e-8, 1e-3), strict=True)
    for loss, of, tolerance in models:
        params = {n: p for n, p in of.named_parameters() if p.requires_grad}
        _, grads = gradkit.value_and_grads(loss, params, create_graph=True)
        _, got = gradkit.value_and_grads(penalty(grads), params)
        # transformers rounds the softmax of its own attention to float32.
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@every_model
def test_the_hook_of_gradient_checkpointing(device: torch.device, name: str) -> None:
    """A function on eager tensors may call requires_grad_(), as that hook does; others name it."""
    s = Setting(name, device)
    expected = func.value_and_grads(s.loss)(s.params)[1]
    along = {n: p.detach().cos() for n, p in s.params.items()}
    s.model.gradient_checkpointing_enable()
    close(func.value_and_grads(s.loss)(s.params)[1], expected)
    match = "(?s)requires_grad_.* by make_inputs_require_grads.*disable_input_require_grads"
    with pytest.raises(gradkit.UnsupportedGraphError, match=match):
        func.jvp(s.loss, (s.params,), (along,))
    s.model.gradient_checkpointing_disable()
    s.model.disable_input_require_grads()
    close(func.value_and_grads(s.loss)(s.params)[1], expected)


# --- the other calls


def inner(a: Tensors, b: Tensors) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(a.values(), b.values(), strict=True)]).sum()


@every_model
def test_products(device: torch.device, name: str) -> None:
    s = Setting(name, device, math=True)
    params = {n: p.detach() for n, p in s.params.items()}
    along = {n: p.cos() for n, p in params.items()}
    grads = dict(
        zip(params, torch.autograd.grad(s.own_loss(), list(s.params.values())), strict=True)
    )
    value, dot = func.jvp(s.loss, (params,), (along,))
    # transformers computes the loss itself in float32.
    torch.testing.assert_close(dot, inner(grads, along).to(value.dtype), rtol=1e-4, atol=1e-5)
    _, push = func.linearize(s.loss, params)
    torch.testing.assert_close(push(along), dot, rtol=1e-4, atol=1e-5)
    # The square of a scalar has the Gauss-Newton matrix 2 g g^T.
    _, product = func.ggn_vp(s.loss, lambda loss: loss.square(), params, along)
    expected = {n: 2 * dot * g for n, g in grads.items()}
    torch.testing.assert_close(product, expected, rtol=1e-4, atol=1e-5)
    ids = {"input_ids": s.batch["input_ids"]}

    def of_logits(scale: Tensor) -> Tensor:
        scaled = {n: p * scale for n, p in params.items()}
        with sdpa_kernel(SDPBackend.MATH):
            logits: Tensor = functional_call(s.model, scaled, (), ids).logits
        return logits.square().mean()

    if name != "Llama":  # which computes its norms in float32
        func.check_grads(of_logits, torch.ones((), dtype=torch.float64, device=device), order=1)


@every_model
def test_gradients_consumed_in_the_pass(device: torch.device, name: str) -> None:
    s = Setting(name, device)
    each = [{key: part[i : i + 1] for key, part in s.batch.items()} for i in range(3)]

    def losses() -> Tensor:
        return torch.stack([s.loss(s.params, None, sample) for sample in each])

    rows = gradkit.per_loss_grads(losses(), s.params)
    right = gradkit.tree.gram(rows, losses=losses())
    close(gradkit.gram(losses(), s.params), right)
    close(gradkit.per_loss_norms(list(losses()), s.params), right.diagonal().sqrt())
    close(gradkit.per_sample_norms(losses(), s.params), right.diagonal().sqrt())
    _, norms = gradkit.value_and_reduced_grads(losses().sum(), s.params, torch.linalg.vector_norm)
    close(norms, {n: torch.linalg.vector_norm(row.sum(0)) for n, row in rows.items()})
    factors = (0.5 / right.diagonal().sqrt()).clamp(max=1)
    expected = {n: torch.einsum("k,k...->...", factors, row) for n, row in rows.items()}
    total = gradkit.clipped_sum(losses(), s.params, 0.5)
    torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-6)
    step = func.staged_value_and_grads(
        lambda params, chunk: s.loss(params, None, chunk)[None], torch.sum, chunk_size=1
    )
    summed = {n: row.sum(0) for n, row in rows.items()}
    torch.testing.assert_close(step(s.params, s.batch)[1], summed, rtol=1e-3, atol=1e-6)


@every_model
def test_reports_and_dot_grad(device: torch.device, name: str) -> None:
    s = Setting(name, device)
    _, grads = gradkit.value_and_grads(s.own_loss(), s.params)
    gradkit.write_grads_(s.params, grads)
    gradkit.add_grads_(s.params, grads)
    close(gradkit.read_grads(s.params), gradkit.tree.scale(grads, 2.0))
    gradkit.clear_grads_(s.params)
    rows = gradkit.per_loss_grads({"a": s.own_loss(), "b": -s.own_loss()}, s.params)
    assert gradkit.report.conflicts(rows).conflicting
    comparison = gradkit.report.compare(lambda params: s.loss(params), s.params)
    assert not comparison.refused
    ways = comparison.differences.values()
    assert all(difference.absolute < 1e-3 for way in ways for difference in way.values())
