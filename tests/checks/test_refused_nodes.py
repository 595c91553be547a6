"""The nodes that are refused are those for which a graph is walked."""

from __future__ import annotations

import pytest
import torch

import gradkit
from gradkit._checks import refused_nodes
from gradkit._core import custom_functions


def test_every_refused_node_is_looked_for(device: torch.device) -> None:
    """A graph is not walked as long as no class of `REFUSED` has instances."""
    assert refused_nodes._REASONS.keys() == custom_functions.REFUSED


@pytest.mark.parametrize("name", sorted(custom_functions.REFUSED))
def test_a_refused_node_raises_unless_allowed(device: torch.device, name: str) -> None:
    kinds = [type(name, (), {}), type("AddBackward0", (), {})]
    with pytest.raises(gradkit.UnsupportedGraphError, match=r"^losses\['a'\]: expected"):
        refused_nodes.refuse_nodes(kinds, "losses['a']")
    refused_nodes.refuse_nodes(kinds, "losses['a']", allowed=(name,))
    assert refused_nodes.refused_nodes(kinds[1:]) == []
