"""The plugin for pytest: `pytest --gradkit-parity`, and the fixture `parity`.

Short, as `comparison.py` does the work. pytest imports this file in every project, so only a test
that takes the fixture imports gradkit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradkit_parity.report import ParityReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option without which tests that take the fixture are skipped."""
    text = "run the tests that take the fixture parity, which starts processes"
    parser.getgroup("gradkit").addoption("--gradkit-parity", action="store_true", help=text)


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Callable[..., ParityReport]:
    """Return `gradkit.distributed.parity`, which fails the test where gradients differ."""
    if not request.config.getoption("--gradkit-parity"):
        pytest.skip("needs pytest --gradkit-parity")
    from gradkit_parity import comparison

    def checked(*args: Any, **options: Any) -> ParityReport:
        report = comparison.parity(*args, **options)
        if not report.same:
            pytest.fail(str(report), pytrace=False)
        return report

    return checked
