"""Where torch, or a library beside it, is silently wrong: the rows of docs/silently_wrong.md.

Each file is a section of the page. `python -m tests.silently_wrong` prints the tables.
"""

from __future__ import annotations

from tests.silently_wrong import (
    batches,
    derivatives,
    engine,
    modules,
    operations,
    peers,
    processes,
    retained,
    special_points,
    training,
    unseen,
)
from tests.silently_wrong._row import Row

SECTIONS: dict[str, list[Row]] = {
    "One pass of the engine": engine.ROWS,
    "Tensors that are changed in place": retained.ROWS,
    "Batches": batches.ROWS,
    "Forward mode and higher derivatives": derivatives.ROWS + operations.ROWS + special_points.ROWS,
    "Modules and checkpoints": modules.ROWS,
    "Differentiating through torch.optim": training.ROWS,
    "Libraries beside torch": peers.ROWS,
    "Several processes": processes.ROWS,
    "What gradkit does not see": unseen.ROWS,
}


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a section's table."""
    found = "Issue" if rows[0].by == "torch" else "With"
    head = f"| Input | {found} | Gives | Right | gradkit |"
    return [head, "|---|---|---|---|---|", *(row.line for row in rows)]
