"""A program of a user's: it runs, and mypy --strict infers these types. `try_wheel.py` copies it.

Two mistakes are in it, which the types have to find: an `ignore` too many is an error.
"""

from typing import TYPE_CHECKING, assert_type

import torch
from torch import Tensor, nn

import gradkit

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
w = torch.ones(2, requires_grad=True)
tree = {1: w}


def loss() -> Tensor:
    """Return a loss of all params."""
    error: Tensor = model(torch.ones(4, 2) + w)
    return error.square().mean()


def losses() -> dict[bytes, Tensor]:
    """Return two losses."""
    return {b"a": loss(), b"b": loss()}


sums = gradkit.value_and_grads
assert_type(sums(loss(), model), tuple[Tensor, dict[str, Tensor | None]])
assert_type(sums(loss(), model, unused="error"), tuple[Tensor, dict[str, Tensor]])
assert_type(sums(losses(), model), tuple[dict[bytes, Tensor], dict[str, Tensor | None]])
assert_type(sums(loss(), tree), tuple[Tensor, dict[int, Tensor | None]])
assert_type(sums(loss(), w, unused="zeros"), tuple[Tensor, Tensor])
assert_type(sums(loss(), model.parameters()), tuple[Tensor, tuple[Tensor | None, ...]])

each = gradkit.per_loss_grads
assert_type(each(loss(), model), dict[str, Tensor | None])
assert_type(each(loss(), tree, unused="zeros"), dict[int, Tensor])
assert_type(each(loss(), w), Tensor | None)
assert_type(each(losses(), model), dict[bytes, dict[str, Tensor | None]])
assert_type(each(losses(), tree), dict[bytes, dict[int, Tensor | None]])
assert_type(each(losses(), w, unused="error"), dict[bytes, Tensor])

game = gradkit.simultaneous_grads
assert_type(game({"a": loss()}, {"a": model}), dict[str, dict[str, Tensor | None]])
assert_type(game({"a": loss()}, {"a": w}, unused="zeros"), dict[str, Tensor])

value, grads = gradkit.value_and_grads(loss(), model, weights=2.0, retain_graph=False)
norm = gradkit.step_(optimizer, model, grads, max_norm=1.0)
assert_type(gradkit.minimize_(optimizer, loss()), Tensor)
assert_type(gradkit.__version__, str)

if TYPE_CHECKING:
    gradkit.value_and_grads(loss(), model, unused="zero")  # type: ignore[call-overload]
    gradkit.step_(optimizer, model, grads, max_norm="1")  # type: ignore[arg-type]
