"""docs/migrating.md shows what is printed; the scripts of examples/migrate stay the same."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gradkit_migrate import migrate
from gradkit_migrate.command import main

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "migrate"
SCRIPTS = sorted(
    path.stem for path in FOLDER.glob("*.py") if "def legacy" in path.read_text("utf-8")
)


def test_the_page_shows_what_is_printed(
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    source, printed = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["train.py"]) == 1
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines()] == diff.splitlines()
    assert err == printed


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_loops_of_the_examples(
    device: torch.device, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = migrate((FOLDER / f"{name}.py").read_bytes())
    assert (result.moved > 0) == (name in {"amp", "language_model"})
    assert bool(result.skipped) == (not result.moved)
    if result.moved:
        pytest.importorskip("sklearn")
        monkeypatch.syspath_prepend(FOLDER)
        script = tmp_path / f"migrated_{name}.py"
        script.write_bytes(result.source)
        monkeypatch.setitem(sys.modules, script.stem, ModuleType(script.stem))
        # Its main fails if one bit differs from the loop that was moved by hand.
        assert load(script, script.stem).main(["--smoke", "--device", str(device)]) == 0
