"""A search for the field's words leads to the page that answers.

Sphinx ranks the pages that have a word in a heading above those that have it in their text. So it
has to stand in a heading of the page that answers, or on no other page.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("device")

DOCS = Path(__file__).resolve().parents[2] / "docs"
ANSWERS = {
    "AMP": "forces_and_curvature",
    "bf16": "forces_and_curvature",
    "clip": "moving_a_loop",
    "clip_grad_norm_": "moving_a_loop",
    "DDP": "several_processes",
    "double backward": "quickstart",
    "EWC": "forces_and_curvature",
    "forces": "forces_and_curvature",
    "freeze": "questions",
    "GradScaler": "moving_a_loop",
    "gradient accumulation": "accumulating",
    "gradient checkpointing": "functions",
    "hessian": "functions",
    "hypergradient": "differentiating_through_training",
    "MAML": "learning_to_learn",
    "PCGrad": "recipes",
    "per-sample gradients": "functions",
    "per sample gradients": "questions",
    "retain_graph": "questions",
    "TensorBoard": "forces_and_curvature",
    "uncertainty weighting": "recipes",
    "unused parameter": "quickstart",
    "zero_grad": "questions",
}


PAGES = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}


STEMMER = pytest.importorskip("snowballstemmer").stemmer("porter")


@cache
def terms(text: str) -> str:
    """Return the words of a text as the search takes them, by their stems, apart by spaces."""
    return f" {' '.join(STEMMER.stemWords(re.findall(r'[a-z0-9_]+', text.casefold())))} "


def headings(page: str) -> str:
    """Return the headings of a page, without the comments in its code."""
    return "\n".join(re.findall(r"(?m)^#+ .*$", re.sub(r"(?ms)^```.*?^```$", "", PAGES[page])))


@pytest.mark.parametrize(("words", "page"), ANSWERS.items(), ids=ANSWERS)
def test_the_page_that_answers_is_found(words: str, page: str) -> None:
    having = [name for name, text in PAGES.items() if terms(words) in terms(text)]
    assert terms(words) in terms(headings(page)) or having == [page]


@pytest.mark.parametrize("words", sorted(ANSWERS.keys() - {"hessian"}))  # which four pages answer
def test_few_other_pages_have_the_words_in_a_heading(words: str) -> None:
    """The answer is among the first three hits."""
    apart = [name for name in PAGES if name.startswith(("api_", "errors_"))]
    having = [name for name in PAGES if terms(words) in terms(headings(name))]
    assert len([name for name in having if name not in apart]) <= 3
