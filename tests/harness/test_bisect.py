"""Bisecting names the op that heals, and says so when none does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.bisect import blame, suspects
from harness.check import CheckContext
from harness.operations import open_, step, to_json
from optimized import seams


def broken(old):
    def gate(stream, *arguments, **constants):
        old(stream, *arguments, **constants)
        stream.mul_(1.25)

    return gate


def context(toy, op: str | None) -> CheckContext:
    def build(**options):
        engine = toy.engine_factory(**options)
        if op is not None:
            table = engine.model.ops
            table.replace(op, broken(table[op]))
            table.replace(
                "embed", lambda *a, _old=table["embed"], **k: _old(*a, **k)
            )  # another form, but a right one
        return engine

    return replace(toy, engine_factory=build, _shared={})


def finding(ctx: CheckContext):
    tokens = ctx.tokens(20)
    operations = to_json([open_("a", 20), step(("a", tokens))])
    place = {"sequence": "a", "position": 19, "layer": 1, "tap": "x"}
    return ctx.finding("reference_limits", "REF", "off", operations=operations, **place)


def test_the_op_that_heals_is_named(toy):
    ctx = context(toy, "engram_gate")
    assert sorted(suspects(ctx.engine_factory())) == ["embed", "engram_gate"]
    assert blame(finding(ctx), ctx).details["healed by the plain form of"] == ["engram_gate"]


def test_an_engine_of_plain_ops_has_no_suspects(toy):
    assert suspects(toy.engine()) == []
    assert "healed by the plain form of" not in blame(finding(toy), toy).details


def test_a_fault_outside_the_ops_is_said_to_be_there(toy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seams, "visible_count", lambda position, ratio: position // ratio)
    ctx = context(toy, None)

    def build(**options):
        engine = toy.engine_factory(**options)
        engine.model.ops.replace("embed", lambda *a, _old=engine.model.ops["embed"], **k: _old(*a, **k))
        return engine

    said = blame(finding(ctx), replace(ctx, engine_factory=build)).details["healed by the plain form of"]
    assert "outside" in said
