"""Which loss reaches what, how losses conflict, and whether torch's methods agree.

`explain` reads the graph of losses, `conflicts` measures the angles between their gradients, and
`compare` runs one step through `.backward()`, `torch.autograd.grad` and `torch.func`. Each returns
a frozen dataclass that prints as text, in rich and in a notebook, and has `.plot(ax=None)`.
`History` is a record of conflicts over training; `norms` gives the numbers that a logger shows.
"""

from gradkit.report.compare import Comparison, Difference, compare
from gradkit.report.conflicts import Conflicts, History, conflicts
from gradkit.report.explain import Explanation, LossGraph, Part, Verdict, explain
from gradkit.report.norms import GradStats, Norms, norms

__all__ = [
    "Comparison",
    "Conflicts",
    "Difference",
    "Explanation",
    "GradStats",
    "History",
    "LossGraph",
    "Norms",
    "Part",
    "Verdict",
    "compare",
    "conflicts",
    "explain",
    "norms",
]
