"""Faults of addressing: visible counts, windows, groups, rings, commits, histories, positions; made after
`plan_rows`.

`plan_rows` derives from the row table where every op of the step reads and writes. A mutation here lets it do
so and then changes what a defective engine would have derived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.faults.mutation import Patch, mutation

Change = Callable[[Any, Any], None]  # (rows, engine)


def after_plan(patch: Patch, change: Change) -> None:
    """Run `change(rows, engine)` whenever the addresses of a step have been derived."""

    def wrap(old: Any, engine: Any) -> Any:
        def plan_rows(rows: Any, **constants: Any) -> None:
            old(rows, **constants)
            change(rows, engine)

        return plan_rows

    patch.op("plan_rows", wrap)


def live(rows: Any) -> Tensor:
    return rows.positions >= 0


def widths(rows: Any) -> Tensor:
    """Rows of each row's run."""
    return rows.ends - rows.starts


def chunk(rows: Any) -> Tensor:
    """Rows of runs of several tokens that begin behind others."""
    return live(rows) & (widths(rows) > 1) & (rows.starts > 0)


def grouped(rows: Any) -> list[Any]:
    """Plans of ratios above 1."""
    return [plan for ratio, plan in rows.ratios.items() if ratio > 1]


def drop(
    rows: Any, dropped: Tensor, *, window: bool = True, pending: bool = True, ngram: bool = True
) -> None:
    """Don't commit these rows to the rings."""
    if window:
        rows.ring_dst.copy_(torch.where(dropped, rows.dump_slot * rows.ring_size, rows.ring_dst))
    if ngram and rows.ngram_size:
        rows.ngram_dst.copy_(torch.where(dropped, rows.dump_slot * rows.ngram_size, rows.ngram_dst))
    for plan in grouped(rows) if pending else ():
        dump = rows.dump_slot * plan.pending_size
        plan.pending_dst.copy_(torch.where(dropped, dump, plan.pending_dst))


# compressor, groups, visibility


@mutation("F01")
def four_rows_of_a_verify(patch: Patch) -> None:
    after_plan(patch, lambda rows, _: drop(rows, rows.ends - rows.positions > 4, window=False, ngram=False))


@mutation("F02")
def last_row_of_a_verify(patch: Patch) -> None:
    after_plan(patch, lambda rows, _: drop(rows, rows.ends - rows.positions > 1, window=False, ngram=False))


@mutation("F03")
def zeros_for_the_held_row(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        def pooled_group(kv: Tensor, score: Tensor, from_step: Tensor) -> tuple[Tensor, Tensor]:
            if kv.shape[0] == 1:
                held = ~from_step.unsqueeze(-1)
                kv, score = kv.masked_fill(held, 0), score.masked_fill(held, 0)
            return old(kv, score, from_step)

        return pooled_group

    patch.seam("pooled_group", wrap)


@mutation("F06")
def own_unfinished_group(patch: Patch) -> None:
    patch.seam("visible_count", lambda old: lambda position, ratio: position // ratio + 1)


@mutation("F07")
def one_count_of_a_sequence(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        for ratio, plan in rows.ratios.items():
            plan.visible.copy_(torch.where(live(rows), rows.ends // ratio, plan.visible))

    after_plan(patch, change)


@mutation("G11")
def count_of_the_last_run(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        last = int(live(rows).nonzero()[-1])
        for plan in rows.ratios.values():
            plan.visible.clamp_(max=int(plan.visible[last]))

    after_plan(patch, change)


@mutation("F15")
def groups_by_flat_row(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        t = torch.arange(rows.n_rows)
        if bool((rows.first_rows == rows.first_rows[0])[live(rows)].all()):
            return  # one sequence: nothing to mix up
        for plan in grouped(rows):
            closes = live(rows) & ((rows.starts[0] + t) % plan.ratio == plan.ratio - 1)
            group = (rows.positions.clamp(min=0) // plan.ratio).clamp(max=plan.address.shape[1] - 1)
            target = plan.address.gather(1, group.unsqueeze(1)).squeeze(1)
            plan.append_row.copy_(torch.where(closes, target, rows.dump_page * plan.rows_a_page))
            plan.completes.copy_(closes)
            token = t.unsqueeze(1) + torch.arange(1 - plan.ratio, 1)
            here = closes.unsqueeze(1) & (token >= 0)
            plan.pending_from_step.copy_(torch.where(here, True, plan.pending_from_step))
            plan.pending_step.copy_(torch.where(here, token, plan.pending_step))

    after_plan(patch, change)


# the window


@mutation("F26")
def one_key_too_old(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        token = rows.positions - rows.window
        there = live(rows) & (token >= 0)
        step = there & (token >= rows.starts)
        ring = rows.slots * rows.ring_size + token % rows.ring_size
        for name, value in (
            ("window_position", token),
            ("window_live", torch.ones_like(there)),
            ("window_from_step", step),
            ("window_ring", torch.where(step, rows.dump_slot * rows.ring_size, ring)),
            ("window_step", torch.where(step, rows.first_rows + token - rows.starts, 0)),
        ):
            column = getattr(rows, name)[:, 0]
            column.copy_(torch.where(there, value, column))

    after_plan(patch, change)


@mutation("F93")
def old_tenants_window(patch: Patch) -> None:
    def change(rows: Any, engine: Any) -> None:
        used = torch.tensor([g > 1 for g in engine.pool.slots.generations] + [False])
        token = rows.positions.unsqueeze(1) + torch.arange(1 - rows.window, 1)
        stale = (token < 0) & (live(rows) & used[rows.slots]).unsqueeze(1)
        ring = rows.slots.unsqueeze(1) * rows.ring_size + token % rows.ring_size
        rows.window_live.logical_or_(stale)
        rows.window_ring.copy_(torch.where(stale, ring, rows.window_ring))

    after_plan(patch, change)


@mutation("F128")
def earlier_chunks_ignored(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        old = chunk(rows).unsqueeze(1) & ~rows.window_from_step
        rows.window_live.masked_fill_(old, False)

    after_plan(patch, change)


@mutation("F18")
def unordered_commit(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def commit_window(window: Tensor, win_row: Tensor, rows: Any, **constants: Any) -> None:
            target = rows.slots * rows.ring_size + rows.positions % rows.ring_size
            window.index_copy_(0, target.flip(0), win_row.flip(0))

        return commit_window

    patch.op("commit_window", wrap)


@mutation("G16")
def tail_rows_of_some_widths(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        wide = widths(rows)
        drop(rows, ((wide == 4) | (wide == 8)) & (rows.positions == rows.ends - 1))

    after_plan(patch, change)


# addresses of compressed rows


@mutation("F35")
def keys_read_tiled(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        for plan in rows.ratios.values():
            pages = plan.index_address.view(rows.n_rows, -1, plan.rows_a_page)
            order = torch.arange(plan.rows_a_page).view(2, -1).T.flatten()
            pages[:, 1:] = pages[:, 1:][:, :, order]

    after_plan(patch, change)


@mutation("F36")
def page_table_ignored(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        for plan in rows.ratios.values():
            last = (rows.dump_page + 1) * plan.rows_a_page - 1
            flat = plan.address[:, :1] + torch.arange(plan.address.shape[1])
            plan.address.copy_(flat.clamp(max=last))

    after_plan(patch, change)


@mutation("F120")
def int32_addresses(patch: Patch) -> None:
    def row_address(page: Tensor, offset: Tensor, rows_a_page: int) -> Tensor:
        return (page.to(torch.int32) * rows_a_page + offset.to(torch.int32)).to(torch.int64)

    patch.seam("row_address", lambda old: row_address)


@mutation("F121")
def float_addresses(patch: Patch) -> None:
    def row_address(page: Tensor, offset: Tensor, rows_a_page: int) -> Tensor:
        return (page.to(torch.float32) * rows_a_page + offset).to(torch.int64)

    patch.seam("row_address", lambda old: row_address)


# positions and rotation


@mutation("F43")
def yarn_for_window_layers(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        return lambda config, ratio: old(config, ratio or max(r.ratio for r in config.layers()))

    patch.seam("rope_frequencies", wrap)


@mutation("F45")
def no_yarn(patch: Patch) -> None:
    patch.seam(
        "rope_frequencies",
        lambda old: lambda config, ratio: old(replace(config, original_max_position_embeddings=0), ratio),
    )


@mutation("F47")
def positions_of_the_chunk(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        local = torch.where(chunk(rows), rows.positions - rows.starts, rows.positions)
        angle = local.to(torch.float32).unsqueeze(-1) * rows.frequencies.unsqueeze(1)
        turn = torch.complex(angle.cos(), angle.sin())
        rows.turn[0, :2], rows.turn[1, :2] = turn, turn.conj()

    after_plan(patch, change)


# n-gram history


def blind_before_start(rows: Any, which: Tensor) -> None:
    """Tokens before the run are not there for these rows."""
    token = rows.positions.unsqueeze(1) - torch.arange(rows.ngram_live.shape[1])
    rows.ngram_live.logical_and_(~(which.unsqueeze(1) & (token < rows.starts.unsqueeze(1))))


@mutation("F95")
def no_history_at_a_chunk(patch: Patch) -> None:
    after_plan(patch, lambda rows, _: blind_before_start(rows, chunk(rows)))


@mutation("F101")
def no_history_at_a_call(patch: Patch) -> None:
    after_plan(patch, lambda rows, _: blind_before_start(rows, live(rows)))


@mutation("F96")
def placeholder_of_the_last_token(patch: Patch) -> None:
    decoded: dict[tuple[int, int], bool] = {}  # (engine, slot) -> was its last step one token?

    def change(rows: Any, engine: Any) -> None:
        for t in live(rows).nonzero().flatten().tolist():
            slot, start, width = int(rows.slots[t]), int(rows.starts[t]), int(widths(rows)[t])
            if width == 1 and start > 0 and decoded.get((id(engine), slot)):
                rows.ngram_live[t, 1:] = False
            if int(rows.positions[t]) == start:
                decoded[id(engine), slot] = width == 1 and start > 0

    after_plan(patch, change)


@mutation("F85")
def history_of_the_old_tenant(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        token = rows.positions.unsqueeze(1) - torch.arange(rows.ngram_live.shape[1])
        before = (token < 0) & live(rows).unsqueeze(1)
        ring = rows.slots.unsqueeze(1) * rows.ngram_size + token % rows.ngram_size
        rows.ngram_live.logical_or_(before)
        rows.ngram_ring.copy_(torch.where(before, ring, rows.ngram_ring))

    after_plan(patch, change)


@mutation("V14")
def one_history_for_all(patch: Patch) -> None:
    def change(rows: Any, _: Any) -> None:
        shift = rows.slots * rows.ngram_size
        reads = rows.ngram_live & ~rows.ngram_from_step & live(rows).unsqueeze(1)
        rows.ngram_ring.sub_(torch.where(reads, shift.unsqueeze(1), 0))
        rows.ngram_dst.sub_(torch.where(rows.ngram_dst < rows.dump_slot * rows.ngram_size, shift, 0))

    after_plan(patch, change)


@mutation("V13")
def first_id_for_every_row(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def engram_hash(
            hashes: Any, ngram_row: Any, ngram: Any, constants: Any, rows: Any, **more: Any
        ) -> None:
            ids = rows.token_ids.clone()
            rows.token_ids.copy_(torch.where(chunk(rows) & (widths(rows) <= 8), ids[rows.first_rows], ids))
            old(hashes, ngram_row, ngram, constants, rows, **more)
            rows.token_ids.copy_(ids)

        return engram_hash

    patch.op("engram_hash", wrap)
