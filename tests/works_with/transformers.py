"""A Llama of two layers made from a config, in float64: the language-model loss."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from tests.works_with._oracles import of_module

PIP = "transformers"


def llama():
    config = LlamaConfig(vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16)  # fmt: skip
    return LlamaForCausalLM(config).double()


def mamba():
    return MambaForCausalLM(
        MambaConfig(vocab_size=13, hidden_size=8, state_size=4, num_hidden_layers=2)
    ).double()


def loss(module, ids):
    return module(input_ids=ids, labels=ids, use_cache=False).loss


def tries():
    ids = torch.randint(13, (3, 6))
    yield from of_module(llama, (ids,), loss, "Llama: ", tol=2e-3)
    yield from of_module(mamba, (ids,), loss, "Mamba: ", "steps gradient samples hvp functional")
