"""Selection and candidate blocks on the device equal the reference's, ties, empty rows and short contexts included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimized.ops.indexer import candidate_blocks, mask_scores, select
from reference.indexer import candidate_rows
from reference.indexer import select as reference_select

T = 6


def table(visible: Tensor, context: int) -> Any:
    """The part of a row plan that the selection reads; addresses are made up."""
    address = (torch.arange(context) * 7 + 3).expand(T, context).clone()
    return SimpleNamespace(ratios={1: SimpleNamespace(visible=visible, address=address)})


def scores(seed: int, context: int, levels: int) -> tuple[Tensor, Tensor]:
    """bf16 scores of few levels (many ties), and how many rows each query sees."""
    g = torch.Generator().manual_seed(seed)
    score = torch.randint(-levels, levels + 1, (T, context), generator=g).to(torch.bfloat16) / 4
    visible = torch.randint(0, context + 1, (T,), generator=g)
    visible[0], visible[1] = 0, context
    return score.masked_fill(torch.arange(context) >= visible.unsqueeze(-1), -torch.inf), visible


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6), context=st.integers(1, 40), levels=st.integers(0, 6), topk=st.integers(1, 12),
    size=st.integers(1, 5), blocks=st.integers(1, 4), keep=st.booleans(),
)  # fmt: skip
def test_selection_behind_candidate_blocks(
    seed: int, context: int, levels: int, topk: int, size: int, blocks: int, keep: bool
) -> None:
    score, visible = scores(seed, context, levels)
    rows = table(visible, context)
    kept = torch.ones(T, -(-context // size), dtype=torch.bool)
    candidate_blocks(kept, score, rows, ratio=1, block_size=size, topk_blocks=blocks)
    want = candidate_rows(score.float(), visible, blocks, size)
    assert torch.equal(kept.repeat_interleave(size, dim=1)[:, :context], want)
    masked = torch.full_like(score, torch.nan)
    mask_scores(masked, score, kept, block_size=size)
    assert torch.equal(masked, score.masked_fill(~want, -torch.inf))
    selection, address = (torch.full((T, topk), -99) for _ in range(2))
    select(selection, address, masked, rows, ratio=1, keep_unreachable=keep)
    assert torch.equal(selection, reference_select(masked.float(), visible, topk, keep_unreachable=keep))
    assert torch.equal(address, torch.where(selection < 0, -1, selection * 7 + 3))
