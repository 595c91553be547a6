"""The nodes that are refused are those for which a graph is walked."""

from __future__ import annotations

import pytest
import torch

import gradkit
from gradkit._checks import eager_graph
from gradkit._core import user_code


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
