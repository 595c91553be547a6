"""How many of gradkit's own functions, and files, run in a call: what its reader has to open.

Counted with the calls of `benchmarks.counting`, in a process that has seen neither a hook nor a
custom Function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import gradkit
from gradkit import func, meta

_PACKAGE = str(Path(gradkit.__file__).parent)


def counts() -> dict[str, int]:
    """Return the numbers of functions, and of files, by call."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call, params, buffers = func.make_functional(model)

    def losses() -> dict[str, Tensor]:
        out = model(x)
        return {"a": out.square().mean(), "b": out.abs().mean()}

    def of_params(p: Any, *_: Any) -> Tensor:
        loss: Tensor = call(p, buffers, x)[0].square().mean()
        return loss

    def step() -> None:
        grads = gradkit.value_and_grads(losses()["a"], model)[1]
        gradkit.step_(optimizer, model, grads)

    def unrolled() -> None:
        adapted = meta.unroll(of_params, params, [x, x], meta.sgd(lr=0.1))
        gradkit.value_and_grads(adapted.values.sum(), params)

    subjects: dict[str, Callable[[], object]] = {
        "value_and_grads": lambda: gradkit.value_and_grads(losses()["a"], model),
        "value_and_grads, two losses": lambda: gradkit.value_and_grads(losses(), model),
        "per_loss_grads, two losses": lambda: gradkit.per_loss_grads(losses(), model),
        "a training step": step,
        "func.value_and_grads": lambda: func.value_and_grads(of_params)(params),
        "unroll and its outer gradient": unrolled,
        "gram": lambda: gradkit.gram(losses(), model),
    }
    counted: dict[str, int] = {}
    for name, run in subjects.items():
        codes = own_code(run)
        counted[f"functions that run in {name}"] = len(codes)
        counted[f"files that run in {name}"] = len({code.co_filename for code in codes})
    return counted


def own_code(run: Callable[[], object]) -> set[CodeType]:
    """Return the code of gradkit's functions that run in a call which has been made before."""
    for _ in range(2):  # what is cached, is
        run()
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # Lambdas and comprehensions are part of the functions that they stand in.
        if code.co_filename.startswith(_PACKAGE) and not code.co_name.startswith("<"):
            codes.add(code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return codes
