"""What a step may be asked: every run is checked before anything changes, and the error names the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optimized import seams
from optimized.state_pool import StatePool, Tenant
from reference.config import V41Config
from reference.errors import CapacityError, ConfigError, InputError, StateError
from reference.input_check import check_step, checked_tokens, image_flags


@dataclass(frozen=True)
class Admitted:
    """One run of a step, checked: consecutive tokens of a sequence from `start`, its length."""

    tenant: Tenant
    start: int
    token_ids: tuple[int, ...]
    image_mask: tuple[bool, ...]

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + self.count


def admit(pool: StatePool, config: V41Config, runs: Sequence[Any], max_rows: int) -> list[Admitted]:
    """Raises InputError, StateError or CapacityError; changes nothing."""
    check_step(runs)
    admitted: list[Admitted] = []
    for i, run in enumerate(runs):
        field = f"runs[{i}]"
        tenant = pool.tenant(run.sequence)
        if any(tenant is other.tenant for other in admitted):
            raise InputError(
                field=f"{field}.sequence",
                expected="each sequence once in a step",
                actual=run.sequence,
                hint="put consecutive tokens of a sequence into one run",
            )
        admitted.append(_checked(run, tenant, config, field))
    rows = sum(run.count for run in admitted)
    if rows > max_rows:
        raise InputError(
            field="rows",
            expected=f"at most {max_rows}, the largest bucket",
            actual=rows,
            hint="split the step: prefill in chunks, or build the engine with a larger bucket",
        )
    for i, admitted_run in enumerate(admitted):
        check_room(f"runs[{i}]", admitted_run.start, admitted_run.count, admitted_run.tenant.capacity)
    return admitted


def check_room(field: str, start: int, count: int, capacity: int) -> None:
    """CapacityError if a run would end past the capacity of its sequence."""
    if not seams.has_room(start, count, capacity):
        raise CapacityError(
            field=field,
            expected=f"an end of at most the sequence's capacity, {capacity}",
            actual=start + count,
            hint="open the sequence with a larger capacity, or restore a snapshot into one",
        )


def _checked(run: Any, tenant: Tenant, config: V41Config, field: str) -> Admitted:
    if isinstance(run.start, bool) or not isinstance(run.start, int) or run.start != tenant.length:
        raise StateError(
            field=f"{field}.start",
            expected=f"the sequence's length, {tenant.length}",
            actual=run.start,
            hint="roll back first, or step the tokens in between",
        )
    token_ids = checked_tokens(run.token_ids, config.vocab_size, f"{field}.token_ids")
    mask = getattr(run, "image_mask", None)
    image = image_flags(token_ids, mask, config.image_token_id, f"{field}.image_mask")
    return Admitted(tenant, run.start, token_ids, image)


def checked_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Row counts of captured steps, ascending. Raises ConfigError."""
    if not buckets or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in buckets):
        raise ConfigError(
            field="buckets",
            expected="at least one row count of 1 or more",
            actual=tuple(buckets),
            hint="name the row counts that steps are padded to, for example (1, 2, 4, 8)",
        )
    return tuple(sorted(set(buckets)))
