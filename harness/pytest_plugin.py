"""pytest plugin: `pytest --dsv41-engine package.module:factory` runs the conformance suite on that engine.

Each check is an item of its own, so findings are ordinary failures with their repro command, in the terminal and in
JUnit XML; a declined check is a skip. Nothing happens, and nothing of this package is imported, without the option.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.check import Check, CheckContext

OPTION = "--dsv41-engine"
NODE = "dsv41"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dsv41", "conformance of an engine of the DeepSeek-V4.1 layer")
    group.addoption(
        OPTION, metavar="NAME", help="reference, optimized, package.module:factory or remote:COMMAND"
    )
    group.addoption(
        "--dsv41-config", default="toy", metavar="NAME", help="toy, flash or a config.json (default: toy)"
    )
    group.addoption(
        "--dsv41-seed", type=int, default=0, metavar="N", help="seed of weights and tokens (default: 0)"
    )
    group.addoption("--dsv41-checks", metavar="A,B", help="these checks alone (default: all)")
    group.addoption(
        "--dsv41-budget", default="10s", metavar="TIME", help="of the random search (default: 10s)"
    )
    group.addoption(
        "--dsv41-out", default="dsv41-findings", metavar="FOLDER", help="where finding files are written"
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add one item a check, behind the tests of the repository itself."""
    if config.getoption(OPTION):
        items.extend(Conformance.from_parent(session, name=NODE, nodeid=NODE).collect())


class Conformance(pytest.Collector):
    """All checks on one engine; they share the context, so an engine is built once."""

    def collect(self) -> Iterator[CheckItem]:
        from harness.check import select
        from harness.commands import seconds
        from harness.context import make_context

        given = self.config.getoption
        names = given("--dsv41-checks")
        checks = select(names.split(",") if names else None)
        context = make_context(
            given(OPTION),
            given("--dsv41-config"),
            seed=given("--dsv41-seed"),
            budget=seconds(given("--dsv41-budget")),
        )
        for check in checks:
            yield CheckItem.from_parent(self, name=check.name, check=check, context=context)


class CheckItem(pytest.Item):
    def __init__(self, *, check: Check, context: CheckContext, **more: Any) -> None:
        super().__init__(**more)
        self.check, self.context = check, context

    def runtest(self) -> None:
        from harness.check import run_check
        from harness.localize import localize
        from harness.outcome import by_root

        result = run_check(self.check, self.context)
        if result.declined:
            pytest.skip(f"declined: {', '.join(sorted(result.declined))}")
        findings = by_root(localize(finding, self.context) for finding in result.findings)
        if findings:
            out = Path(self.config.getoption("--dsv41-out"))
            raise FindingsError([finding.text(finding.write(out)) for finding in findings])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, FindingsError):
            return "\n\n".join(excinfo.value.texts)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{NODE}::{self.check.name}: {self.check.proves}"


class FindingsError(AssertionError):
    """The findings of one check."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__("\n".join(texts))
        self.texts = texts
