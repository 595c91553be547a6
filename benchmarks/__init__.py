"""One harness, one table: what gradkit costs, against what one would write without it."""
