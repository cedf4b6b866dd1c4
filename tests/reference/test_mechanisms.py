"""Properties of mechanisms: rotation, Sinkhorn, norm, sparse attention, selection, experts, n-grams."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.config import V41Config
from reference.engram import DEAD, hash_constants, ngram_rows, ngram_tokens
from reference.hyper_connections import sinkhorn
from reference.indexer import ABSENT, candidate_rows, select
from reference.moe import Router, choose_experts, moe
from reference.norm import rms_norm
from reference.parameters import layer_parameters
from reference.precision import FLOAT64, RELEASE
from reference.rotary import rope_frequencies, rotate
from reference.sparse_attention import sparse_attention

seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# rotation


@given(seed=seeds, position=st.integers(0, 2**20 - 1))
@settings(max_examples=40, deadline=None)
def test_the_inverse_rotation_restores(seed, position):
    x, frequencies = normal(3, 2, 48, seed=seed), rope_frequencies(32, 10000.0)
    positions = torch.tensor([position, 0, 1])
    back = rotate(rotate(x, positions, frequencies, FLOAT64), positions, frequencies, FLOAT64, inverse=True)
    assert torch.allclose(back, x, rtol=0, atol=1e-13 * x.abs().max().item())
    assert torch.equal(rotate(x, positions, frequencies, FLOAT64)[..., :16], x[..., :16]), (
        "plain channels stay"
    )


@given(seed=seeds, p=st.integers(0, 5000), k=st.integers(0, 5000), shift=st.integers(0, 5000))
@settings(max_examples=40, deadline=None)
def test_products_depend_on_relative_positions(seed, p, k, shift):
    q, kv = normal(1, 32, seed=seed), normal(1, 32, seed=seed + 1)
    f = rope_frequencies(32, 160000.0, factor=16, original_positions=64)

    def product(a: int, b: int) -> float:
        return float(
            (rotate(q, torch.tensor([a]), f, FLOAT64) * rotate(kv, torch.tensor([b]), f, FLOAT64)).sum()
        )

    # an angle of up to 10^4 rad carries an absolute error of about 10^4 * 2^-53
    assert math.isclose(product(p, k), product(p + shift, k + shift), rel_tol=0, abs_tol=1e-10)


def test_released_yarn_frequencies():
    f = rope_frequencies(64, 160000.0, factor=16, original_positions=65536, beta_fast=32, beta_slow=1)
    published = {14: 5.286856e-3, 16: 2.265625e-3, 20: 2.969778e-4, 25: 5.372313e-6, 31: 5.680529e-7}
    for i, value in published.items():
        assert math.isclose(float(f[i]), value, rel_tol=1e-6)
    plain = rope_frequencies(64, 160000.0)
    assert torch.equal(f[:16], plain[:16]) and torch.allclose(f[25:], plain[25:] / 16, rtol=1e-6)


# hyper-connections


@given(seed=seeds, spread=st.sampled_from([0.1, 1.0, 4.0, 30.0]))
@settings(max_examples=40, deadline=None)
def test_sinkhorn_ends_on_columns(seed, spread):
    c = sinkhorn(normal(5, 4, 4, seed=seed, scale=spread), 20, 1e-6)
    columns = c.sum(-2)
    # the last step divides by (column sum + eps): the result misses 1 by eps / (column sum + eps) exactly
    assert (columns <= 1).all() and (c > 0).all()
    assert torch.allclose(columns, torch.ones_like(columns), rtol=0, atol=4e-6)


def test_sinkhorn_order_and_count_matter():
    logits = normal(1, 4, 4, seed=3, scale=3.0)
    assert not torch.allclose(sinkhorn(logits, 20, 1e-6), sinkhorn(logits.mT, 20, 1e-6).mT, atol=1e-4)
    assert not torch.equal(sinkhorn(logits, 20, 1e-6), sinkhorn(logits, 19, 1e-6))


# norm


def test_a_zero_row_stays_zero_and_tiny_rows_are_normalised():
    w = torch.ones(8, dtype=torch.float64)
    assert torch.equal(rms_norm(torch.zeros(1, 8).double(), w, 1e-20, FLOAT64), torch.zeros(1, 8).double())
    tiny = torch.full((1, 8), 1e-6, dtype=torch.float64)
    # eps is 1e-20, not 1e-6: a row of 1e-6 is still brought to one
    assert torch.allclose(rms_norm(tiny, w, 1e-20, FLOAT64), torch.ones_like(tiny), rtol=1e-7)


# sparse attention


def attention_inputs(seed: int, rows: int):
    return normal(3, 2, 16, seed=seed), normal(3, rows, 16, seed=seed + 1), normal(2, seed=seed + 2)


@given(seed=seeds, rows=st.sampled_from([1, 5, 63, 64, 65, 130]))
@settings(max_examples=30, deadline=None)
def test_online_softmax_equals_one_softmax_with_a_sink(seed, rows):
    q, kv, sink = attention_inputs(seed, rows)
    present = torch.rand(3, rows, generator=torch.Generator().manual_seed(seed)) < 0.7
    scores = torch.einsum("thc,tlc->thl", q, kv) / 4
    scores = scores.masked_fill(~present.unsqueeze(1), -torch.inf)
    logits = torch.cat((scores, sink.expand(3, 2).unsqueeze(-1)), dim=-1)
    expected = torch.einsum("thl,tlc->thc", logits.softmax(-1)[..., :-1], kv)
    assert torch.allclose(sparse_attention(q, kv, present, sink, FLOAT64), expected, rtol=1e-11, atol=1e-12)


def test_no_row_at_all_gives_zero_and_absent_rows_are_never_read():
    q, kv, sink = attention_inputs(0, 70)
    nothing = torch.zeros(3, 70, dtype=torch.bool)
    assert torch.equal(sparse_attention(q, kv, nothing, sink, FLOAT64), torch.zeros_like(q))
    some = nothing.clone()
    some[:, 5] = True
    poisoned = kv.clone()
    poisoned[:, 6:] = torch.nan
    assert torch.equal(
        sparse_attention(q, poisoned, some, sink, FLOAT64), sparse_attention(q, kv, some, sink, FLOAT64)
    )


# selection


@given(seed=seeds, rows=st.integers(0, 30), topk=st.integers(1, 8), levels=st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_selection_is_the_best_visible_rows_lowest_first_among_equals(seed, rows, topk, levels):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (4, rows), generator=g).double()  # few levels: many ties
    visible = torch.randint(0, rows + 1, (4,), generator=g)
    masked = scores.masked_fill(torch.arange(rows) >= visible.unsqueeze(-1), -torch.inf)
    for row, count, chosen in zip(
        scores.tolist(), visible.tolist(), select(masked, visible, topk), strict=True
    ):
        best = sorted(range(count), key=lambda j, row=row: (-row[j], j))[:topk]
        assert chosen.tolist() == sorted(best) + [ABSENT] * (topk - len(best))


def test_unreachable_rows_fill_up_only_behind_the_switch():
    scores = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf, 2.0, -torch.inf]])
    visible = torch.tensor([5])
    assert select(scores, visible, 4).tolist() == [[1, 4, ABSENT, ABSENT]]
    assert select(scores, visible, 4, keep_unreachable=True).tolist() == [[0, 1, 2, 4]]


def test_the_newest_block_always_stays_and_blocks_without_a_visible_row_never_do():
    scores = torch.arange(12, 0, -1).double().repeat(3, 1)  # the first rows are the best
    visible = torch.tensor([12, 5, 0])
    scores = scores.masked_fill(torch.arange(12) >= visible.unsqueeze(-1), -torch.inf)
    kept = candidate_rows(scores, visible, 2, 4)
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert kept[1].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert not kept[2].any()


# mixture of experts


def test_permuting_the_experts_permutes_the_choice_and_keeps_the_output(toy, toy_weights):
    w = layer_parameters(toy_weights, toy.layer(3), FLOAT64).ffn
    x = normal(6, toy.hidden_size, seed=1)
    order = torch.tensor([3, 1, 0, 7, 5, 2, 6, 4])  # new expert e is old expert order[e]
    chosen = torch.tensor([[0, 3], [1, 2], [7, 4], [5, 6], [2, 0], [6, 1]])
    weights = normal(6, 2, seed=2).abs()
    renamed = torch.tensor([[order.tolist().index(e) for e in row] for row in chosen.tolist()])
    import dataclasses

    permuted = dataclasses.replace(w, expert=lambda e: w.expert(int(order[e])))
    a, b = moe(x, chosen, weights, w, FLOAT64), moe(x, renamed, weights, permuted, FLOAT64)
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("image", [False, True])
def test_image_tokens_route_by_their_own_bias_and_ties_go_to_the_lowest_expert(image, toy_weights, toy):
    router = layer_parameters(toy_weights, toy.layer(0), RELEASE).ffn.router
    import dataclasses

    flat = torch.zeros(8)
    bias, bias_vl = flat.clone(), flat.clone()
    bias[5], bias_vl[6] = 1.0, 1.0
    router: Router = dataclasses.replace(router, bias=bias, bias_vl=bias_vl)
    chosen, margin = choose_experts(torch.ones(1, 8), torch.tensor([image]), router)
    assert chosen.tolist() == [[6 if image else 5, 0]] and margin.item() == 0


# n-grams


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_blocking_is_sticky_and_a_lookback_never_leaves_the_sequence(data):
    ids = torch.tensor(
        data.draw(st.lists(st.one_of(st.just(DEAD), st.integers(3, 20)), min_size=1, max_size=12))
    )
    start, pad = data.draw(st.integers(0, len(ids) - 1)), 2
    tokens = ngram_tokens(ids, start, 4, pad)
    for row, t in zip(tokens.tolist(), range(start, len(ids)), strict=True):
        live = []
        for k in range(4):  # by hand: stop for good at the first dead or absent token
            if t - k < 0 or ids[t - k] == DEAD:
                break
            live.append(int(ids[t - k]))
        assert row == live + [pad] * (4 - len(live))


def test_released_hash_constants():
    c = hash_constants(V41Config.flash())
    assert c.multipliers[0].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert c.multipliers[1].tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert c.primes[0, 0, :3].tolist() == [16000057, 16000079, 16000081] and c.primes[1, 2, 7] == 16000889
    assert c.rows == (384006168, 384016682)


def test_rows_of_a_layer_lie_in_their_own_ranges():
    c = hash_constants(V41Config.flash())
    ids = torch.randint(0, 99092, (50,), generator=torch.Generator().manual_seed(0))
    rows = ngram_rows(ngram_tokens(ids, 0, 4, 2), c.multipliers[0], c.primes[0], c.offsets[0])
    low, size = c.offsets[0].flatten(), c.primes[0].flatten()
    assert ((rows >= low) & (rows < low + size)).all()
