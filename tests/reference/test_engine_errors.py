"""Bad input to the reference engine: a typed error that names the field, and every state as it was."""

from __future__ import annotations

import pytest
import torch

from reference.blob import seal, unseal
from reference.config import V41Config
from reference.engine import ReferenceEngine, Run
from reference.errors import CapacityError, InputError, RollbackError, SnapshotError, StateError
from reference.weights import RandomWeights
from tests.reference.strings import feed, tokens


@pytest.fixture
def sequence(release):
    sequence, _ = feed(release, tokens(10), [10])
    yield sequence
    release.close(sequence)


BAD_RUNS = {
    "no run": (lambda s: [], InputError, "runs"),
    "no list": (lambda s: None, InputError, "a sequence of runs"),
    "no Run": (lambda s: [(s, (1,), 10)], InputError, r"runs\[0\].*a Run with sequence"),
    "tokens that are no list": (lambda s: [Run(s, 7, 10)], InputError, r"token_ids.*got int"),
    "no token": (lambda s: [Run(s, (), 10)], InputError, r"runs\[0\].token_ids"),
    "negative position": (lambda s: [Run(s, (1,), -1)], StateError, r"runs\[0\].start"),
    "wrong start": (lambda s: [Run(s, (1,), 11)], StateError, r"expected the sequence's length, 10, got 11"),
    "beyond the capacity": (lambda s: [Run(s, (1,), 10)], CapacityError, "capacity, 10, got 11"),
    "start of another type": (lambda s: [Run(s, (1,), 10.0)], StateError, r"runs\[0\].start"),
    "negative token": (lambda s: [Run(s, (-1,), 10)], InputError, r"token_ids\[0\].*got -1"),
    "token too large": (lambda s: [Run(s, (3, 256), 10)], InputError, r"token_ids\[1\].*got 256"),
    "token of another type": (lambda s: [Run(s, (1.5,), 10)], InputError, "integer"),
    "mask of another length": (lambda s: [Run(s, (1,), 10, (True, False))], InputError, "image_mask"),
    "the same sequence twice": (
        lambda s: [Run(s, (1,), 10), Run(s, (1,), 10)],
        (InputError, CapacityError),
        "runs",
    ),
    "unknown sequence": (lambda s: [Run(999_999, (1,), 0)], StateError, "live sequence"),
    "a handle that cannot be one": (lambda s: [Run([s], (1,), 0)], StateError, "live sequence"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_bad_step_changes_nothing(release, sequence, case):
    runs, error, message = BAD_RUNS[case]
    before = release.state_digest(sequence)
    with pytest.raises(error, match=message):
        release.step(runs(sequence))
    assert release.length(sequence) == 10 and release.state_digest(sequence) == before


def test_a_bad_second_run_leaves_the_first_sequence_alone(release, sequence):
    other = release.open(4)
    with pytest.raises(InputError):
        release.step([Run(other, (1, 2), 0), Run(sequence, (999,), 10)])
    assert release.length(other) == 0


def test_the_same_sequence_twice_with_room(release):
    s = release.open(8)
    with pytest.raises(InputError, match="each sequence once"):
        release.step([Run(s, (1,), 0), Run(s, (2,), 0)])


@pytest.mark.parametrize("capacity", [0, -3, 1025, True, 2.0])
def test_capacity_out_of_range(release, capacity):
    with pytest.raises(CapacityError, match="capacity"):
        release.open(capacity)


@pytest.mark.parametrize("length", [-1, 11, 2.0, True])
def test_rollback_out_of_range(release, sequence, length):
    with pytest.raises(RollbackError, match="length"):
        release.rollback(sequence, length)
    assert release.length(sequence) == 10


def test_a_closed_sequence_is_gone_and_closing_twice_is_fine(release):
    s = release.open(4)
    release.close(s)
    release.close(s)
    for use in (release.length, release.snapshot, release.state_digest, release.branch):
        with pytest.raises(StateError, match="was closed"):
            use(s)


def test_drafting_from_an_empty_sequence(release):
    with pytest.raises(StateError, match="at least one token"):
        release.draft(release.open(4), 1)


def test_equal_states_have_equal_snapshots(release, sequence):
    assert len({release.snapshot(sequence) for _ in range(8)}) == 1


def test_damaged_snapshots(release, sequence):
    blob, live = release.snapshot(sequence), release.ledger().sequences
    for place in (0, 9, len(blob) // 3, len(blob) // 2, len(blob) - 1):
        damaged = bytearray(blob)
        damaged[place] ^= 1
        with pytest.raises(SnapshotError):
            release.restore(bytes(damaged), 64)
    for cut in (0, 7, 100, len(blob) - 1):
        with pytest.raises(SnapshotError):
            release.restore(blob[:cut], 64)
    with pytest.raises(SnapshotError, match="length"):
        release.restore(blob, 9)
    assert release.ledger().sequences == live


@pytest.mark.parametrize("field", ["format", "config", "precision", "length", "last_key_owner", "a tensor"])
def test_a_snapshot_that_lacks_a_field(release, sequence, field):
    tensors, metadata = unseal(release.snapshot(sequence))
    del metadata["checksum"]
    if field == "a tensor":
        del tensors["L4.pending_kv"]
    else:
        del metadata[field]
    with pytest.raises(SnapshotError, match="tensors" if field == "a tensor" else field):
        release.restore(seal(tensors, metadata), 64)


def test_a_snapshot_of_another_model_or_precision(release, float64, toy, sequence):
    blob = release.snapshot(sequence)
    with pytest.raises(SnapshotError, match="precision"):
        float64.restore(blob, 64)
    small = toy.sliced((0, 1, 2, 3))
    with pytest.raises(SnapshotError, match="config"):
        ReferenceEngine(small, RandomWeights(small, 1)).restore(blob, 64)


def test_weights_of_another_configuration(toy_weights):
    with pytest.raises(InputError, match=r"weights\.config"):
        ReferenceEngine(V41Config.toy().sliced((0, 1)), toy_weights)


GIVEN = {
    "decision rows": ({"forced": {"L3.moe_idx": torch.zeros(2, 2, dtype=torch.int64)}}, "3 rows.*got 2 rows"),
    "no decision": ({"forced": {"L3.q": torch.zeros(3, 2)}}, "selection, candidates, moe_idx.*got L3.q"),
    "stream rows": ({"layer_inputs": {3: (torch.zeros(4, 4, 128), torch.zeros(3, 4))}}, "3 rows.*got 4 rows"),
    "mix rows": ({"layer_inputs": {3: (torch.zeros(3, 4, 128), torch.zeros(1, 4))}}, "3 rows.*got 1 rows"),
}


@pytest.mark.parametrize("case", GIVEN)
def test_given_values_of_another_number_of_rows(release, case):
    options, message = GIVEN[case]
    s = release.open(8)
    with pytest.raises(InputError, match=message):
        release.step([Run(s, (1, 2, 3), 0)], **options)
    assert release.length(s) == 0


def test_a_step_that_breaks_half_way_leaves_every_sequence_as_it_was(toy, toy_weights, monkeypatch):
    engine = ReferenceEngine(toy, toy_weights, release_stale_index_k=True)
    first, second = engine.open(16), engine.open(16)
    engine.step([Run(second, tokens(5), 0)])

    def state() -> list:
        owners = [engine.history(s).last_key_owner for s in (first, second)]
        return [*owners, *(engine.state_digest(s) for s in (first, second))]

    before = state()
    forward, calls = engine.model.forward, []

    def second_breaks(history, *args, **options):
        calls.append(history)
        if len(calls) == 2:
            forward(history, *args, **options)
            raise MemoryError
        return forward(history, *args, **options)

    monkeypatch.setattr(engine.model, "forward", second_breaks)
    with pytest.raises(MemoryError):
        engine.step([Run(first, (1, 2), 0), Run(second, (3,), 5)])
    assert len(calls) == 2 and state() == before
    assert (engine.length(first), engine.length(second)) == (0, 5)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("L4.window", lambda t: t[:, :-1].contiguous(), "got torch.float32 .10, 63"),
        ("L4.window", lambda t: t.double(), "got torch.float64"),
        ("L4.window", lambda t: t[:-1], "got torch.float32 .9, 64"),
        ("last_key_owner", "3", "one of .2, 4, 5."),
    ],
)
def test_a_sealed_snapshot_whose_content_does_not_fit(release, sequence, field, value, words):
    tensors, metadata = unseal(release.snapshot(sequence))
    del metadata["checksum"]
    if field in tensors:
        tensors[field] = value(tensors[field])
    else:
        metadata[field] = value
    live = release.ledger().sequences
    with pytest.raises(SnapshotError, match=rf"{field}.*{words}"):
        release.restore(seal(tensors, metadata), 64)
    assert release.ledger().sequences == live
