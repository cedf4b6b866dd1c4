"""Faults of state: ring sizes, snapshots, branches, rollback, release, reuse, failed calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.faults.mutation import Patch, mutation
from harness.faults.mutations.rows import live
from reference.errors import CapacityError

RINGS = ("window", "pending", "ngram")


def rings(engine: Any, *kinds: str) -> list[Any]:
    return [store for store in engine.pool.stores if store.is_ring and (not kinds or store.kind in kinds)]


def slot_of(engine: Any, sequence: Any) -> int:
    return engine.pool.tenant(sequence).slot


# ring sizes


@mutation("F14")
def open_group_without_margin(patch: Patch) -> None:
    patch.seam("ring_rows", lambda old: lambda base, spare: base + 1 if base == 1 else old(base, spare))


@mutation("V2")
def rings_without_spare_rows(patch: Patch) -> None:
    patch.seam("ring_rows", lambda old: lambda base, spare: base)


# snapshots and restores


@mutation("F05")
def source_ring_row(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        def restore_row(kind: str, position: Any, size: int, source_size: int, length: int) -> Any:
            if kind == "pending":
                return position % source_size % size
            return old(kind, position, size, source_size, length)

        return restore_row

    patch.seam("restore_row", wrap)


@mutation("F22")
def cursor_of_zero(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        def restore_row(kind: str, position: Any, size: int, source_size: int, length: int) -> Any:
            if kind == "window":
                return position - max(0, length - size)
            return old(kind, position, size, source_size, length)

        return restore_row

    patch.seam("restore_row", wrap)


@mutation("F66")
def column_in_another_unit(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        def restore_row(kind: str, position: Any, size: int, source_size: int, length: int) -> Any:
            if kind == "pending":
                return position // 2 % size
            return old(kind, position, size, source_size, length)

        return restore_row

    patch.seam("restore_row", wrap)


def not_restored(patch: Patch, *kinds: str) -> None:
    patch.seam(
        "restore_fields",
        lambda old: lambda names: tuple(n for n in old(names) if n.rpartition(".")[2] not in kinds),
    )


@mutation("F17")
def window_not_restored(patch: Patch) -> None:
    not_restored(patch, "window")


@mutation("F68")
def open_group_not_restored(patch: Patch) -> None:
    not_restored(patch, "pending")


@mutation("F70")
def slot_state_not_restored(patch: Patch) -> None:
    not_restored(patch, *RINGS)


@mutation("F71")
def history_not_restored(patch: Patch) -> None:
    not_restored(patch, "ngram")


@mutation("F62")
def load_skipped_by_decode(patch: Patch) -> None:
    waiting: dict[Any, list[tuple[Tensor, Tensor]]] = {}

    def restore(old: Any, engine: Any) -> Any:
        def restored(blob: bytes, capacity: int) -> Any:
            sequence = old(blob, capacity)
            slot = slot_of(engine, sequence)
            waiting[sequence] = [(store.tensor[slot], store.tensor[slot].clone()) for store in rings(engine)]
            for row, _ in waiting[sequence]:
                row.copy_(row.roll(1, dims=0))  # what lay there before the load
            return sequence

        return restored

    def step(old: Any, engine: Any) -> Any:
        def stepped(runs: Any, **more: Any) -> Any:
            for run in runs:
                if run.sequence in waiting and len(run.token_ids) > 1:
                    for row, content in waiting.pop(run.sequence):
                        row.copy_(content)
            return old(runs, **more)

        return stepped

    patch.verb("restore", restore)
    patch.verb("step", step)


@mutation("F67")
def no_hit_at_multiples(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def restore(blob: bytes, capacity: int) -> Any:
            sequence = old(blob, capacity)
            if engine.length(sequence) % engine.page_tokens == 0:
                engine.close(sequence)
                sequence = engine.open(capacity)
            return sequence

        return restore

    patch.verb("restore", wrap)


def registry(patch: Patch, remember: Any, replace: Any) -> None:
    """`remember(blob, sequence, engine)` after a snapshot; `replace(blob, sequence, engine)` after a restore."""

    def snapshot(old: Any, engine: Any) -> Any:
        def taken(sequence: Any) -> bytes:
            blob = old(sequence)
            remember(blob, sequence, engine)
            return blob

        return taken

    def restore(old: Any, engine: Any) -> Any:
        def restored(blob: bytes, capacity: int) -> Any:
            sequence = old(blob, capacity)
            replace(blob, sequence, engine)
            return sequence

        return restored

    patch.verb("snapshot", snapshot)
    patch.verb("restore", restore)


@mutation("F73")
def whole_pool_restored(patch: Patch) -> None:
    saved: dict[bytes, list[Tensor]] = {}

    def remember(blob: bytes, sequence: Any, engine: Any) -> None:
        saved[blob] = [store.tensor.clone() for store in rings(engine)]

    def replace(blob: bytes, sequence: Any, engine: Any) -> None:
        own = slot_of(engine, sequence)
        for store, content in zip(rings(engine), saved.get(blob, ()), strict=False):
            keep = store.tensor[own].clone()
            store.tensor.copy_(content)
            store.tensor[own] = keep

    registry(patch, remember, replace)


@mutation("F75")
def snapshot_by_reference(patch: Patch) -> None:
    slots: dict[bytes, int] = {}

    def remember(blob: bytes, sequence: Any, engine: Any) -> None:
        slots[blob] = slot_of(engine, sequence)

    def replace(blob: bytes, sequence: Any, engine: Any) -> None:
        if blob in slots:
            for store in rings(engine):
                store.tensor[slot_of(engine, sequence)] = store.tensor[slots[blob]].clone()

    registry(patch, remember, replace)


@mutation("L4")
def ring_of_two_snapshots(patch: Patch) -> None:
    order: list[bytes] = []

    def snapshot(old: Any, engine: Any) -> Any:
        def taken(sequence: Any) -> bytes:
            blob = old(sequence)
            order.append(blob)
            return blob

        return taken

    def restore(old: Any, engine: Any) -> Any:
        def restored(blob: bytes, capacity: int) -> Any:
            if blob in order:
                place = order.index(blob)
                same_slot = [other for i, other in enumerate(order) if i % 2 == place % 2]
                blob = same_slot[-1]
            return old(blob, capacity)

        return restored

    patch.verb("snapshot", snapshot)
    patch.verb("restore", restore)


@mutation("L5")
def snapshots_keyed_by_their_end(patch: Patch) -> None:
    known: dict[Any, bytes] = {}
    last: dict[Any, int] = {}

    def step(old: Any, engine: Any) -> Any:
        def stepped(runs: Any, **more: Any) -> Any:
            result = old(runs, **more)
            last.update({run.sequence: run.token_ids[-1] for run in runs})
            return result

        return stepped

    def snapshot(old: Any, engine: Any) -> Any:
        def taken(sequence: Any) -> bytes:
            key = (engine.length(sequence), last.get(sequence))
            return known.setdefault(key, old(sequence))

        return taken

    patch.verb("step", step)
    patch.verb("snapshot", snapshot)


@mutation("F86")
def published_before_the_load(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def restore(blob: bytes, capacity: int) -> Any:
            try:
                return old(blob, capacity)
            except Exception:
                engine.pool.open(capacity)  # bound first, and the abort path only returns
                raise

        return restore

    patch.verb("restore", wrap)


@mutation("L6")
def open_tail_shared(patch: Patch) -> None:
    patch.seam(
        "shared_page_count",
        lambda old: lambda floor, length, page_tokens: -(-length // page_tokens),
    )


# rollback


def after_rollback(patch: Patch, change: Any) -> None:
    """`change(engine, slot, old length, new length)` after every rollback that drops something."""

    def wrap(old: Any, engine: Any) -> Any:
        def rollback(sequence: Any, length: int) -> None:
            before = engine.length(sequence)
            old(sequence, length)
            if length < before:
                change(engine, slot_of(engine, sequence), before, length)

        return rollback

    patch.verb("rollback", wrap)


def move_row(store: Any, slot: int, target: int, source: int) -> None:
    if target >= 0 and source >= 0:
        store.tensor[slot, target % store.size] = store.tensor[slot, source % store.size]


@mutation("F16")
def open_row_kept(patch: Patch) -> None:
    def change(engine: Any, slot: int, before: int, length: int) -> None:
        for store in rings(engine, "pending") if length % 2 else ():
            move_row(store, slot, length - 1, before - 1)

    after_rollback(patch, change)


@mutation("F97")
def rejected_drafts_in_history(patch: Patch) -> None:
    def change(engine: Any, slot: int, before: int, length: int) -> None:
        for store in rings(engine, "ngram"):
            for k in range(engine.config.engram_max_ngram_size - 1, 0, -1):
                move_row(store, slot, length - k, before - k)

    after_rollback(patch, change)


@mutation("L9")
def rejected_rows_in_the_window(patch: Patch) -> None:
    def change(engine: Any, slot: int, before: int, length: int) -> None:
        for store in rings(engine, "window"):
            for k in range(before - length, 0, -1):
                move_row(store, slot, length - k, before - k)

    after_rollback(patch, change)


@mutation("F21")
def pruned_by_optimistic_length(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def step(runs: Any, **more: Any) -> Any:
            result = old(runs, **more)
            for run in runs:
                length, slot = run.start + len(run.token_ids), slot_of(engine, run.sequence)
                for store in rings(engine, "window"):
                    for position in range(max(0, length - store.size), length - engine.config.sliding_window):
                        move_row(store, slot, position, length - 1)
            return result

        return step

    patch.verb("step", wrap)


@mutation("F78")
def widest_verify_taken_for_the_last(patch: Patch) -> None:
    widest: dict[Any, int] = {}
    last: dict[Any, int] = {}

    def step(old: Any, engine: Any) -> Any:
        def stepped(runs: Any, **more: Any) -> Any:
            result = old(runs, **more)
            for run in runs:
                if run.start > 0:
                    last[run.sequence] = len(run.token_ids)
                    widest[run.sequence] = max(widest.get(run.sequence, 0), len(run.token_ids))
            return result

        return stepped

    def rollback(old: Any, engine: Any) -> Any:
        def rolled(sequence: Any, length: int) -> None:
            old(sequence, length)
            extra = widest.get(sequence, 0) - last.get(sequence, 0)
            if extra > 0:
                tenant = engine.pool.tenant(sequence)
                tenant.length = max(tenant.floor, 0, length - extra)

        return rolled

    patch.verb("step", step)
    patch.verb("rollback", rollback)


@mutation("F83")
def answer_of_the_last_draft(patch: Patch) -> None:
    answers: dict[Any, dict[int, Any]] = {}
    rewound: dict[Any, int] = {}

    def step(old: Any, engine: Any) -> Any:
        def stepped(runs: Any, **more: Any) -> Any:
            result = old(runs, **more)
            row = 0
            for run in runs:
                stale = answers.get(run.sequence, {}).get(run.start)
                if rewound.pop(run.sequence, None) == run.start and stale is not None:
                    result.hidden[row], result.logits[row] = stale
                places = range(run.start, run.start + len(run.token_ids))
                answers[run.sequence] = {
                    p: (result.hidden[row + i].clone(), result.logits[row + i].clone())
                    for i, p in enumerate(places)
                }
                row += len(run.token_ids)
            return result

        return stepped

    def rollback(old: Any, engine: Any) -> Any:
        def rolled(sequence: Any, length: int) -> None:
            old(sequence, length)
            rewound[sequence] = length

        return rolled

    patch.verb("step", step)
    patch.verb("rollback", rollback)


@mutation("F100")
def prefetched_row_of_a_draft(patch: Patch) -> None:
    fetched: dict[tuple[int, int, int], Tensor] = {}  # (engine, slot, position) -> table rows
    stale: set[tuple[int, int, int]] = set()

    def change(engine: Any, slot: int, before: int, length: int) -> None:
        stale.update((id(engine), slot, p) for p in range(length, before))

    def wrap(old: Any, engine: Any) -> Any:
        def engram_hash(
            hashes: Tensor, ngram_row: Any, ngram: Any, constants: Any, rows: Any, **more: Any
        ) -> None:
            old(hashes, ngram_row, ngram, constants, rows, **more)
            for t in live(rows).nonzero().flatten().tolist():
                key = (id(engine), int(rows.slots[t]), int(rows.positions[t]))
                if key in stale:
                    stale.discard(key)
                    hashes[t] = fetched[key]
                fetched[key] = hashes[t].clone()

        return engram_hash

    after_rollback(patch, change)
    patch.op("engram_hash", wrap)


# release and reuse


@mutation("V1")
def one_kind_not_released(patch: Patch) -> None:
    patch.seam("release_kinds", lambda old: lambda kinds: tuple(k for k in old(kinds) if k != "pending"))


@mutation("F84")
def pages_of_the_committed_length(patch: Patch) -> None:
    size = [16]
    patch.built(lambda engine: size.__setitem__(0, engine.page_tokens))
    patch.seam(
        "pages_to_release",
        lambda old: lambda pages, length: old(pages, length)[: -(-length // size[0])],
    )


@mutation("L12")
def failed_allocation_keeps(patch: Patch) -> None:
    patch.seam("undo_allocation", lambda old: lambda taken: [])


@mutation("F90")
def freed_twice(patch: Patch) -> None:
    def change(engine: Any) -> None:
        pool = engine.pool
        release = pool.release

        def released(tenant: Any) -> Any:
            answer = release(tenant)
            pool.slots._free.append(tenant.slot)
            return answer

        pool.release = released

    patch.built(change)


@mutation("F91")
def nothing_released_after_an_error(patch: Patch) -> None:
    aborted: set[Any] = set()

    def step(old: Any, engine: Any) -> Any:
        def stepped(runs: Any, **more: Any) -> Any:
            try:
                return old(runs, **more)
            except Exception:
                aborted.update(run.sequence for run in runs)
                raise

        return stepped

    def close(old: Any, engine: Any) -> Any:
        def closed(sequence: Any) -> None:
            if sequence in aborted:
                engine.pool.tenants.pop(sequence, None)
            else:
                old(sequence)

        return closed

    patch.verb("step", step)
    patch.verb("close", close)


@mutation("F80")
def generation_not_compared(patch: Patch) -> None:
    def change(engine: Any) -> None:
        pool = engine.pool
        tenant_of = pool.tenant

        def tenant(handle: Any) -> Any:
            slot = getattr(handle, "slot", None)
            if handle not in pool.tenants and slot is not None:
                for other in pool.tenants.values():
                    if other.slot == slot:
                        return other
            return tenant_of(handle)

        pool.tenant = tenant

    patch.built(change)


@mutation("F89")
def late_write(patch: Patch) -> None:
    waiting: list[list[Any]] = []  # [steps to go, engine, slot, contents]

    def close(old: Any, engine: Any) -> Any:
        def closed(sequence: Any) -> None:
            tenant = engine.pool.tenants.get(sequence)
            if tenant is not None and tenant.length:
                contents = [store.tensor[tenant.slot].clone() for store in rings(engine)]
                waiting.append([2, engine, tenant.slot, contents])
            old(sequence)

        return closed

    def step(old: Any, engine: Any) -> Any:
        def stepped(runs: Any, **more: Any) -> Any:
            for item in [i for i in waiting if i[1] is engine]:
                item[0] -= 1
                if item[0] == 0:
                    waiting.remove(item)
                    for store, content in zip(rings(engine), item[3], strict=True):
                        store.tensor[item[2]] = content
            return old(runs, **more)

        return stepped

    patch.verb("close", close)
    patch.verb("step", step)


@mutation("G15")
def newest_slot_freed_too(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def close(sequence: Any) -> None:
            live_before = sequence in engine.pool.tenants
            old(sequence)
            others = list(engine.pool.tenants.values())
            if live_before and others:
                engine.pool.slots._free.append(others[-1].slot)

        return close

    patch.verb("close", wrap)


@mutation("V6")
def one_of_two_updates_lost(patch: Patch) -> None:
    def change(engine: Any) -> None:
        pool = engine.pool
        write, reused = pool.write_page_table, [0]

        def write_page_table(tenant: Any) -> None:
            if pool.slots.generations[tenant.slot] > 1:
                reused[0] += 1
                if reused[0] % 2 == 0:
                    return
            write(tenant)

        pool.write_page_table = write_page_table

    patch.built(change)


# steps that fail


@mutation("G4")
def room_asked_after_the_write(patch: Patch) -> None:
    patch.seam("has_room", lambda old: lambda start, count, capacity: True)

    def wrap(old: Any, engine: Any) -> Any:
        def step(runs: Any, **more: Any) -> Any:
            tenants = [engine.pool.tenant(run.sequence) for run in runs]
            before = [(t.length, t.floor) for t in tenants]
            result = old(runs, **more)
            for run, tenant in zip(runs, tenants, strict=True):
                end = run.start + len(run.token_ids)
                if end > tenant.capacity:
                    for each, (length, floor) in zip(tenants, before, strict=True):
                        each.length, each.floor = length, floor
                    raise CapacityError(
                        field="run",
                        expected=f"an end of at most {tenant.capacity}",
                        actual=end,
                        hint="too late",
                    )
            return result

        return step

    patch.verb("step", wrap)


@mutation("L3")
def failed_step_counts(patch: Patch) -> None:
    def change(engine: Any) -> None:
        def _put_back(admitted: Any, *given: Any) -> None:
            for run in admitted:
                run.tenant.length = run.end

        engine._put_back = _put_back

    patch.built(change)
