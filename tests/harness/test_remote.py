"""Engines in another process: the numpy example is right; each way to break the protocol is its own finding."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest

from harness import wire
from harness.check import CheckContext, run_check, select
from harness.context import make_context
from harness.engine import Run, load_engine
from harness.guard import EngineFault
from harness.lockstep import against_reference, wanted_taps
from harness.observed import observe
from reference.errors import CapacityError, ConfigError, SnapshotError, StateError

EXAMPLE = shlex.join([sys.executable, str(Path(__file__).with_name("example_engine.py"))])
SERVE = "from harness.cli import main; main()"
SERVER = shlex.join([sys.executable, "-c", SERVE, "serve", "optimized"])


def remote(toy: CheckContext, fault: str | None = None, **options):
    command = EXAMPLE if fault is None else f"{EXAMPLE} --fault {fault}"
    return load_engine(f"remote:{command}", toy.config, toy.weights, **options)


def test_the_example_agrees_with_the_reference(toy, tokens):
    engine = remote(toy)
    observed = observe(engine, tokens, (5, 6, 7, 19), taps=wanted_taps(toy.config))
    assert len(observed.taps) > 100
    exact, release = toy.reference(precision="float64"), toy.reference()
    report = against_reference(exact, release, observed, weights=toy.weights)
    assert report.first is None and report.follows_contract
    engine.shutdown()


@pytest.mark.parametrize("check", ["capacity", "leaks", "reference_limits"])
def test_the_example_passes(toy, check):
    ctx = make_context(f"remote:{EXAMPLE}", toy.config, weights=toy.weights, budget=1.0)
    result = run_check(select([check])[0], ctx)
    assert result.status == "passed", [finding.text() for finding in result.findings]


@pytest.mark.parametrize(
    ("fault", "detector", "words"),
    [
        ("crash", "PROTO", ["crash: no answer to step", "status 1", "out of luck"]),
        ("hang", "PROTO", ["hang: no answer to step", "within 0.5 s"]),
        ("late", "PROTO", ["late answer to step", "within 0.5 s"]),
        ("half", "PROTO", ["half message: no answer to step", "after 8 bytes"]),
        ("nonsense", "PROTO", ["nonsense in answer to step", "Traceback"]),
        ("shape", "PROTO", ["wrong shape", "128)", "127)"]),
        ("count", "PROTO", ["wrong count", "rows"]),
        ("dtype", "PROTO", ["wrong dtype", "float32", "float16"]),
        ("nan", "NF", ["non-finite", "element 7", "nan"]),
    ],
)
def test_a_broken_engine_gives_its_own_finding_and_never_hangs(toy, fault, detector, words):
    command = f"{EXAMPLE} --fault {fault}"
    ctx = make_context(
        f"remote:{command}", toy.config, weights=toy.weights, options={"seconds": 0.5}, budget=1.0
    )
    began = time.monotonic()
    result = run_check(select(["machine"])[0], ctx)
    assert time.monotonic() - began < 45
    assert [finding.detector for finding in result.findings] == [detector]
    text = result.findings[0].text()
    for part in words:
        assert part in text, text


def test_another_version_is_refused_at_the_handshake(toy):
    with pytest.raises(EngineFault, match=r"another protocol.*version 1.*99"):
        remote(toy, "version")


def test_options_that_the_engine_does_not_know_are_wrong_use(toy):
    with pytest.raises(ConfigError, match="ring_spare"):
        remote(toy, ring_spare=4)


def test_a_command_that_does_not_exist(toy):
    with pytest.raises(EngineFault, match="can't be started"):
        load_engine("remote:/nowhere/engine", toy.config, toy.weights)


def test_typed_errors_cross_the_pipe_and_change_nothing(toy):
    engine = remote(toy)
    a = engine.open(2)
    with pytest.raises(CapacityError, match="at most 2"):
        engine.step([Run(a, (1, 2, 3), 0)])
    with pytest.raises(StateError):
        engine.step([Run(a, (1,), 1)])
    with pytest.raises(SnapshotError):
        engine.restore(b"rubbish" * 9, 4)
    assert engine.length(a) == 0
    engine.close(a)
    engine.close(a)
    with pytest.raises(StateError):
        engine.length(a)
    engine.shutdown()
    with pytest.raises(EngineFault, match="shut down"):
        engine.open(2)


def test_our_own_engine_behind_the_pipe_gives_its_own_bits(toy, tokens):
    far = load_engine(f"remote:{SERVER}", toy.config, toy.weights)
    assert far.name == "remote optimized" and far.max_rollback == toy.engine().max_rollback
    near, there = (observe(engine, tokens, (9,), taps=("L4.selection",)) for engine in (toy.engine(), far))
    for tap in ("logits", "L4.selection"):
        assert near.taps[tap].equal(there.taps[tap])
    sequence = far.open(8)
    far.step([Run(sequence, tokens[:5], 0)])
    copy = far.restore(far.snapshot(sequence), 9)
    assert far.state_digest(copy) == far.state_digest(sequence) and far.ledger().sequences == 2
    far.shutdown()


def test_frames():
    frame = wire.encode({"id": 1, "verb": "bye"})
    assert wire.frame_length(frame) == len(frame) and wire.decode(frame) == ({"id": 1, "verb": "bye"}, {})
    assert wire.frame_length(frame[:9]) is None
    for nonsense in (b"HTTP/1.1 200", b"DSV1" + b"\xff" * 12):
        with pytest.raises(wire.FrameError):
            wire.frame_length(nonsense)
    with pytest.raises(wire.FrameError, match="no JSON object"):
        wire.decode(wire.PREFIX.pack(b"DSV1", 2, 0) + b"[]")
