"""A Reformer with reversible layers and LSH attention."""

import torch
from reformer_pytorch import ReformerLM

from tests.works_with._oracles import of_module

PIP = "reformer-pytorch"


def make():
    return ReformerLM(
        num_tokens=11,
        dim=8,
        depth=2,
        max_seq_len=8,
        heads=2,
        bucket_size=2,
        n_hashes=2,
        causal=True,
        lsh_dropout=0.0,
    )


def loss(module, ids):
    return torch.nn.functional.cross_entropy(module(ids).transpose(1, 2), ids)


def tries():
    yield from of_module(make, (torch.randint(11, (2, 8)),), loss, "", "steps functional")
