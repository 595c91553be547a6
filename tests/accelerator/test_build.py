"""The library is compiled once; what is in the way is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.accelerator import build
from tests.accelerator.unsupported import UNSUPPORTED

needs_compiler = pytest.mark.skipif(shutil.which(build.COMPILER) is None, reason="no compiler")


@pytest.fixture(autouse=True)
def _is_emulated() -> None:
    """Run these without it, too."""


@needs_compiler
def test_it_is_compiled_once_for_the_same_sources(device: torch.device, tmp_path: Path) -> None:
    sources, cache = tmp_path / "library", tmp_path / "cache"
    sources.mkdir()
    source = sources / "library.cpp"
    source.write_text("int one() { return 1; }\n")
    built = build.library(sources, cache)
    written = built.stat().st_mtime_ns
    assert build.library(sources, cache) == built
    assert built.stat().st_mtime_ns == written
    source.write_text("int one() { return 2; }\n")
    assert build.library(sources, cache) != built
    assert sorted(path.suffix for path in cache.iterdir()) == [".so", ".so"]


@needs_compiler
def test_the_first_error_of_the_compiler_is_shown(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "library.cpp").write_text("int one() { return two; }\nint three = four;\n")
    with pytest.raises(build.BuildError, match="two") as caught:
        build.library(tmp_path, tmp_path / "cache")
    assert "library.cpp:1:" in str(caught.value)
    assert "four" not in str(caught.value)


def test_what_is_in_the_way_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", f"{build.TRIED[0]}.0+cpu")
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    assert build.why_not() == "there is no compiler, no-such-compiler"
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert build.why_not() == f"torch is 2.11.0; the emulation is for {build.TRIED[0]}"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert build.why_not() == "there is a real accelerator, xpu"


def test_the_tests_that_it_cannot_run_exist(device: torch.device) -> None:
    tests = Path(__file__).resolve().parents[1]
    for file, names in UNSUPPORTED.items():
        text = (tests / file).read_text(encoding="utf-8")
        for pattern in names:
            assert f"{pattern.partition('*')[0]}" in text
