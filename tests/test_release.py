"""What is released names one version, and the packages that it needs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import torch

import gradkit

ROOT = Path(__file__).resolve().parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_file_names_one_version(device: torch.device) -> None:
    recipe = re.search(r'(?m)^  version: "(.*)"$', read("release/recipe.yaml"))[1]
    citation = re.search(r"(?m)^version: (.*)$", read("CITATION.cff"))[1]
    heading = re.search(r"(?m)^## (\S+)", read("CHANGELOG.md"))[1]
    assert {recipe, citation, heading} == {gradkit.__version__}


def test_the_recipe_needs_what_the_project_does(device: torch.device) -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    needs = {f"python {project['requires-python']}"}
    needs |= {
        need.replace("torch", "pytorch").replace(">=", " >=") for need in project["dependencies"]
    }
    run = read("release/recipe.yaml").partition("  run:\n")[2].partition("\n\n")[0]
    assert {line.strip(" -") for line in run.splitlines()} == needs
