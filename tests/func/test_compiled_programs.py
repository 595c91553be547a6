"""A compiled call gives what the uncompiled one does, or gradkit's error: special operations, and
random programs."""

from __future__ import annotations

from random import Random

import pytest
import torch

import gradkit
from tests.func import compiled_programs as programs
from tests.func.compiled_programs import BACKENDS, CALLS, Program
from tests.helpers import others_slow

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),
]
_OPERATIONS = """
    block_diag cdist cholesky cholesky_inverse cumprod i0 lu_solve masked_select
    nn.functional.linear_cross_entropy nn.functional.linear_cross_entropy.chunked
    nn.functional.linear_cross_entropy.chunked_none as_strided_scatter
    nn.functional.cosine_similarity nn.functional.instance_norm nn.functional.layer_norm
    nn.functional.prelu nn.functional.batch_norm nn.functional.binary_cross_entropy
    nn.functional.softshrink nn.functional.hardshrink dist pow float_power roll sinc
    select_scatter triangular_solve svd polar index_fill index_reduce.mean index_reduce.prod
    index_reduce.amin index_reduce.amax xlogy logcumsumexp logdet norm norm.nuc norm.fro
    norm.inf nn.functional.embedding prod nn.functional.gaussian_nll_loss nn.functional.pdist
    scatter_reduce.sum scatter_reduce.prod scatter_reduce.mean scatter_reduce.amin
    scatter_reduce.amax linalg.det linalg.cholesky linalg.cholesky_ex linalg.eig
    linalg.eigvals linalg.eigh linalg.eigvalsh linalg.householder_product linalg.norm
    linalg.matrix_norm linalg.slogdet linalg.vander linalg.vector_norm linalg.lu_solve
    linalg.solve linalg.solve_ex linalg.svd linalg.tensorsolve special.i1 special.xlog1py
    masked.prod masked.cumprod masked.norm
"""
OPERATIONS = _OPERATIONS.split()
_ALL = " ".join(CALLS)
# What torch.compile, too, does not trace inside of a derivative, and what has no forward mode.
REFUSED_COMPILED = {
    "cholesky": "hvp",
    "linalg.slogdet": "hvp jvp",
    "masked.cumprod": _ALL,
    "masked_select": "hvp jvp per_sample_grads",
    "nn.functional.gaussian_nll_loss": _ALL,
    "nn.functional.instance_norm": "per_sample_grads",
    "nn.functional.linear_cross_entropy.chunked": _ALL,
    "nn.functional.linear_cross_entropy.chunked_none": _ALL,
    **dict.fromkeys((*programs.SPECIAL, *programs.POLYNOMIALS), _ALL),
}
# What is refused uncompiled alone: docs/compile.md says so under "Differences".
ALLOWED_COMPILED = {"linalg.eig", "nn.functional.batch_norm", "nn.functional.instance_norm"}


def judge(program: Program, call: str, backend: str, refused: str) -> None:
    """Raise unless the compiled call gives the uncompiled one's tensors, or is refused by name."""
    expected = programs.outcome(program, call, None)
    got = programs.outcome(program, call, backend)
    if isinstance(got, gradkit.GradkitError):
        assert "What to do:" in str(got).split("\n\n", 1)[0]
        assert isinstance(expected, gradkit.GradkitError) or call in refused.split()
    elif isinstance(expected, gradkit.GradkitError):
        assert program.name in ALLOWED_COMPILED
    else:
        for one, other in zip(got, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*OPERATIONS, *programs.SPECIAL, *programs.POLYNOMIALS])
def test_special_operations(device: torch.device, name: str, backend: str) -> None:
    program = programs.operation(name, device)
    for call in CALLS:
        judge(program, call, backend, REFUSED_COMPILED.get(name, ""))


@pytest.mark.slow
def test_all_special_operations_are_tried(device: torch.device) -> None:
    here = set(programs.special(device))
    assert here <= set(OPERATIONS) or torch.__version__.split("+")[0] != "2.13.0"
    assert {"linalg.eigh", "cdist", "nn.functional.layer_norm"} <= here


@pytest.mark.parametrize("seed", others_slow(range(100), range(20)))
def test_random_programs(device: torch.device, seed: int) -> None:
    program, call = programs.drawn(seed, device)
    backend = Random(seed).choice(BACKENDS)
    # torch.compile makes no sparse tensors, and no modules, in what it traces.
    is_traced = not any(part in program.name for part in ("sparse", "weight_norm"))
    judge(program, call, backend, "" if is_traced else _ALL)
