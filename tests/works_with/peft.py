"""LoRA, DoRA and LoKr adapters on a two-layer net; the base is frozen."""

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from torch import nn

from tests.works_with._oracles import mse, of_module

PIP = "peft"


def adapted(config):
    def make():
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        model = get_peft_model(net, config).double()
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn_like(p))
        return model

    return make


def tries():
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    names = {"target_modules": ["0", "2"]}
    for word, config in {
        "LoRA: ": LoraConfig(r=2, **names),
        "DoRA: ": LoraConfig(r=2, use_dora=True, **names),
        "LoHa: ": LoHaConfig(r=2, **names),
        "LoKr: ": LoKrConfig(r=2, **names),
    }.items():
        yield from of_module(adapted(config), batch, mse, word)
