"""The state table: its published sizes, what its addressing promises, and what is derived from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from reference.config import V41Config
from reference.errors import CapacityError, InputError
from reference.state_table import layer_state, max_rollback, state_bytes, state_table

FLASH, TOY = V41Config.flash(), V41Config.toy()


@pytest.mark.parametrize("capacity", [2, 4096, 65536, 1048576])
def test_release_form_is_the_published_figure(capacity):
    expected = 5_242_880 + 28_672 + 3_200 * capacity
    assert state_bytes(FLASH, capacity=capacity, form="release") == expected


def test_release_form_at_4096_tokens():
    table = state_table(FLASH, capacity=4096, form="release")
    size = {name: sum(kind.bytes for kind in table if kind.name == name) for name in ("window", "pending")}
    assert size == {"window": 5_242_880, "pending": 28_672}
    assert state_bytes(FLASH, capacity=4096, form="release") == 18_378_752  # 17.5 MiB
    latent = {kind.layer: kind for kind in table if kind.name == "latent"}
    assert latent[20].bytes == 4 << 20 and latent[20].rows == 4096
    assert {layer: kind.rows for layer, kind in latent.items()} == {2: 2048, 8: 2048, 14: 2048, 20: 4096}
    assert [kind.row_bytes for kind in table if kind.name == "index_key"] == [256] * 4


@pytest.mark.parametrize("capacity", [2, 4096, 1048576])
def test_packed_form_is_the_published_figure(capacity):
    table = state_table(FLASH, capacity=capacity)
    size: dict[str, int] = {}
    for kind in table:
        size[kind.name] = size.get(kind.name, 0) + kind.bytes
    assert size["window"] == 2_703_360
    assert size["latent"] + size["index_key"] == 890 * capacity
    assert size["pending"] == 3 * 4_096  # the live slot alone
    assert state_bytes(FLASH, capacity=capacity) == 2_703_360 + 12_288 + 890 * capacity
    row = {kind.name: kind.row_bytes for kind in table}
    assert (row["window"], row["latent"], row["index_key"]) == (528, 288, 68)


def test_spare_rows_are_what_a_rewind_costs():
    plain, spare = state_table(FLASH, capacity=4096), state_table(FLASH, capacity=4096, ring_spare=8)
    assert (max_rollback(plain), max_rollback(spare)) == (0, 8)
    for a, b in zip(plain, spare, strict=True):
        assert b.rows - a.rows == (8 if a.addressing == "ring" else 0)
        assert b.rewindable == (8 if a.addressing == "ring" else None)
    added = state_bytes(FLASH, capacity=4096, ring_spare=8) - state_bytes(FLASH, capacity=4096)
    assert added == 8 * (40 * 528 + 3 * 4_096)


@pytest.mark.parametrize("spare", [0, 1, 8])
@pytest.mark.parametrize("form", ["packed", "release"])
def test_rings_hold_what_a_rewound_sequence_needs(form, spare):
    """After n tokens and a rewind by `spare`, every row that the next token reads is still there."""
    reach = {"window": TOY.sliding_window - 1, "pending": 1, "ngram": TOY.engram_max_ngram_size - 1}
    for kind in state_table(TOY, capacity=64, form=form, ring_spare=spare):
        if kind.addressing != "ring":
            continue
        for length in range(1, 60):
            held = {kind.row_of(position): position for position in range(length)}
            rewound = max(0, length - spare)
            for position in range(max(0, rewound - reach[kind.name]), rewound):
                assert held[kind.row_of(position)] == position, (kind.name, length)


def test_append_rows_are_groups_of_tokens():
    for kind in state_table(TOY, capacity=33, ring_spare=2):
        if kind.addressing == "append":
            assert kind.rows == 33 // kind.ratio == 33 // TOY.layer(kind.layer).ratio
            assert [kind.row_of(position) for position in range(6)] == [p // kind.ratio for p in range(6)]
            assert kind.rewindable is None


def test_kinds_follow_from_the_roles():
    owners: dict[str, list[int | None]] = {}
    for kind in state_table(TOY, capacity=16, ring_spare=8):
        owners.setdefault(kind.name, []).append(kind.layer)
        assert kind.snapshot
    assert owners == {
        "window": list(range(9)),
        "pending": [2, 4],
        "latent": [2, 4, 5],
        "index_key": [2, 4, 5],
        "ngram": [None],
        "length": [None],
        "floor": [None],
    }
    assert [kind.name for kind in layer_state(TOY, 4, capacity=16)] == [
        "window",
        "pending",
        "latent",
        "index_key",
    ]
    with_drafts = state_table(TOY, capacity=16, drafts=True)
    assert [kind.layer for kind in with_drafts if kind.name == "window"] == list(range(11))
    no_memory = replace(TOY, engram_layer_ids=(), engram_num_embeddings=())
    assert "ngram" not in {kind.name for kind in state_table(no_memory, capacity=16)}


def test_layers_of_a_table_are_its_slice():
    part = TOY.sliced((5, 6))
    whole = [kind for kind in state_table(TOY, capacity=16) if kind.layer in (5, 6)]
    assert [kind for kind in state_table(part, capacity=16) if kind.layer is not None] == whole


def test_pending_keeps_fp32_and_one_row_less_when_packed():
    packed = next(kind for kind in state_table(TOY, capacity=16, ring_spare=8) if kind.name == "pending")
    assert (packed.rows, packed.row_shape, packed.dtype) == (9, (2, 64), torch.float32)
    release = [kind for kind in state_table(TOY, capacity=16, form="release") if kind.name == "pending"]
    assert {kind.layer: kind.rows for kind in release} == {2: 2, 4: 2, 5: 1}


@pytest.mark.parametrize("capacity", [0, -1, 1025, 1.5, True, None])
def test_a_capacity_that_cannot_be_is_refused(capacity):
    with pytest.raises(CapacityError, match="1024"):
        state_table(TOY, capacity=capacity)


def test_forms_and_spare_rows_that_do_not_exist():
    with pytest.raises(InputError, match="packed, release"):
        state_table(TOY, capacity=16, form="fp8")
    for spare in (-1, 1.0):
        with pytest.raises(InputError, match="ring_spare"):
            state_table(TOY, capacity=16, ring_spare=spare)
