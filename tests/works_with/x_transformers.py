"""A small decoder with rotary positions and RMS norm."""

import torch
from x_transformers import Decoder, TransformerWrapper

from tests.works_with._oracles import of_module

PIP = "x-transformers"


def make():
    return TransformerWrapper(
        num_tokens=11, max_seq_len=8,
        attn_layers=Decoder(dim=8, depth=2, heads=2, attn_dim_head=4, rotary_pos_emb=True, use_rmsnorm=True),
    ).double()  # fmt: skip


def loss(module, ids):
    return torch.nn.functional.cross_entropy(module(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


def tries():
    yield from of_module(make, (torch.randint(11, (3, 6)),), loss)
