"""A graph network: GCN, GAT and edge convolutions, and pooling, on a small graph."""

import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, GCNConv, GINEConv, global_mean_pool

from tests.works_with._oracles import of_module

PIP = "torch_geometric"
EDGES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = GCNConv(3, 6), GATv2Conv(6, 4, heads=2)
        self.c = GINEConv(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), edge_dim=1)

    def forward(self, x):
        h = self.b(self.a(x, EDGES).tanh(), EDGES)
        h = self.c(h, EDGES, torch.ones(EDGES.shape[1], 1, dtype=x.dtype))
        return global_mean_pool(h, torch.zeros(len(x), dtype=torch.long))


def tries():
    x = torch.randn(5, 3, dtype=torch.float64)
    yield from of_module(
        lambda: Net().double(),
        (x,),
        lambda m, x: m(x).square().mean(),
        "",
        "steps gradient hvp functional unroll",
    )
