"""The tests that an emulated accelerator cannot run, each with the reason.

Besides these, a test is skipped as soon as it runs an operator that has no kernel for the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest

from tests.accelerator.emulation import KIND

_ATTENTION = "there are no kernels of fused attention"
_COLLECTIVES = "there are no collectives on a device"
_CTC = "there is no kernel of ctc_loss"
_GRAPHS = "there are no graphs of a stream"
_ROUNDING = "torch has another kernel, of other precision, for CUDA"
_STRIDES = "torch.compile expects the strides of convolutions on CUDA"
_UNWRITTEN = "unwritten memory is not filled under deterministic algorithms"
_NUMBER = "the number of a device is not checked"
_NESTED = "strided nested tensors end the process"

# By file in tests/, and by a pattern of the test's name.
UNSUPPORTED: dict[str, dict[str, str]] = {
    "autograd/test_formula_double_backward.py": {
        "test_the_second_derivative_of_fused_attention*": _ATTENTION,
        "test_wherever_gradkit_runs_the_forward_pass*": _ATTENTION,
        "test_where_saved_tensors_have_hooks*": _ATTENTION,
    },
    "checks/test_differentiable_formulas.py": {
        "test_a_formula_of_a_node_is_its_operation*": _ATTENTION,
        "test_a_formula_is_its_operation*ctc_loss*": _CTC,
        "test_a_formula_is_its_operation*linear_cross_entropy-torch.bfloat16*": _ROUNDING,
    },
    "checks/test_higher_derivatives.py": {
        "test_a_hook_on_the_node_is_in_no_formula*": _ATTENTION,
        "test_torch_does_not_have_it*scaled_dot_product_attention*": _ATTENTION,
    },
    "cuda/test_nccl.py": {"*": _COLLECTIVES},
    "cuda/test_streams.py": {
        "test_a_step_is_captured*": _GRAPHS,
        "test_gradients_are_captured*": _GRAPHS,
    },
    "doctor/test_doctor.py": {"test_a_device_that_is_not_here*cuda:99*": _NUMBER},
    "dotgrad/test_dotgrad.py": {
        "test_the_grad_of_a_strided_nested_parameter*": _NESTED,
        "test_strided_nested_parameters_are_refused*": _NESTED,
    },
    "eager/test_nested.py": {"*strided*": _NESTED},
    "func/test_compile.py": {"test_a_model_is_one_graph*conv*": _STRIDES},
    "silently_wrong/test_rows.py": {"*noise_of_rrelu_copied_by_a_hook*": _UNWRITTEN},
    "tree/test_tree.py": {"test_strided_nested_tensors_are_no_rows*": _NESTED},
}


def mark_unsupported(items: Iterable[pytest.Item], why_not: str | None) -> None:
    """Skip the tests of the table where a device is emulated, and all if it cannot be."""
    for item in items if KIND else ():
        reason = why_not or _reason(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"no emulated {KIND}: {reason}"))


def missing_kernel(error: BaseException | None) -> str | None:
    """Return which kernel was missing, if that is what an error, or its cause, says."""
    while error is not None:
        if KIND and (found := re.search(r"Could not run '(\S+)' with arguments", str(error))):
            return f"no emulated {KIND}: there is no kernel of {found[1]}"
        error = error.__cause__ or error.__context__
    return None


def _reason(item: pytest.Item) -> str | None:
    file, _, name = item.nodeid.removeprefix("tests/").partition("::")
    tests = UNSUPPORTED.get(file, {})
    return next((why for pattern, why in tests.items() if fnmatchcase(name, pattern)), None)
