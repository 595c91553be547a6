"""What every call starts from: trees, params and losses, the graph, who owns a result."""
