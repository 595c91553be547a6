"""A search for the field's words leads to the page that answers.

Sphinx ranks the pages that have a word in a heading above those that have it in their text, so the
word has to stand in a heading of the page, or at least in its first paragraph.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("device")

DOCS = Path(__file__).resolve().parents[2] / "docs"
ANSWERS = {
    "clip": "moving_a_loop",
    "clip_grad_norm_": "moving_a_loop",
    "DDP": "several_processes",
    "double backward": "quickstart",
    "GradScaler": "moving_a_loop",
    "gradient accumulation": "accumulating",
    "gradient checkpointing": "functions",
    "hessian": "functions",
    "hypergradient": "differentiating_through_training",
    "MAML": "learning_to_learn",
    "PCGrad": "recipes",
    "per-sample gradients": "functions",
    "retain_graph": "questions",
    "unused parameter": "quickstart",
    "zero_grad": "questions",
}


def prominent(page: str) -> str:
    """Return the headings of a page, and the paragraph below its title."""
    text = re.sub(r"(?ms)^```.*?^```$", "", (DOCS / f"{page}.md").read_text(encoding="utf-8"))
    below_title = re.split(r"(?m)^# .*\n+", text, maxsplit=1)[1]
    return "\n".join([*re.findall(r"(?m)^#+ (.*)$", text), below_title.partition("\n\n")[0]])


@pytest.mark.parametrize(("words", "page"), ANSWERS.items(), ids=ANSWERS)
def test_the_page_that_answers_is_found(words: str, page: str) -> None:
    assert words.casefold() in prominent(page).casefold()
