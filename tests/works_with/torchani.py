"""The energy of a molecule with ANI features and untrained nets, and its forces."""

import torch
import torchani

from tests.works_with._oracles import of_function

PIP = "torchani"


def tries():
    torch.manual_seed(0)
    features = torchani.AEVComputer.like_1x(num_species=2).double()
    species = torch.tensor([[0, 1, 1]])
    weights = torch.randn(features.out_dim, dtype=torch.float64)
    x = torch.tensor([[[0.0, 0.0, 0.1], [0.9, 0.0, 0.0], [-0.3, 0.9, 0.0]]], dtype=torch.float64)

    def energy(x):
        out = (
            features(species, x)
            if not hasattr(features, "forward_legacy")
            else features(species, x)
        )
        out = out if isinstance(out, torch.Tensor) else out[-1]
        return (out @ weights).tanh().sum()

    yield from of_function(energy, x, tol=1e-4)
