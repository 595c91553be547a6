"""The public names, their errors' messages, and what `import gradkit` brings along."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import gradkit
from gradkit import errors

NAMES = {
    "value_and_grads", "per_loss_grads", "simultaneous_grads", "vjp", "safe_retain", "combine",
    "checked", "gram", "per_loss_norms", "per_sample_norms", "clipped_sum",
    "value_and_reduced_grads", "tree",
    "errors", "dotgrad", "func", "meta", "distributed", "report", "read_grads", "write_grads_",
    "add_grads_", "clear_grads_", "backward_", "capture_grads", "step_", "minimize_",
    "Accumulator", *errors.__all__,
}  # fmt: skip
ERRORS = {
    "LeafTypeError": TypeError,
    "OptionError": ValueError,
    "StructureError": ValueError,
    "NotScalarLossError": ValueError,
    "DetachedLossError": RuntimeError,
    "UnreachedParamError": RuntimeError,
    "FreedGraphError": RuntimeError,
    "GradientCheckError": AssertionError,
    "UnsupportedGraphError": RuntimeError,
    "UnsupportedOptimizerError": TypeError,
    "CollectiveError": RuntimeError,
}
TREE = {
    "add", "sub", "scale", "weighted_sum", "dot", "global_norm", "cosine", "clip_by_global_norm",
    "map", "stack", "unstack", "allclose", "to_matrix", "gram", "add_", "lerp_", "zeros_like",
    "randn_like", "cg", "gmres", "neumann",
}  # fmt: skip
META = {
    "Adapted", "Optimizer", "adam", "adamw", "from_torch", "implicit", "rmsprop", "sgd", "unroll",
    "mean_value_and_grads", "adafactor", "lion", "muon", "schedule_free_adamw",
}  # fmt: skip
DIST = {
    "all_reduce", "gram", "make_functional", "per_loss_grads", "simultaneous_grads",
    "value_and_grads",
}  # fmt: skip
PARITY = {"BatchPart", "Layout", "ParityDifference", "ParityReport", "parity"}
if find_spec("gradkit_parity"):  # a package of its own
    DIST |= PARITY
FUNC = {
    "value_and_grads", "per_loss_grads", "per_sample_grads", "hvp", "make_functional", "vjp", "jvp",
    "ggn_vp", "check_grads", "staged_value_and_grads", "linearize", "checkpoint",
}  # fmt: skip
REPORT = {
    "Comparison", "Conflicts", "Difference", "Explanation", "GradStats", "History", "LossGraph",
    "Norms", "Part", "Verdict", "compare", "conflicts", "explain", "norms",
}  # fmt: skip


def test_all_is_what_there_is(device: torch.device) -> None:
    assert set(gradkit.__all__) == NAMES
    shown = {name: getattr(gradkit, name) for name in dir(gradkit) if not name.startswith("_")}
    public = {name for name, value in shown.items() if name in NAMES or not inspect.ismodule(value)}
    assert public == NAMES
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        getattr(gradkit, "missing")  # noqa: B009
    assert set(gradkit.tree.__all__) == TREE
    assert set(gradkit.func.__all__) == FUNC
    assert set(gradkit.meta.__all__) == META
    assert set(gradkit.distributed.__all__) == DIST
    assert set(gradkit.report.__all__) == REPORT


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_a_gradkit_error_and_a_builtin_one(device: torch.device, name: str) -> None:
    error = getattr(gradkit, name)
    assert getattr(errors, name) is error
    assert issubclass(error, gradkit.GradkitError)
    assert issubclass(error, ERRORS[name])
    assert error.__doc__


def test_the_warning_is_a_user_warning(device: torch.device) -> None:
    assert issubclass(gradkit.GradkitWarning, UserWarning)
    assert not issubclass(gradkit.GradkitWarning, gradkit.GradkitError)


def test_describe(device: torch.device) -> None:
    t = torch.zeros(2, 3, dtype=torch.bfloat16, device=device)
    assert errors.describe(t) == f"a bfloat16 tensor of shape (2, 3) on {t.device}"
    assert errors.describe(1.5) == "the float 1.5"
    assert errors.describe("x" * 100) == "the str"


def test_every_public_function_is_documented(device: torch.device) -> None:
    functions = [getattr(gradkit, n) for n in NAMES if inspect.isfunction(getattr(gradkit, n))]
    functions += [getattr(gradkit.tree, n) for n in TREE]
    functions += [getattr(gradkit.func, n) for n in FUNC]
    functions += [getattr(gradkit.distributed, n) for n in DIST if n.islower()]
    functions += [getattr(gradkit.meta, n) for n in META - {"Adapted", "Optimizer"}]
    functions += [gradkit.report.explain, gradkit.report.conflicts, gradkit.report.compare]
    functions += [gradkit.report.norms]
    for function in functions:
        doc = inspect.getdoc(function)
        assert doc is not None
        sections = ["Example:"]
        sections += ["Args:"] * bool(inspect.signature(function).parameters)
        if function in (gradkit.safe_retain, gradkit.capture_grads, gradkit.checked):
            sections.append("Yields:")
        elif function is gradkit.func.check_grads:
            sections.append("Raises:")
        elif not function.__name__.endswith("_") or function is gradkit.backward_:
            sections.append("Returns:")
        for section in sections:
            assert section in doc, f"{function.__name__} has no {section}"


@pytest.mark.processes
def test_importing_brings_torch_and_optree_and_nothing_else(device: torch.device) -> None:
    code = (
        "import sys, torch, optree; before = set(sys.modules); import gradkit;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['gradkit']"


def test_names_of_a_package_that_is_missing_say_how_to_get_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gradkit_parity", None)
    monkeypatch.setitem(sys.modules, "gradkit_parity.comparison", None)
    said = r"gradkit-parity is not installed: pip install \./tools/parity in a checkout of gradkit"
    for name in PARITY:
        with pytest.raises(gradkit.GradkitError, match=said) as raised:
            getattr(gradkit.distributed, name)
        assert isinstance(raised.value, ImportError)
    with pytest.raises(ImportError, match=said):
        exec("from gradkit.distributed import parity")
    assert not hasattr(gradkit.distributed, "another")


@pytest.mark.processes
def test_meta_opens_gradkit_distributed_where_a_group_is_given(device: torch.device) -> None:
    code = (
        "import sys, gradkit.meta;"
        "print([name for name in sys.modules if name.startswith('gradkit.distributed')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
