"""A search for the field's words leads to the page that answers.

Sphinx ranks the pages that have a word in a heading above those that have it in their text. So it
has to stand in a heading of the page that answers, or on no other page.
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


PAGES = {path.stem: path.read_text(encoding="utf-8").casefold() for path in DOCS.glob("*.md")}


def headings(page: str) -> str:
    """Return the headings of a page, without the comments in its code."""
    return "\n".join(re.findall(r"(?m)^#+ .*$", re.sub(r"(?ms)^```.*?^```$", "", PAGES[page])))


@pytest.mark.parametrize(("words", "page"), ANSWERS.items(), ids=ANSWERS)
def test_the_page_that_answers_is_found(words: str, page: str) -> None:
    having = [name for name, text in PAGES.items() if words.casefold() in text]
    assert words.casefold() in headings(page) or having == [page]
