"""`explain`: which loss reaches which parameter, and why not."""
