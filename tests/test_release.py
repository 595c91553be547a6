"""What is released names one version, and the packages that it needs."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
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
    tools = [read(str(path)) for path in ROOT.glob("tools/*/gradkit_*/__init__.py")]
    assert {re.search(r'(?m)^__version__ = "(.*)"$', text)[1] for text in tools} == {
        gradkit.__version__
    }


def test_tools_that_use_inner_names_need_this_minor_version(device: torch.device) -> None:
    major, minor = re.match(r"(\d+)\.(\d+)\.", gradkit.__version__).groups()
    for tool in ("doctor", "parity"):
        project = tomllib.loads(read(f"tools/{tool}/pyproject.toml"))["project"]
        assert project["dependencies"] == [f"gradkit>={major}.{minor},<{major}.{int(minor) + 1}"]


def test_the_recipe_needs_what_the_project_does(device: torch.device) -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    needs = {f"python {project['requires-python']}"}
    needs |= {
        need.replace("torch", "pytorch").replace(">=", " >=") for need in project["dependencies"]
    }
    run = read("release/recipe.yaml").partition("  run:\n")[2].partition("\n\n")[0]
    assert {line.strip(" -") for line in run.splitlines()} == needs


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_and_may_only_read(device: torch.device, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    uses = re.findall(r"uses: (.*)", text)
    assert uses
    for one in uses:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one), one
    assert "\npermissions:\n  contents: read\n" in text.partition("\njobs:\n")[0] + "\n"


def test_every_address_is_of_one_repository(device: torch.device) -> None:
    urls = tomllib.loads(read("pyproject.toml"))["project"]["urls"]
    source = urls["Source"]
    named = {name: url for name, url in urls.items() if name not in ("Source", "Documentation")}
    assert all(url.startswith(f"{source}/") for url in named.values())
    private = f"{source}/security/advisories/new"
    assert private in read("SECURITY.md")
    assert private in read(".github/ISSUE_TEMPLATE/config.yml")


def test_llms_txt_has_a_sentence_for_each_page(device: torch.device) -> None:
    docs = ROOT / "docs"
    found = runpy.run_path(str(docs / "llms.py"))["text"](docs)
    lines = re.findall(r"(?m)^- \[(.+)\]\((\w+)\.html\): (.+)$", found)
    named = {name for _, name, _ in lines}
    assert named == {path.stem for path in docs.glob("*.md")} - {"index"}
    assert all(sentence[0] not in "#|!" for *_, sentence in lines)


def test_the_types_are_those_of_the_table(device: torch.device) -> None:
    """`python release/stub.py` writes them; `make types` compares what comes out for a user."""
    pytest.importorskip("ruff")
    stub = runpy.run_path(str(ROOT / "release/stub.py"))
    assert read("gradkit/__init__.pyi") == stub["text"]()


@pytest.mark.parametrize("name", ["value_and_grads", "per_loss_grads", "simultaneous_grads"])
def test_the_types_of_a_call_have_its_options(device: torch.device, name: str) -> None:
    tree = ast.parse(read("gradkit/__init__.pyi"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def options(of: str) -> set[str]:
        own = {ast.unparse(x.target) for x in classes[of].body if isinstance(x, ast.AnnAssign)}
        return own.union(*(options(x) for x in map(ast.unparse, classes[of].bases) if x in classes))

    typed = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    for node in typed:
        named = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        rest = options(ast.unparse(node.args.kwarg.annotation).removeprefix("Unpack[")[:-1])
        assert {*named, *rest} == set(inspect.signature(getattr(gradkit, name)).parameters)
    assert typed


@pytest.mark.slow
@pytest.mark.processes
def test_a_program_of_a_user_has_these_types(device: torch.device, tmp_path: Path) -> None:
    """As `release/try_wheel.py` tries it with the wheel."""
    pytest.importorskip("mypy")
    program = shutil.copy(ROOT / "release/user_program.py", tmp_path)
    command = [sys.executable, "-m", "mypy", "--strict", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
