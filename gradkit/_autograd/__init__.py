"""Running passes through the graph."""
