"""python -m gradkit: what it compares, that it sees a difference, and how it tells."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradkit
from gradkit.__main__ import main
from gradkit.retain import RetainedGrads
from gradkit_doctor import __main__ as doctor
from gradkit_doctor.report import (
    CONFUSIONS,
    EXTRAS,
    Finding,
    available_devices,
    check,
    doctor_report,
    error_of,
    json_value,
    text,
)

ROOT = Path(__file__).resolve().parents[2]


def findings(device: torch.device) -> list[Finding]:
    return doctor_report([device]).findings


def numbers(found: list[Finding], holds: Callable[[Finding], bool]) -> set[int]:
    return {finding.number for finding in found if holds(finding)}


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(arguments)
    return status, capsys.readouterr().out


def test_all_is_well_here(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run_doctor(capsys, "--device", str(device))
    assert status == 0
    assert f"12 of 12 confusions gave the expected values, on {device}" in out
    assert "MISMATCH" not in out


def test_every_device_is_tried_unless_one_is_named(device: torch.device) -> None:
    names = [str(device) for device in available_devices()]
    assert names[0] == "cpu"
    assert len(set(names)) == len(names) == 1 + torch.accelerator.device_count()
    found = doctor_report(available_devices()).findings
    assert [f.device for f in found] == [name for name in names for _ in CONFUSIONS]


def test_the_page_has_the_sections_of_the_table(device: torch.device) -> None:
    page = (ROOT / "docs" / "confusions.md").read_text(encoding="utf-8")
    sections = re.findall(r"(?m)^## (\d+)\. (.*)$", page)
    assert sections == [(str(i), c["title"]) for i, c in enumerate(CONFUSIONS, start=1)]


def by_hand(device: torch.device) -> dict[int, list[Any]]:
    """The numbers that the rows should show, worked out by plain torch for w = [1, 2]."""

    def grad(loss: Callable[[Tensor], Tensor]) -> list[float]:
        w = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
        return torch.autograd.grad(loss(w), w)[0].tolist()

    square, cube = grad(lambda w: (w * w).sum()), grad(lambda w: (w**3).sum())
    doubled = grad(lambda w: (w * 2).sum())
    doubled_square = grad(lambda w: ((w * 2) ** 2).sum())
    by_h = [1 + 2 * 2 * w for w in (1.0, 2.0)]
    return {
        1: [square, [2 * g for g in square], square, None],
        2: [None, [0.0, 0.0]],
        3: [{"1": square, "2": cube}],
        4: [True] * 4,
        5: [[square, [3.0, 3.0]], *[grad(lambda w: (w * w).sum() + (3 * w).sum())] * 3],
        6: [[2 * g for g in square], square, None],
        7: [*[grad(lambda w: (w * 2).sum() + ((w * 2) ** 2).sum())] * 2, by_h, by_h,
            [[1.0, 1.0], [g - 1 for g in by_h]]],
        8: [[g - 1 for g in by_h], None, *[[g - 1 for g in by_h]] * 2],
        9: [None, True, {"y": [1.0, 1.0]}],
        10: [square, [doubled, doubled_square]],
        11: [*[[doubled, doubled_square], False] * 2, [6.0, 12.0]],
        12: [[1.0, 1.0], [3.0 + 5.0] * 2],
    }  # fmt: skip


def test_the_numbers_are_those_of_plain_torch(device: torch.device) -> None:
    expected = by_hand(device)
    for finding in findings(device):
        checks = [*finding.torch, *finding.gradkit]
        values = [c.got for c in checks if not isinstance(c.got, str)]
        assert values == expected[finding.number], finding.title


def test_nothing_of_the_caller_changes(device: torch.device) -> None:
    state = torch.get_rng_state()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert all(finding.equal for finding in findings(device))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_reader_that_stops_early_gets_no_traceback(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """As in `python -m gradkit | head`: the exit status is still the report's."""
    found = doctor_report([device])
    monkeypatch.setattr(doctor, "doctor_report", lambda devices: found)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(arguments) == 0
        print("what Python flushes as it exits")


# --- it sees what is wrong


def off_by_one(call: Callable[..., Any], pick: Callable[[Any], Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return pick(call(*args, **kwargs))

    return wrong


def test_a_gradkit_that_is_wrong_is_seen_in_every_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(tree: Any) -> Any:
        return gradkit.tree.map(lambda g: g + 1, tree)

    kept: Any = RetainedGrads.grads
    monkeypatch.setattr(
        gradkit,
        "value_and_grads",
        off_by_one(gradkit.value_and_grads, lambda r: (r[0], more(r[1]))),
    )
    monkeypatch.setattr(gradkit, "per_loss_grads", off_by_one(gradkit.per_loss_grads, more))
    monkeypatch.setattr(RetainedGrads, "grads", property(lambda self: more(kept.fget(self))))
    found = findings(device)
    assert numbers(found, lambda f: "gradkit" not in f.mismatches) == set()
    assert numbers(found, lambda f: "torch" not in f.mismatches) == set(range(1, 13))


def test_a_gradkit_that_refuses_nothing_is_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = gradkit.value_and_grads

    def lenient(*args: Any, unused: str = "none", **kwargs: Any) -> Any:
        try:
            return call(*args, unused="none" if unused == "error" else unused, **kwargs)
        except gradkit.FreedGraphError:
            return None

    monkeypatch.setattr(gradkit, "value_and_grads", lenient)
    assert numbers(findings(device), lambda f: "gradkit" in f.mismatches or bool(f.error)) == {2, 3}


def twice_as_much(*args: Any, grad: Any = torch.autograd.grad, **kwargs: Any) -> Any:
    return tuple(g if g is None else 2 * g for g in grad(*args, **kwargs))


TORCHES: dict[str, tuple[Any, str, Any, set[int]]] = {
    "retain_grad does nothing": (Tensor, "retain_grad", lambda self: None, {7, 8, 12}),
    "no graph is freed": (
        Tensor,
        "backward",
        lambda self, **kwargs: torch.autograd.backward(self, retain_graph=True),
        {3, 10},
    ),
    "backward does nothing": (
        Tensor,
        "backward",
        lambda self, **kwargs: None,
        {1, 2, 3, 4, 5, 6, 7, 8, 10, 12},
    ),
    "every tensor has a gradient": (
        Tensor,
        "grad",
        property(lambda self: torch.zeros(2), lambda self, value: None),
        {1, 4, 5, 6, 7, 8, 9, 10, 12},
    ),
    "autograd.grad doubles": (torch.autograd, "grad", twice_as_much, {4, 5, 11}),
}


@pytest.mark.parametrize("how", TORCHES)
def test_a_torch_that_behaves_otherwise_is_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    owner, name, other, rows = TORCHES[how]
    monkeypatch.setattr(owner, name, other)
    assert numbers(findings(device), lambda f: "torch" in f.mismatches or bool(f.error)) == rows


def test_a_row_that_raises_is_a_mismatch_that_shows_the_error(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("not in this torch")

    monkeypatch.setattr(gradkit, "safe_retain", broken)
    status, out = run_doctor(capsys, "--json", "--device", str(device))
    report = json.loads(out)
    assert status == 1
    assert not report["equal"]
    rows = {row["number"]: row for row in report["rows"]}
    assert {n for n, row in rows.items() if row["error"]} == {7, 8, 9, 12}
    assert rows[9]["error"] == "KeyError: 'not in this torch'"
    assert rows[9]["torch"] == rows[9]["gradkit"] == []
    status, out = run_doctor(capsys, "--device", str(device))
    assert status == 1
    assert "KeyError" in out
    assert f"8 of 12 confusions gave the expected values, on {device}" in out


def test_a_mismatch_shows_what_was_expected(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tensor, "retain_grad", lambda self: None)
    status, out = run_doctor(capsys, "--device", str(device))
    assert status == 1
    assert "h.grad, over both branches: None (expected: [5, 9])" in out
    assert out.count("MISMATCH: torch\n") == 3


@pytest.mark.parametrize("name", ["meta", "cuda:99", "nowhere"])
def test_a_device_that_is_not_here_is_misuse(
    device: torch.device, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--device", "cpu", name])
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    devices = " or ".join(str(one) for one in available_devices())
    said = f"error: argument --device: {name} is not available, use {devices}"
    assert err.splitlines()[-1] == f"python -m gradkit: {said}"


# --- how it tells


CHECK = {"what": str, "equal": bool}
ROW = {"device": str, "number": int, "title": str, "torch": list, "gradkit": list, "equal": bool}


def test_the_json(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run_doctor(capsys, "--json", "--device", str(device))
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert status == 0
    assert list(report) == ["versions", "devices", "extras", "rows", "equal"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["gradkit"] == gradkit.__version__
    assert list(report["versions"]) == ["gradkit", "torch", "optree", "python", "system"]
    assert list(report["devices"]) == [str(device)]
    assert report["equal"] is True
    assert [row["number"] for row in report["rows"]] == list(range(1, 13))
    for row in report["rows"]:
        assert row.keys() == ROW.keys() | {"error"}
        assert all(type(row[key]) is kind for key, kind in ROW.items())
        assert row["error"] is None
        assert row["torch"]
        assert row["gradkit"]
        for one in (*row["torch"], *row["gradkit"]):
            assert one.keys() == CHECK.keys() | {"got", "expected"}
            assert all(type(one[key]) is kind for key, kind in CHECK.items())
            assert one["got"] == one["expected"]


def test_extras_are_those_of_the_package(device: torch.device) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        theirs = tomllib.load(file)["project"]["optional-dependencies"]
    # What is for those who work on gradkit, or for scripts of its clone, is none of the report.
    others = {"accelerate", "bench", "docs", "lightning", "release", "test", "transformers"}
    users = {k: v for k, v in theirs.items() if k not in others}
    names = {k: tuple(re.match(r"[\w-]+", package)[0] for package in v) for k, v in users.items()}
    assert {k: v for k, v in EXTRAS.items() if k in names} == names
    assert set(EXTRAS) == set(names)


def test_a_missing_extra_is_said_to_be(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(EXTRAS, "plot", ("no-such-package",))
    assert doctor_report([]).extras["plot"] == {"no-such-package": None}
    _, out = run_doctor(capsys, "--device", str(device))
    assert "plot: no-such-package missing" in out


@pytest.mark.parametrize(
    ("arguments", "tool", "module"),
    [
        (["migrate", "train.py"], "migrate", "gradkit_migrate.command"),
        ([], "doctor", "gradkit_doctor.__main__"),
        (["--json"], "doctor", "gradkit_doctor.__main__"),
    ],
)
def test_a_command_that_is_not_installed_says_how_to_get_it(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    tool: str,
    module: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"gradkit-{tool} is not installed: pip install ./tools/{tool}" in err
    assert (ROOT / "tools" / tool / "pyproject.toml").exists()


def test_the_text(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run_doctor(capsys, "--device", str(device))
    assert status == 0
    assert out.isascii()
    lines = out.splitlines()
    for number, confusion in enumerate(CONFUSIONS, start=1):
        assert f"{number:3}. {confusion['title']}" in lines
    assert sum(line.strip() == "as expected" for line in lines) == 12
    assert "       gradkit  safe_retain, for the value at the call: [8, 8]" in lines


def test_values_are_shown_and_compared_as_they_are(device: torch.device) -> None:
    half = torch.tensor([0.5, float("nan")], device=device)
    assert json_value({"a": half, 1: (None, True)}) == {"a": [0.5, "nan"], "1": [None, True]}
    assert text(json_value([half, None, {"k": 1e-9}])) == "[[0.5, nan], None, k: 1e-09]"
    ones = torch.ones(2, device=device)
    for other in (ones.double(), ones[:1], -ones, None, [1.0, 1.0], [ones, ones]):
        assert not check("", ones, other).equal
        assert not check("", [ones], [other]).equal
        assert not check("", {"a": ones}, {"a": other}).equal
    assert not check("", {"a": ones}, {"b": ones}).equal
    assert not check("", True, 1).equal
    assert check("", {"a": [ones, None]}, {"a": [ones.clone(), None]}).equal
    moving = ones.clone()
    before = check("", moving, ones)
    moving.zero_()
    assert before.got == [1.0, 1.0]


def test_an_error_is_told_by_its_class_and_its_words(device: torch.device) -> None:
    def fail() -> None:
        raise ValueError("x" * 500 + "\nnot this")

    assert error_of(fail, "xxx") == "ValueError: xxx"
    assert len(error_of(fail, "other words")) < 200
    assert error_of(lambda: None, "any") == "no error"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.processes
@pytest.mark.parametrize("module", ["gradkit", "gradkit_doctor"])
def test_it_runs_as_a_module(device: torch.device, module: str) -> None:
    done = run("-m", module, "--json", "--device", str(device))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["equal"] is True


def test_help(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert "exit status: 0 if everything is as expected, 1 if not, 2 if misused" in out
    assert "python -m gradkit doctor" not in out
    assert "The doctor" not in out
