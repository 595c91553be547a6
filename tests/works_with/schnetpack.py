"""SchNet's energy with forces in the loss, from positions of four atoms."""

import schnetpack as spk
import torch

from tests.works_with._oracles import of_module

PIP = "schnetpack"


def make():
    radial = spk.nn.GaussianRBF(n_rbf=6, cutoff=5.0)
    representation = spk.representation.SchNet(
        n_atom_basis=6, n_interactions=2, radial_basis=radial, cutoff_fn=spk.nn.CosineCutoff(5.0)
    )
    energy = spk.atomistic.Atomwise(n_in=6, output_key="energy")
    forces = spk.atomistic.Forces(energy_key="energy", force_key="forces")
    return spk.model.NeuralNetworkPotential(
        representation=representation,
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[energy, forces],
    ).double()


def loss(module, positions):
    i, j = torch.tensor([(a, b) for a in range(4) for b in range(4) if a != b]).T
    names = spk.properties
    inputs = {
        names.Z: torch.tensor([6, 1, 1, 8]),
        names.R: positions.detach().clone(),
        names.idx_i: i,
        names.idx_j: j,
        names.idx_m: torch.zeros(4, dtype=torch.long),
        names.offsets: torch.zeros(len(i), 3, dtype=positions.dtype),
        names.n_atoms: torch.tensor([4]),
    }
    out = module(inputs)
    return (out["energy"] - 1).square().mean() + out["forces"].square().mean()


def tries():
    yield from of_module(
        make, (torch.randn(4, 3, dtype=torch.float64),), loss, "", "steps gradient hvp functional"
    )
