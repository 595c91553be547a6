"""Rotary positions of queries and keys, with learned frequencies."""

import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import nn

from tests.works_with._oracles import of_module

PIP = "rotary-embedding-torch"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.rotary = nn.Linear(4, 12), RotaryEmbedding(dim=4, learned_freq=True)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def tries():
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    yield from of_module(lambda: Attention().double(), (x,), lambda m, x: m(x).square().mean())
