"""A force field of small molecules, trained by energies and forces in one compiled step.

The 81 molecules of hydrogen, carbon, nitrogen and oxygen in the G2 test set (Curtiss et al. 1997,
https://doi.org/10.1063/1.473182), as the package ase ships them: their measured atomization
energies, and geometries of least energy, at which every force is zero. A force is a gradient, and
the gradient of the loss goes through it. The same loop of plain torch is run beside the compiled
step, and so is training by energies alone, whose forces are far from zero.

    python examples/force_field.py [--smoke] [--device cuda] [--output folder]

`--smoke` takes the backend aot_eager, which needs no C++ compiler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _script import blank_figure, conclude, options_of, save, tidy
from ase.data import g2
from ase.symbols import string2symbols
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gradkit

DATA: dict[str, Any] = g2.data  # of each molecule, and each atom
SEED, RATE, HELD_OUT = 0, 3e-3, 4  # each fourth molecule is held out
SPECIES, CENTERS, CUTOFF = "HCNO", 12, 4.0  # the radial functions end at 4 angstroms
KCAL = 0.0433641  # kcal/mol in eV
WEIGHT = 1.0  # of the forces, in (eV/angstrom)^2 over (eV/atom)^2
TOLERANCE = 1e-5  # of a weight, in float64: each step of Adam adds to the rounding


class Molecules(NamedTuple):
    """Molecules, padded to as many atoms as the largest one has."""

    positions: Tensor  # [molecules, atoms, 3], in angstroms
    species: Tensor  # [molecules, atoms, 4], one-hot; zeros for padding
    energies: Tensor  # [molecules], minus the atomization energies in eV

    def at(self, rows: Any) -> Molecules:
        """Return some of the molecules."""
        return Molecules(*(tensor[rows] for tensor in self))


def molecules(device: torch.device) -> Molecules:
    """Return the molecules of which all atoms are of the four elements."""
    chosen = []
    for name in sorted(DATA):
        symbols = string2symbols(DATA[name]["symbols"])
        if len(symbols) > 1 and set(symbols) <= set(SPECIES):
            chosen.append((name, symbols))
    most = max(len(symbols) for _, symbols in chosen)
    away = 100.0 * torch.arange(most, dtype=torch.float64)  # of each other, what pads
    positions = away[:, None].repeat(len(chosen), 1, 3)
    species = torch.zeros(len(chosen), most, len(SPECIES), dtype=torch.float64)
    energies = torch.zeros(len(chosen), dtype=torch.float64)
    for row, (name, symbols) in enumerate(chosen):
        positions[row, : len(symbols)] = torch.tensor(DATA[name]["positions"])
        species[row, range(len(symbols)), [SPECIES.index(x) for x in symbols]] = 1
        energies[row] = -KCAL * atomization_energy(DATA[name], symbols)
    return Molecules(positions.to(device), species.to(device), energies.to(device))


def atomization_energy(entry: dict[str, Any], symbols: list[str]) -> float:
    """Return the energy, in kcal/mol, that parts a molecule into its atoms, at rest."""
    # Curtiss et al. 1997, section II: from the heat of formation at 298 K to that at 0 K, less the
    # zero-point energy. ase has a function for it, but of the first 55 molecules alone.
    atoms = [DATA[symbol] for symbol in symbols]
    energy: float = entry["ZPE"] + entry["thermal correction"] - entry["enthalpy"]
    energy += sum(atom["enthalpy"] - atom["thermal correction"] for atom in atoms)
    return energy


def network(device: torch.device) -> nn.Module:
    """Return what gives an atom's energy from its surroundings, at its start."""
    torch.manual_seed(SEED)
    width = len(SPECIES) * (CENTERS + 1)
    layers = [nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers).to(device, torch.float64)


def surroundings(positions: Tensor, species: Tensor) -> Tensor:
    """Return sums of radial functions over an atom's neighbours of each element, and its own."""
    # Behler and Parrinello 2007, https://doi.org/10.1103/PhysRevLett.98.146401, equations 3 and 4.
    same = torch.eye(positions.shape[1], dtype=positions.dtype, device=positions.device)
    between = positions[:, :, None] - positions[:, None]
    distances = (between.square().sum(-1) + same).sqrt()  # no norm of zero, whose slope is nan
    centers = torch.linspace(0.8, CUTOFF, CENTERS, dtype=positions.dtype, device=positions.device)
    smooth = (distances / CUTOFF).clamp(max=1).mul(torch.pi).cos().add(1) / 2 * (1 - same)
    radial = torch.exp(-8 * (distances[..., None] - centers) ** 2) * smooth[..., None]
    return torch.cat([torch.einsum("mijk,mjs->misk", radial, species).flatten(2), species], 2)


def energy_of(call: Callable[[Tensor], Tensor], positions: Tensor, species: Tensor) -> Tensor:
    """Return the energy of each molecule: the sum of those of its atoms, in eV."""
    of_atoms = call(surroundings(positions, species))[..., 0]
    return (of_atoms * species.sum(-1)).sum(1)


def mismatch(energies: Tensor, slopes: Tensor, known: Molecules, weight: float) -> Tensor:
    """Return the loss: squared errors of energies per atom, and of forces, which are zero."""
    atoms = known.species.sum((1, 2))
    by_energy = ((energies - known.energies) / atoms).square().mean()
    return by_energy + weight * (slopes.square().sum((1, 2)) / atoms).mean()


def compiled_step(
    model: nn.Module, known: Molecules, weight: float, backend: str
) -> tuple[Callable[[], float], Callable[[], dict[str, Tensor]]]:
    """Return a step whose loss and gradients are one graph, and what returns the weights."""
    call, params, buffers = gradkit.func.make_functional(model)
    params = {name: x.detach().clone().requires_grad_() for name, x in params.items()}
    optimizer = torch.optim.Adam(params.values(), lr=RATE)

    def loss_of(params: Any, positions: Tensor, species: Tensor, energies: Tensor) -> Tensor:
        def total(positions: Tensor) -> Any:
            each = energy_of(lambda x: call(params, buffers, x)[0], positions, species)
            return each.sum(), each

        (_, each), slopes = gradkit.func.value_and_grads(total, has_aux=True)(positions)
        return mismatch(each, slopes, Molecules(positions, species, energies), weight)

    gradient = gradkit.func.value_and_grads(loss_of, create_graph=False)
    compiled = torch.compile(gradient, fullgraph=True, backend=backend)

    def step() -> float:
        loss, grads = compiled(params, *known)
        gradkit.step_(optimizer, params, grads)
        return float(loss)

    return step, lambda: params


def usual_step(
    model: nn.Module, known: Molecules, weight: float
) -> tuple[Callable[[], float], Callable[[], dict[str, Tensor]]]:
    """Return the same as a loop of plain torch, which torch.compile cannot take."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    def step() -> float:
        optimizer.zero_grad()
        positions = known.positions.clone().requires_grad_()
        energies = energy_of(model, positions, known.species)
        (slopes,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        loss = mismatch(energies, slopes, known, weight)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step, lambda: dict(model.named_parameters())


def errors(model: nn.Module, weights: dict[str, Tensor], known: Molecules) -> tuple[float, float]:
    """Return the mean error of an energy, in eV per atom, and the mean force, in eV/angstrom."""
    call, *_ = gradkit.func.make_functional(model)

    def total(positions: Tensor) -> Any:
        each = energy_of(lambda x: call(weights, {}, x)[0], positions, known.species)
        return each.sum(), each

    gradient = gradkit.func.value_and_grads(total, has_aux=True, create_graph=False)
    (_, each), slopes = gradient(known.positions)
    atoms = known.species.sum(-1)
    energy = ((each - known.energies) / atoms.sum(1)).abs().mean()
    return float(energy), float(slopes.norm(dim=-1).sum() / atoms.sum())


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status: 0 if every check passed."""
    options = options_of(__doc__).parse_args(argv)
    steps, backend = (30, "aot_eager") if options.smoke else (1000, "inductor")
    known, model = molecules(options.device), network(options.device)
    rows = torch.arange(len(known.energies))
    seen, unseen = known.at(rows % HELD_OUT != 0), known.at(rows % HELD_OUT == 0)
    sides = {
        "one graph": compiled_step(deepcopy(model), seen, WEIGHT, backend),
        "usual loop": usual_step(deepcopy(model), seen, WEIGHT),
        "energies alone": usual_step(deepcopy(model), seen, 0.0),
    }
    seconds = dict.fromkeys(sides, 0.0)
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(steps):
        for name, (step, _) in sides.items():
            start = time.thread_time()
            losses[name].append(step())
            seconds[name] += (time.thread_time() - start) * (number > 1)  # the first one compiles
    weights = {name: of_step() for name, (_, of_step) in sides.items()}
    found = {name: errors(model, each, unseen) for name, each in weights.items()}
    ours, theirs = weights["one graph"], weights["usual loop"]
    difference = max((ours[name] - theirs[name]).abs().max().item() for name in ours)

    console, picture = Console(), options.output / "force_field.png"
    draw(losses, picture)
    table = Table("trained as", "CPU time a step", "energy, held out", "force, held out", box=None)
    for name, (energy, force) in found.items():
        taken = f"{1e3 * seconds[name] / (steps - 2):.2f} ms"
        table.add_row(name, taken, f"{energy:.3f} eV/atom", f"{force:.3f} eV/A")
    console.print(table)
    failed = [] if difference <= TOLERANCE else [f"a weight differs by {difference:.1e}"]
    if not options.smoke and not found["one graph"][1] < found["energies alone"][1] / 2:
        failed.append("forces that were trained are not half of those that were not")
    summary = f"the weights are those of the usual loop, to {difference:.0e}"
    return conclude(console, picture, failed, summary)


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Save a picture of the losses over the steps."""
    figure = blank_figure(7, 3.5)
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", ":", "-"), strict=True):
        axes.semilogy(values, style, label=name)
    tidy(axes, "Energies and forces of G2 molecules")
    axes.set(xlabel="step", ylabel="loss")
    save(figure, path)


if __name__ == "__main__":
    # With tensors this small, threads mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
