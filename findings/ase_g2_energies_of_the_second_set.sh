#!/usr/bin/env bash
# ase 3.29.0: ase.data.g2 has the data of 162 species, but its get_atomization_energy knows those of G2-1 alone.
#
# The module merges the two parts of the G2 test set into one dictionary, `data`, and exports get_atomization_energy beside
# it. The function is that of ase.data.g2_1, and looks names up in the dictionary of that module: for a molecule of the
# second part (benzene) it raises a KeyError, although all that it needs (enthalpy, zero-point energy, thermal correction) is
# in `data`. The formula applied to `data` gives benzene's 1,367.7 kcal/mol.
#
# Seen: 162 names in data; H2O 232.58; C6H6 KeyError; by the formula C6H6 1367.7.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ase==3.29.0
"$folder/venv/bin/python" - <<'PYTHON'
from ase.data import g2
from ase.symbols import string2symbols

print(len(g2.data), g2.get_atomization_energy("H2O"))
assert round(g2.get_atomization_energy("H2O"), 2) == 232.58
try:
    print(g2.get_atomization_energy("C6H6"))
    raise SystemExit("it knows C6H6")
except KeyError as error:
    print("KeyError", error)


def by_formula(name):
    entry = g2.data[name]
    atoms = [g2.data[symbol] for symbol in string2symbols(entry["symbols"])]
    energy = entry["ZPE"] + entry["thermal correction"] - entry["enthalpy"]
    return energy + sum(atom["enthalpy"] - atom["thermal correction"] for atom in atoms)


print(by_formula("H2O"), by_formula("C6H6"))
assert round(by_formula("H2O"), 2) == 232.58
assert round(by_formula("C6H6"), 1) == 1367.7
PYTHON
