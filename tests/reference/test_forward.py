"""The one general forward: splits, batches, causality, rollback, images, the stale-key defect, drafts."""

from __future__ import annotations

import pytest
import torch

from reference.engine import ReferenceEngine, Run
from tests.reference.strings import feed, tokens

DECISIONS = ("*.selection", "*.candidates", "*.moe_idx", "engram_hash")
SPLITS = [[1], [2], [3], [5], [8, 1], [13, 2, 1], [33, 1], [69, 1], [7, 31, 4]]


def logits_of(results) -> torch.Tensor:
    return torch.cat([r.logits for r in results])


def rows_of(results, name: str) -> torch.Tensor:
    """A tap's rows over several steps; columns that a shorter context lacks are filled as within a step."""
    parts = [r.taps[name] for r in results]
    width = max(p.shape[1] for p in parts)
    fill = False if parts[0].dtype == torch.bool else -1
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in parts])


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_any_split_agrees_with_one_pass_in_float64(unquantized, sizes):
    ids = tokens(70, seed=1)
    _, whole = feed(unquantized, ids, [70], taps=("*.stream",))
    _, parts = feed(unquantized, ids, sizes, taps=("*.stream",))
    assert len(parts) > 1
    for name in whole[0].taps:
        a, b = whole[0].taps[name], torch.cat([p.taps[name] for p in parts])
        assert torch.all((a - b).norm(dim=-1) <= 1e-12 * a.norm(dim=-1)), name
    assert torch.allclose(logits_of(whole), logits_of(parts), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", SPLITS[:5], ids=str)
def test_any_split_makes_the_same_decisions_with_the_quantisers_on(float64, sizes):
    ids = tokens(70, seed=2)
    _, whole = feed(float64, ids, [70], taps=DECISIONS)
    _, parts = feed(float64, ids, sizes, taps=DECISIONS)
    cut = sum(int((whole[0].taps[f"L{i}.selection"][-1] >= 0).all()) for i in (2, 4, 5, 7))
    masked = whole[0].taps["L5.candidates"][-1]
    assert cut == 4 and not masked.all(), "the string is long enough for every cut"
    for name, value in whole[0].taps.items():
        joined = torch.cat([p.taps[name] for p in parts]) if value.dim() > 2 else rows_of(parts, name)
        assert torch.equal(value, joined), name


def test_a_batch_agrees_with_each_sequence_alone(unquantized):
    strings = [tokens(n, seed=n) for n in (23, 1, 9, 16)]
    alone = [feed(unquantized, ids, [len(ids)])[1][0].logits for ids in strings]
    sequences = [unquantized.open(64) for _ in strings]
    runs = [Run(s, ids, 0) for s, ids in zip(sequences, strings, strict=True)]
    together = unquantized.step(runs).logits
    assert torch.allclose(together, torch.cat(alone), rtol=1e-12, atol=1e-12)
    reordered = unquantized.step([Run(s, (5,), unquantized.length(s)) for s in reversed(sequences)]).logits
    for row, ids in zip(reordered, reversed(strings), strict=True):
        expected = feed(unquantized, (*ids, 5), [99])[1][0].logits[-1]
        assert torch.allclose(row, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changed", [0, 6, 7, 22, 30])
def test_a_token_changes_nothing_before_itself(release, changed):
    ids = list(tokens(31, seed=4))
    _, before = feed(release, tuple(ids), [31])
    ids[changed] = (ids[changed] + 1) % 256
    _, after = feed(release, tuple(ids), [31])
    assert torch.equal(before[0].logits[:changed], after[0].logits[:changed])
    assert not torch.equal(before[0].logits[changed], after[0].logits[changed])


def test_rollback_equals_never_having_seen_the_tokens(release):
    ids = tokens(40, seed=5)
    for length in (0, 1, 7, 8, 21, 39):
        sequence, _ = feed(release, ids, [40])
        fresh = release.open(40)
        release.rollback(sequence, length)
        if length:
            release.step([Run(fresh, ids[:length], 0)])
        other = tokens(40 - length, seed=6)
        a = release.step([Run(sequence, other, length)])
        b = release.step([Run(fresh, other, length)])
        assert torch.equal(a.logits, b.logits)
        assert release.state_digest(sequence) == release.state_digest(fresh)


def test_snapshot_and_branch_continue_alike(release):
    ids, more = tokens(19, seed=7), tokens(6, seed=8)
    sequence, _ = feed(release, ids, [19])
    release.rollback(sequence, 17)
    restored = release.restore(release.snapshot(sequence), 64)
    branch = release.branch(restored)
    results = [release.step([Run(s, more[:2], 17)]).logits for s in (sequence, restored, branch)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def first_difference(engine, ids, prompt: int):
    """(position, layer, tap) at which decode first parts from prefill, or None."""
    names = [f"L{i}.{tap}" for i in range(9) for tap in ("attn_in", "index_score", "selection", "attn_out")]
    whole = feed(engine, ids, [len(ids)], taps=names)[1][0].taps
    _, steps = feed(engine, ids, [prompt, 1], taps=names)
    for position in range(prompt, len(ids)):
        row = steps[position - prompt + 1].taps
        for name in names:
            if name in row:
                mine, other = row[name][0].double(), whole[name][position].double()
                n = min(len(mine), len(other))
                mine, other = mine[:n].nan_to_num(neginf=-1e9), other[:n].nan_to_num(neginf=-1e9)
                if (mine - other).norm() > 1e-9 * (1 + other.norm()):
                    return position, int(name[1]), name[3:]
    return None


def test_the_stale_key_switch_parts_decode_from_prefill_at_a_ratio_2_source(toy, toy_weights):
    ids = tokens(40, seed=9)
    options = {"precision": "float64"}
    stale = ReferenceEngine(toy, toy_weights, release_stale_index_k=True, **options)
    position, layer, tap = first_difference(stale, ids, 12)
    assert position % 2 == 0 and toy.layer(layer).ratio == 2 and toy.layer(layer).is_index_source
    assert tap == "index_score"
    assert first_difference(ReferenceEngine(toy, toy_weights, **options), ids, 12) is None


def test_an_image_token_is_dead_for_ngrams_and_gates(float64):
    ids = tokens(12, seed=10)
    mask = tuple(i == 5 for i in range(12))
    text = feed(float64, ids, [12], taps=("engram_hash", "*.engram_gate"))[1][0].taps
    image = feed(float64, ids, [4, 3, 1], taps=("engram_hash", "*.engram_gate"), image_mask=mask)[1]
    hashes = torch.cat([r.taps["engram_hash"] for r in image])
    same = (hashes == text["engram_hash"]).all(-1).all(-1)
    reach = float64.config.engram_max_ngram_size - 1
    assert same.tolist() == [not 5 <= t <= 5 + reach for t in range(12)]
    gate = torch.cat([r.taps["L1.engram_gate"] for r in image])
    assert (gate[5] == 0).all() and (gate[[4, 6]] > 0).all()


def test_forced_decisions_are_taken(release):
    ids = tokens(20, seed=11)
    free = feed(release, ids, [20], taps=("L3.moe_idx", "L4.selection"))[1][0].taps
    forced = {"L3.moe_idx": (free["L3.moe_idx"] + 1) % 8, "L4.selection": free["L4.selection"].clone()}
    forced["L4.selection"][-1, 0] = -1
    sequence = release.open(20)
    result = release.step([Run(sequence, ids, 0)], taps=tuple(forced), forced=forced)
    assert all(torch.equal(result.taps[name], forced[name]) for name in forced)


def test_drafts_need_no_causal_order_and_leave_no_trace(release):
    ids = tokens(15, seed=12)
    sequence, _ = feed(release, ids, [6, 1])
    before = release.state_digest(sequence)
    draft = release.draft(sequence, 3)
    size = release.config.dspark_block_size
    assert draft.token_ids.shape == (size + 1,) and draft.token_ids[0] == 3
    assert draft.logits.shape == (size, 256) and draft.confidence.shape == (size,)
    assert torch.equal(draft.token_ids[1:], draft.logits.argmax(-1))
    assert release.state_digest(sequence) == before
    whole, _ = feed(release, ids, [15])
    assert torch.equal(release.draft(whole, 3).logits, draft.logits), (
        "drafts depend on the accepted tokens alone"
    )
