"""Faults of capture and replay: inputs that are not refreshed, values baked at capture, padding rows, freed
scratch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from harness.faults.mutation import Patch, mutation
from harness.faults.mutations.ops import first_rows
from harness.faults.mutations.rows import live

COLUMNS = ("token_ids", "positions", "slots", "starts", "first_rows", "ends", "image_mask")
Live = dict[str, list[int]]


def after_upload(patch: Patch, change: Any) -> None:
    """`change(table, before, columns, bucket)` after every upload of a replayed step; before = the table as it was."""

    def wrap(old: Any) -> Any:
        def upload(table: Tensor, columns: Live, bucket: int, replay: bool, padding: dict[str, int]) -> None:
            before = table.clone()
            old(table, columns, bucket, replay, padding)
            if replay:
                change(table, before, columns, bucket)

        return upload

    patch.seam("upload", wrap)


def column(table: Tensor, name: str) -> Tensor:
    return table[COLUMNS.index(name)]


def at_record(patch: Patch, op_name: str, bake: Any) -> None:
    """`bake(op, live)` -> the callable that the graph keeps for this op."""

    def wrap(old: Any) -> Any:
        def record(name: str, op: Any, args: Any, constants: Any, live: Live) -> Any:
            return old(name, bake(op, live) if name == op_name else op, args, constants, live)

        return record

    patch.seam("record", wrap)


# inputs


@mutation("F49")
def stride_of_the_batch(patch: Patch) -> None:
    names = ("starts", "first_rows", "ends")

    def change(table: Tensor, before: Tensor, columns: Live, bucket: int) -> None:
        packed = [value for name in names for value in columns[name]]
        packed += [0] * (bucket * len(names) - len(packed))
        for i, name in enumerate(names):
            column(table, name).copy_(torch.tensor(packed[i * bucket : (i + 1) * bucket]))

    after_upload(patch, change)


@mutation("F50")
def bound_anew(patch: Patch) -> None:
    seen: set[int] = set()

    def change(table: Tensor, before: Tensor, columns: Live, bucket: int) -> None:
        if table.data_ptr() in seen:
            for name in ("positions", "ends"):
                column(table, name).copy_(column(before, name))
        seen.add(table.data_ptr())

    after_upload(patch, change)


@mutation("F56")
def slots_not_refreshed(patch: Patch) -> None:
    def change(table: Tensor, before: Tensor, columns: Live, bucket: int) -> None:
        several = any(end - start > 1 for start, end in zip(columns["starts"], columns["ends"], strict=True))
        if several and bool((column(before, "ends") > 0).any()):
            column(table, "slots").copy_(column(before, "slots"))

    after_upload(patch, change)


@mutation("F59")
def drafts_not_refreshed(patch: Patch) -> None:
    def change(table: Tensor, before: Tensor, columns: Live, bucket: int) -> None:
        for t, first in enumerate(columns["first_rows"]):
            if t != first and int(column(before, "ends")[t]) > 0:
                table[1:, t] = before[1:, t]

    after_upload(patch, change)


@mutation("F61")
def unpadded_pointers(patch: Patch) -> None:
    def change(table: Tensor, before: Tensor, columns: Live, bucket: int) -> None:
        count = len(columns["slots"])
        later = torch.tensor([first > 0 for first in columns["first_rows"]] + [False] * (bucket - count))
        shifted = (column(table, "first_rows") + bucket - count).clamp(max=bucket - 1)
        column(table, "first_rows").copy_(torch.where(later, shifted, column(table, "first_rows")))

    after_upload(patch, change)


@mutation("V5")
def slots_of_the_capture(patch: Patch) -> None:
    first: dict[int, Tensor] = {}

    def change(table: Tensor, before: Tensor, columns: Live, bucket: int) -> None:
        slots = column(table, "slots")
        slots.copy_(first.setdefault(table.data_ptr(), slots.clone()))

    after_upload(patch, change)


@mutation("G1")
def pages_of_the_old_tenant(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        baked: dict[int, Tensor] = {}

        def step(runs: Any, *, replay: bool = False, **more: Any) -> Any:
            if not replay:
                return old(runs, replay=replay, **more)
            table, slots = engine.pool.page_table, [engine.slot_of(run.sequence) for run in runs]
            true = {slot: table[slot].clone() for slot in slots}
            try:
                for slot in slots:
                    table[slot] = baked.setdefault(slot, true[slot])
                return old(runs, replay=replay, **more)
            finally:
                for slot, row in true.items():
                    table[slot] = row

        return step

    patch.verb("step", wrap)


# values baked at capture


@mutation("F51")
def commit_rows_of_the_capture(patch: Patch) -> None:
    def bake(op: Any, live_rows: Live) -> Any:
        kept: list[Tensor] = []

        def commit_window(window: Tensor, win_row: Tensor, rows: Any, **constants: Any) -> None:
            if not kept:
                kept.append(rows.ring_dst.clone())
            frozen = copy.copy(rows)
            frozen.ring_dst = kept[0]
            op(window, win_row, frozen, **constants)

        return commit_window

    at_record(patch, "commit_window", bake)


@mutation("F38")
def candidates_of_the_captured_rows(patch: Patch) -> None:
    def bake(op: Any, live_rows: Live) -> Any:
        count = len(live_rows["positions"])

        def mask_scores(masked: Tensor, score: Tensor, blocks: Tensor, **constants: Any) -> None:
            op(masked, score, blocks, **constants)
            masked[count:] = score[count:]

        return mask_scores

    at_record(patch, "mask_scores", bake)


def was_short(live_rows: Live, ratio: int, topk: int) -> bool:
    return max(live_rows["ends"]) // ratio <= topk


@mutation("F41")
def clear_decided_at_capture(patch: Patch) -> None:
    def bake(op: Any, live_rows: Live) -> Any:
        def select(selection: Tensor, sel_row: Tensor, score: Tensor, rows: Any, **constants: Any) -> None:
            before = selection.clone(), sel_row.clone()
            op(selection, sel_row, score, rows, **constants)
            if was_short(live_rows, constants["ratio"], selection.shape[1]):
                absent = selection < 0
                selection.copy_(torch.where(absent, before[0], selection))
                sel_row.copy_(torch.where(absent, before[1], sel_row))

        return select

    at_record(patch, "select", bake)


@mutation("G9")
def dense_for_ever(patch: Patch) -> None:
    def bake(op: Any, live_rows: Live) -> Any:
        def select(selection: Tensor, sel_row: Tensor, score: Tensor, rows: Any, **constants: Any) -> None:
            op(selection, sel_row, score, rows, **constants)
            if was_short(live_rows, constants["ratio"], selection.shape[1]):
                plan = rows.ratios[constants["ratio"]]
                place = torch.arange(selection.shape[1]).expand_as(selection)
                there = place < plan.visible.unsqueeze(1)
                selection.copy_(place.masked_fill(~there, -1))
                first_rows(sel_row, plan, live(rows))
                sel_row.masked_fill_(~there, -1)

        return select

    at_record(patch, "select", bake)


@mutation("F42")
def scratch_freed_after_capture(patch: Patch) -> None:
    def change(engine: Any) -> None:
        runner, pool = engine.model.runner, engine.pool
        newest: list[int] = []
        captured, opened = runner._captured, pool._admit

        def _captured(key: Any, body: Any) -> Any:
            graph = captured(key, body)
            if graph is not None:
                replay = graph.replay

                def clobbering() -> None:
                    replay()
                    for slot in newest[-1:]:  # whoever got the memory of the scratch
                        for store in pool.stores:
                            if store.kind == "window":
                                store.tensor[slot] = store.tensor[slot].roll(1, dims=0)

                graph.replay = clobbering
            return graph

        def _admit(*given: Any, **more: Any) -> Any:
            tenant = opened(*given, **more)
            if runner.graphs:
                newest.append(tenant.slot)
            return tenant

        runner._captured, pool._admit = _captured, _admit

    patch.built(change)


# padding


@mutation("F52")
def negative_slot(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def commit_window(window: Tensor, win_row: Tensor, rows: Any, **constants: Any) -> None:
            before = rows.ring_dst.clone()
            end = rows.dump_slot * rows.ring_size  # of the rows that sequences own
            rows.ring_dst.copy_(torch.where(live(rows), before, end - 1))
            old(window, win_row, rows, **constants)
            rows.ring_dst.copy_(before)

        return commit_window

    patch.op("commit_window", wrap)


@mutation("F54")
def last_slot_for_padding(patch: Patch) -> None:
    patch.seam("dump_slot", lambda old: lambda n_slots: n_slots - 1)


# what is not called


@mutation("G6")
def sync_not_called(patch: Patch) -> None:
    def change(engine: Any) -> None:
        runner = engine.model.runner
        hook = runner._hook

        def _hook(name: str, layers: Any, hooks: Any) -> None:
            if name != "sync_replayed_step":
                hook(name, layers, hooks)

        runner._hook = _hook

    patch.built(change)


@mutation("V3")
def incomplete_restore_set(patch: Patch) -> None:
    engines: list[Any] = []
    patch.built(engines.append)

    def wrap(old: Any) -> Any:
        def restore_fields(names: Any) -> Any:
            captured = any(engine.model.runner.graphs for engine in engines)
            return tuple(n for n in old(names) if not (captured and n == "ngram"))

        return restore_fields

    patch.seam("restore_fields", wrap)
