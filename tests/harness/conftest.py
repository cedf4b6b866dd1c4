"""One context a test run: the toy model, seed 0; engines are built once."""

from __future__ import annotations

import pytest

from harness.check import CheckContext
from harness.context import make_context


@pytest.fixture(scope="session")
def toy() -> CheckContext:
    """The optimised engine as the engine under test."""
    return make_context("optimized", "toy", budget=2.0)


@pytest.fixture(scope="session")
def tokens(toy: CheckContext) -> tuple[int, ...]:
    return toy.tokens(32)
