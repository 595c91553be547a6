"""The nodes that are refused are those for which a graph is walked."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gradkit
from gradkit._checks import eager_graph
from gradkit._core import user_code
from tests.helpers import unchanged


def test_every_refused_node_is_looked_for(device: torch.device) -> None:
    """A graph is not walked as long as no class of `REFUSED` has instances."""
    assert eager_graph._REASONS.keys() == user_code.REFUSED


@pytest.mark.parametrize("name", sorted(user_code.REFUSED))
def test_a_refused_node_raises_unless_allowed(device: torch.device, name: str) -> None:
    kinds = [type(name, (), {}), type("AddBackward0", (), {})]
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^losses\['a'\]: expected"):
        eager_graph.refuse_nodes(kinds, "losses['a']")
    eager_graph.refuse_nodes(kinds, "losses['a']", allowed=(name,))
    assert eager_graph.refusal_reasons(kinds[1:]) == []


def test_a_selective_checkpoint_takes_one_pass(device: torch.device) -> None:
    """torch raises in the second one."""
    w = torch.eye(3, device=device, requires_grad=True)
    keep_products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def losses() -> list[Tensor]:
        def run(x: Tensor) -> Tensor:
            return (x @ x).sin()

        h = checkpoint(run, w, use_reentrant=False, context_fn=keep_products)
        return [h.sum(), h.square().sum()]

    _, grad = gradkit.value_and_grads(losses(), w)
    assert torch.isfinite(grad).all()
    for call in (gradkit.per_loss_grads, gradkit.per_loss_norms):
        with (
            unchanged(w),
            pytest.raises(gradkit.UnsupportedGraphError, match=r"losses\[0\].*selective"),
        ):
            call(losses(), w)
