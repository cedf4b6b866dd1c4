"""Checks: found by folder, held to their paths, declined and never passed, and unable to crash the harness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.check import Check, CheckContext, CheckResult, discover, run_check, select
from harness.findings import DETECTORS
from reference.errors import ConfigError


def passing(ctx: CheckContext) -> CheckResult:
    result = CheckResult()
    result.took("window wrapped", 3)
    return result


def test_the_registry_finds_every_check_and_each_says_what_it_proves():
    checks = discover()
    assert {"decode_prefill", "chunks", "rollback", "snapshot", "machine", "reference_limits"} <= set(checks)
    for check in checks.values():
        assert len(check.proves) > 20 and check.detectors, check.name
        assert set(check.detectors) <= set(DETECTORS), check.name
        assert callable(check.required_paths) or check.required_paths, (
            f"{check.name} can pass without going anywhere"
        )


def test_a_required_path_never_taken_is_a_finding(toy):
    assert run_check(Check("c", "p", passing, required_paths=("window wrapped",)), toy).status == "passed"
    result = run_check(Check("c", "p", passing, required_paths=lambda config: ["top-k cut"]), toy)
    assert result.status == "failed"
    assert [(f.detector, "top-k cut" in f.message) for f in result.findings] == [("PATH", True)]


class Declining:
    def declines(self):
        return frozenset({"rollback"})


def test_a_declined_capability_is_neither_run_nor_passed(toy):
    def never(ctx):
        raise AssertionError("a declined check must not run")

    ctx = replace(toy, engine_factory=lambda **_: Declining(), _shared={})
    result = run_check(Check("c", "p", never, needs=frozenset({"rollback"}), required_paths=("x",)), ctx)
    assert (result.status, result.declined) == ("declined", {"rollback"})


def test_an_exception_is_a_finding_that_says_where(toy):
    def explode(ctx):
        raise ZeroDivisionError("boom")

    ctx = replace(toy, _shared=dict(toy._shared))
    result = run_check(Check("c", "p", explode), ctx)
    finding = result.findings[0]
    assert (finding.detector, "boom" in finding.message) == ("CRASH", True)
    assert "test_check.py" in finding.details["raised at"]
    assert not ctx._shared, "engines of unknown state are dropped"


def test_unknown_names_are_wrong_use():
    with pytest.raises(ConfigError, match="nonsense"):
        select(["chunks", "nonsense"])
    with pytest.raises(ConfigError, match="flying"):
        Check("c", "p", passing, needs=frozenset({"flying"}))


def test_draws_of_one_check_dont_move_anothers(toy):
    assert toy.tokens(5, "a") == toy.tokens(9, "a")[:5] != toy.tokens(5, "b")
