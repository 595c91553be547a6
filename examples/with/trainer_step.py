"""The Hugging Face Trainer: conflicts of two losses, reported; LoRA on frozen weights.

    python examples/with/trainer_step.py [--smoke]

A language model, made from a config, also pays for the size of its logits (the z-loss of PaLM,
Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 5). `Usual` adds the losses in
`compute_loss`. `WithGradkit` overrides `training_step`, and a callback records the angle between
the gradients. The weights are equal up to rounding.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from _shared import parse, verdict
from torch import Tensor, nn
from torch.utils.data import Dataset

import gradkit

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    from peft import LoraConfig, get_peft_model
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError(f"{error}: pip install gradkit[transformers]") from error

WEIGHTS = {"lm": 1.0, "z": 0.01}
LENGTH, VOCABULARY = 16, 32
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up from a random token, some with a wrong token."""

    def __init__(self, count: int) -> None:
        random = torch.Generator().manual_seed(0)
        starts = torch.randint(VOCABULARY, (count, 1), generator=random)
        tokens = (starts + torch.arange(LENGTH)) % VOCABULARY
        wrong = torch.rand(count, LENGTH, generator=random) < 0.1
        noise = torch.randint(VOCABULARY, (count, LENGTH), generator=random)
        self.tokens = torch.where(wrong, noise, tokens)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sequence."""
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def losses_of(trainer: Trainer, model: nn.Module, inputs: Any, count: Any) -> dict[str, Tensor]:
    """Return both losses of a micro-batch, such that their sums over a step are means.

    Trainer does not divide for this model: it passes the number of tokens of the whole step.
    """
    out = model(**inputs, num_items_in_batch=count)
    size = out.logits.logsumexp(-1).square().mean()
    return {"lm": out.loss, "z": size / trainer.current_gradient_accumulation_steps}


class Usual(Trainer):
    """One weighted sum, and one backward pass."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the weighted sum of the losses."""
        losses = losses_of(self, model, inputs, num_items_in_batch)
        return WEIGHTS["lm"] * losses["lm"] + WEIGHTS["z"] * losses["z"]


class WithGradkit(Trainer):
    """The gradient of each loss: the Trainer clips and steps with what is in `.grad`, as before."""

    conflicts: gradkit.report.Conflicts
    record: RecordConflicts

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Add the gradients of one micro-batch to `.grad`, and return its loss."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            losses = losses_of(self, model, inputs, num_items_in_batch)
        calls = gradkit.distributed if self.accelerator.use_distributed else gradkit
        per_loss = calls.per_loss_grads(losses, model)
        self.conflicts = gradkit.report.conflicts(per_loss)
        gradkit.add_grads_(model, gradkit.combine(per_loss, WEIGHTS))
        return WEIGHTS["lm"] * losses["lm"].detach() + WEIGHTS["z"] * losses["z"].detach()


class RecordConflicts(TrainerCallback):
    """Records the conflicts in the last micro-batch of every step."""

    def __init__(self, trainer: WithGradkit) -> None:
        self.history = gradkit.report.History()
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add one step to the record."""
        self.history.add_(state.global_step, self.trainer.conflicts)


def new_model(adapter: bool) -> nn.Module:
    """Return a small GPT-2 without dropout, frozen below LoRA's adapters if there are any."""
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(vocab_size=VOCABULARY, loss_type="ForCausalLM", **sizes, **options, **IDS)
    model = GPT2LMHeadModel(config)
    if not adapter:
        return model
    lora = LoraConfig(
        r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM",
        init_lora_weights=False,
    )  # fmt: skip
    return get_peft_model(model, lora)


def arguments(folder: str) -> TrainingArguments:
    """Return arguments with micro-batches and clipping."""
    return TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        optim="sgd",
        learning_rate=0.1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(kind: type[Trainer], data: Counting, adapter: bool) -> tuple[nn.Module, Trainer]:
    """Return a model that this kind of Trainer has trained, and the Trainer."""
    model = new_model(adapter)
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(model, arguments(folder), train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        if isinstance(trainer, WithGradkit):
            trainer.record = RecordConflicts(trainer)
            trainer.add_callback(trainer.record)
        trainer.train()
    return model, trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train with both, in full and with LoRA, and return the exit status: 0 if all is equal."""
    options = parse(__doc__, argv)
    data = Counting(64 if options.smoke else 2048)
    failed = 0
    for adapter in (False, True):
        usual, _ = train(Usual, data, adapter)
        ours, trainer = train(WithGradkit, data, adapter)
        print(trainer.record.history)
        result = "LoRA on frozen weights" if adapter else "trainer"
        failed |= verdict(usual, ours, result, atol=1e-5)
    return failed


if __name__ == "__main__":
    sys.exit(main())
