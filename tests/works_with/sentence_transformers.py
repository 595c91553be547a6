"""A small encoder made from a config, and its multiple-negatives ranking loss."""

import torch
from sentence_transformers import SentenceTransformer, losses
from sentence_transformers.models import Pooling
from torch import nn

from tests.works_with._oracles import of_module

PIP = "sentence-transformers"


class Encoder(nn.Module):
    """Takes token numbers, where no tokenizer can be downloaded."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 6)

    def forward(self, features):
        return features | {"token_embeddings": self.table(features["input_ids"])}


def make():
    model = SentenceTransformer(modules=[Encoder(), Pooling(6)], device="cpu")
    return losses.MultipleNegativesRankingLoss(model).double()


def loss(module, a, b):
    features = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (a, b)]
    return module(features, None)


def tries():
    yield from of_module(
        make,
        (torch.randint(13, (4, 5)), torch.randint(13, (4, 5))),
        loss,
        "",
        "steps gradient hvp functional",
    )
