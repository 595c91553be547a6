"""What torch.compile makes of each call of gradkit.func: the table of docs/compile.md, from a run.

`python -m tests.func.compiled_table` prints it; `test_compiled_table.py` compares the page with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradkit
from gradkit import func, meta
from gradkit._core import pytree

Fn = Callable[[Tensor], Tensor]
BACKENDS = ("eager", "aot_eager")
D = torch.float64
RIGHT, REFUSED, CUT = "compiles", "refused", "torch refuses"


def _point() -> Tensor:
    return torch.tensor([0.3, 0.5, 0.9], dtype=D)


def _unrolled(fn: Fn, x: Tensor) -> Any:
    loss = lambda w, batch: fn(w * batch)  # noqa: E731
    return meta.unroll(loss, x, [torch.ones_like(x)] * 2, meta.sgd(lr=0.1)).params


def _mean_over_tasks(fn: Fn, x: Tensor) -> Any:
    return meta.mean_value_and_grads(lambda w, task: fn(w * task), x, torch.stack([x, x + 1]))


def _from_torch(fn: Fn, x: Tensor) -> Any:
    return _sgd.step([x], [fn(x) * x], _sgd.init([x]))[0]


_sgd = meta.from_torch(torch.optim.SGD, lr=0.1)
_net = nn.Linear(3, 1, dtype=D)
_call, _params, _buffers = func.make_functional(_net)
_weights = {name: torch.ones_like(p) for name, p in _params.items()}


def _of_a_module(fn: Fn, x: Tensor) -> Any:
    return func.value_and_grads(lambda p: fn(_call(p, _buffers, x)[0].expand(3)))(_weights)


CALLS: dict[str, Callable[[Fn, Tensor], Any]] = {
    "`value_and_grads`": lambda fn, x: func.value_and_grads(fn)(x),
    "`value_and_grads`, nested": lambda fn, x: func.value_and_grads(
        lambda x: func.value_and_grads(fn)(x)[1].square().sum()
    )(x),
    "`per_loss_grads`": lambda fn, x: func.per_loss_grads(lambda x: [fn(x), fn(2 * x)])(x),
    "`per_sample_grads`": lambda fn, x: func.per_sample_grads(lambda w, s: fn(w * s))(
        x, torch.stack([x, x + 1])
    ),
    "`hvp`": lambda fn, x: func.hvp(fn, x, x.cos()),
    '`hvp`, `mode="reverse-over-reverse"`': lambda fn, x: func.hvp(
        fn, x, x.cos(), mode="reverse-over-reverse"
    ),
    "`jvp`": lambda fn, x: func.jvp(fn, x, x.cos()),
    "`vjp`": lambda fn, x: func.vjp(fn, x)[1](torch.ones((), dtype=D)),
    "`linearize`": lambda fn, x: func.linearize(fn, x)[1](x.cos()),
    "`ggn_vp`": lambda fn, x: func.ggn_vp(lambda x: x * fn(x), lambda y: y.square().sum(), x, x),
    "`make_functional`, made outside": _of_a_module,
    '`unused` other than `"zeros"`': lambda fn, x: func.value_and_grads(fn, unused="none")(x),
    "`check_grads`": lambda fn, x: func.check_grads(fn, x),
    "`meta.unroll`": _unrolled,
    "`meta.mean_value_and_grads`": _mean_over_tasks,
    "`meta.from_torch`, made outside": _from_torch,
}
_WEIGHT = torch.tensor([0.5, 1.0, 1.5], dtype=D)
torch.manual_seed(0)
_RNN = nn.LSTM(3, 2, dtype=D)
OPERATIONS: dict[str, Fn] = {
    "`mse_loss`, `huber_loss`, `soft_margin_loss`": lambda x: (
        functional.mse_loss(x, x.detach() + 1)
        + functional.huber_loss(x, 3 * x.detach())
        + functional.soft_margin_loss(x, x.detach().sign())
    ),
    "`layer_norm`, `group_norm` with weights": lambda x: _normed(x).sin().sum(),
    "`batch_norm` in train mode": lambda x: (
        functional
        .batch_norm(torch.stack([x, x.sin()]), None, None, _WEIGHT, _WEIGHT, True)
        .sin()
        .sum()
    ),
    "`torch.cond`, `scan`, `while_loop`": lambda x: torch.cond(
        x.sum() > 0, lambda x: x.sin().sum(), lambda x: x.cos().sum(), (x,)
    ),
    "a checkpoint of torch's": lambda x: torch.utils.checkpoint.checkpoint(
        lambda x: x.sin().sum(), x, use_reentrant=False
    ),
    "a write on an argument": lambda x: x.mul_(2).sum(),
    "`nn.LSTM`, `nn.GRU`": lambda x: _RNN(x[None])[0].sin().sum(),
    "Bessel functions": lambda x: torch.special.bessel_j0(x).sum(),
}


def _normed(x: Tensor) -> Tensor:
    both = torch.stack([x, x.sin()])
    return functional.layer_norm(both, (3,), _WEIGHT, _WEIGHT) + functional.group_norm(
        both, 1, _WEIGHT, _WEIGHT
    )


# The calls whose cells the table of operations has.
OF_OPERATIONS = ("`value_and_grads`", "`hvp`", "`jvp`", "`per_sample_grads`")


def outcome(call: Callable[[Fn, Tensor], Any], fn: Fn, backend: str) -> str:
    """Return what becomes of a call in one graph; raise if it gives another value than itself."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: call(fn, x), backend=backend, fullgraph=True)
    try:
        got = compiled(_point())
    except gradkit.GradkitError as error:
        return REFUSED if "What to do:" in str(error) else "an error without a way out"
    except torch._dynamo.exc.Unsupported:
        return CUT
    for ours, theirs in zip(*map(_tensors, (got, call(fn, _point()))), strict=True):
        torch.testing.assert_close(ours, theirs)
    return RIGHT


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in pytree.flatten(result)[0] if isinstance(x, Tensor)]


def smooth(x: Tensor) -> Tensor:
    """A function of a vector that every call takes."""
    return x.sin().square().sum()


def table_of_calls(names: Any = tuple(CALLS)) -> dict[str, tuple[str, ...]]:
    """Return a cell for each call and backend."""
    return {
        name: tuple(outcome(CALLS[name], smooth, backend) for backend in BACKENDS) for name in names
    }


def table_of_operations(names: Any = tuple(OPERATIONS)) -> dict[str, tuple[str, ...]]:
    """Return a cell for each operation and call."""
    return {
        name: tuple(outcome(CALLS[call], OPERATIONS[name], "eager") for call in OF_OPERATIONS)
        for name in names
    }


def as_text(first: str, columns: tuple[str, ...], rows: dict[str, tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [(first, *columns), ("---",) * (1 + len(columns))]
    lines += [(name, *cells) for name, cells in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    columns = tuple(f"`{backend}`" for backend in BACKENDS)
    print(as_text("call of `gradkit.func`", columns, table_of_calls()))
    print()
    print(as_text("operation in `fn`", OF_OPERATIONS, table_of_operations()))
