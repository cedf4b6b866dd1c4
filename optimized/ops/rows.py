"""plan_rows: from the row table to addresses, once a step, for every layer.

    window list of row t     tokens p-W+1 .. p, oldest first, absent before 0: in this step's rows or in the
                             ring
    visible                  (p+1) // r compressed rows
    append row               of the group that ends at p: page_table[slot][j r // page_tokens], offset j mod
                             rows a page
    destinations             ring rows that keep this row; whatever isn't kept goes to the dump slot or the
                             dump page

Padding rows (position -1) see nothing and write dump rows only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized import seams
from optimized.step import RatioRows, Rows


def plan_rows(rows: Rows, *, scratch: Any = None) -> None:
    """Writes every derived field of `rows` from rows.table and rows.page_table."""
    p, slots, starts, firsts, ends = rows.positions, rows.slots, rows.starts, rows.first_rows, rows.ends
    live = p >= 0
    _window(rows, p, slots, starts, firsts, live)
    window_dump = seams.padding_target(rows.dump_slot * rows.ring_size)
    _destination(rows.ring_dst, p, slots, ends, rows.ring_size, window_dump)
    if rows.ngram_size:
        _destination(
            rows.ngram_dst,
            p,
            slots,
            ends,
            rows.ngram_size,
            seams.padding_target(rows.dump_slot * rows.ngram_size),
        )
        _lookback(rows, p, slots, starts, firsts)
    rope_positions = [p, p]
    for plan in rows.ratios.values():
        first = _groups(rows, plan, p, slots)
        if plan.ratio > 1:
            rope_positions.append(first)
            _pending(rows, plan, p, slots, starts, firsts, ends)
    angle = torch.stack(rope_positions).to(torch.float32).unsqueeze(-1)  # [kinds, T, 1]
    kinds = len(rope_positions)
    frequencies = (
        torch.cat((rows.frequencies, rows.frequencies[1:].expand(kinds - 2, -1)))
        if kinds > 2
        else rows.frequencies
    )
    angle = angle * frequencies.unsqueeze(1)
    torch.cos(angle, out=rows.rope_cos)
    torch.sin(angle, out=rows.rope_sin)
    torch.complex(rows.rope_cos, rows.rope_sin, out=rows.turn[0])
    torch.complex(rows.rope_cos, -rows.rope_sin, out=rows.turn[1])


def _window(rows: Rows, p: Tensor, slots: Tensor, starts: Tensor, firsts: Tensor, live: Tensor) -> None:
    size = rows.ring_size
    p, slot = p.unsqueeze(1), slots.unsqueeze(1)
    token = p + torch.arange(1 - rows.window, 1, device=p.device)  # [T, W]
    there = seams.in_window(token, p, rows.window) & live.unsqueeze(1)
    start = starts.unsqueeze(1)
    step = there & seams.from_this_step(token, start)
    rows.window_live.copy_(there)
    rows.window_from_step.copy_(step)
    rows.window_position.copy_(token.masked_fill(~there, -1))
    dump = rows.dump_slot * size
    ring = seams.ring_address(slot, seams.ring_row(token, size), size)
    rows.window_ring.copy_(ring.masked_fill(~there | step, dump))
    rows.window_step.copy_((firsts.unsqueeze(1) + token - start).masked_fill(~step, 0))


def _destination(out: Tensor, p: Tensor, slots: Tensor, ends: Tensor, size: int, dump: int) -> None:
    kept = seams.commit_mask(p, ends, size)
    out.copy_(torch.where(kept, seams.ring_address(slots, seams.ring_row(p, size), size), dump))


def _lookback(rows: Rows, p: Tensor, slots: Tensor, starts: Tensor, firsts: Tensor) -> None:
    """Where the ids of tokens p, p-1, .. p-n+1 lie."""
    size, n = rows.ngram_size, rows.ngram_ring.shape[1]
    token = p.unsqueeze(1) - torch.arange(n, device=p.device)
    start = starts.unsqueeze(1)
    there = token >= 0
    step = there & seams.from_this_step(token, start)
    ring = seams.ring_address(slots.unsqueeze(1), seams.ngram_row(token, size), size)
    rows.ngram_live.copy_(there)
    rows.ngram_from_step.copy_(step)
    rows.ngram_step.copy_((firsts.unsqueeze(1) + token - start).masked_fill(~step, 0))
    rows.ngram_ring.copy_(ring.masked_fill(~there | step, rows.dump_slot * size))


def _groups(rows: Rows, plan: RatioRows, p: Tensor, slots: Tensor) -> Tensor:
    """Fills what concerns compressed rows; returns the first position of each row's group."""
    ratio, per_page = plan.ratio, plan.rows_a_page
    group = seams.group_of(p.clamp(min=0), ratio)
    plan.visible.copy_(seams.visible_count(p, ratio))
    plan.completes.copy_(seams.completes_group(p, ratio))
    pages = rows.page_table.index_select(0, slots)  # [T, max_pages]
    page = pages.gather(1, torch.div(group, per_page, rounding_mode="floor").unsqueeze(1)).squeeze(1)
    target = seams.row_address(page, group % per_page, per_page)
    dump = seams.padding_target(rows.dump_page * per_page)
    plan.append_row.copy_(torch.where(plan.completes, target, dump))
    if not plan.address.numel():
        return seams.rope_position(group, ratio)
    offset = torch.arange(per_page, device=p.device)
    used = pages[:, : rows.context // rows.page_tokens].unsqueeze(-1)
    plan.address.copy_(seams.row_address(used, offset, per_page).flatten(1))
    plan.index_address.copy_(plan.address)
    return seams.rope_position(group, ratio)


def _pending(
    rows: Rows, plan: RatioRows, p: Tensor, slots: Tensor, starts: Tensor, firsts: Tensor, ends: Tensor
) -> None:
    assert plan.pending_ring is not None and plan.pending_step is not None
    assert plan.pending_from_step is not None and plan.pending_dst is not None
    size = plan.pending_size
    dump = seams.padding_target(rows.dump_slot * size)
    kept = seams.commit_mask(p, ends, size)
    plan.pending_dst.copy_(
        torch.where(kept, seams.ring_address(slots, seams.pending_row(p, size), size), dump)
    )
    token = p.unsqueeze(1) + torch.arange(
        1 - plan.ratio, 1, device=p.device
    )  # [T, r], of the group that ends at p
    used = plan.completes.unsqueeze(1)
    step = used & seams.from_this_step(token, starts.unsqueeze(1))
    plan.pending_from_step.copy_(step)
    ring = seams.ring_address(slots.unsqueeze(1), seams.pending_row(token, size), size)
    plan.pending_ring.copy_(torch.where(used & ~step, ring, rows.dump_slot * size))
    plan.pending_step.copy_((firsts.unsqueeze(1) + token - starts.unsqueeze(1)).masked_fill(~step, 0))
