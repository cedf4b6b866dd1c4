"""A cache of `capacity` routed experts a layer on the device, filled ahead by a prediction and, on a miss,
on demand.

`next_router`: while layer i computes its experts, layer i+1's router is run on layer i's MoE input; the
experts that it names are loaded before layer i+1 asks.  The guess decides what is near, never what is
computed: `passes` makes every expert that the real router chose present, in as many passes as the capacity
needs, and the caller's expert ops leave rows of absent experts untouched. A row's result therefore doesn't
depend on what was resident: same bits as with all experts on the device.

Reading the routing on the host is what this costs: with a cache a step can't be captured as a graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from optimized import seams
from optimized.weights import Weight, copy_row, expert, stack
from reference.config import LayerRole
from reference.errors import ConfigError
from reference.weights import Weights


@dataclass
class ExpertCounters:
    """hits, misses: experts that a layer needed and found / did not find near.  prefetched: loads caused by
    a prediction. predicted_right of predicted_needed: needed experts that the prediction had named, where
    there was one."""

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    passes: int = 0
    predicted_right: int = 0
    predicted_needed: int = 0

    @property
    def accuracy(self) -> float | None:
        return self.predicted_right / self.predicted_needed if self.predicted_needed else None

    def as_dict(self) -> dict[str, float | None]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"accuracy": self.accuracy}


@dataclass
class _LayerCache:
    role: LayerRole
    w13: Weight  # bank [capacity, 2F, D]
    w2: Weight  # bank [capacity, D, F]
    slots: Tensor  # int64 [E] on the device: bank row of each expert, -1 = not here
    resident: OrderedDict[int, int]  # expert -> bank row, least recently used first
    free: list[int]
    predicted: frozenset[int] | None = None


class ExpertCache:
    """Banks of `capacity` experts for each of the layers, least recently used out first."""

    def __init__(
        self,
        weights: Weights,
        roles: Iterable[LayerRole],
        *,
        capacity: int,
        device: torch.device,
        dense: bool,
    ) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(
                field="experts_resident",
                expected="None (all) or at least 1 expert a layer",
                actual=capacity,
                hint="experts in the cache of each layer; top-k or more avoids loading within a step",
            )
        self.weights, self.capacity, self.device, self.dense = weights, capacity, device, dense
        self.counters = ExpertCounters()
        self._host: dict[tuple[int, int], tuple[Weight, Weight]] = {}
        self._layers = {role.index: self._new_layer(role) for role in roles}

    def _new_layer(self, role: LayerRole) -> _LayerCache:
        w13, w2 = self._fetch(role, 0)
        n = min(self.capacity, role.n_experts)
        cache = _LayerCache(
            role,
            _blank_bank(w13, n, self.device),
            _blank_bank(w2, n, self.device),
            torch.full((role.n_experts,), -1, dtype=torch.int64, device=self.device),
            OrderedDict(),
            list(range(n))[::-1],
        )
        return cache

    def bank(self, layer: int) -> tuple[Weight, Weight, Tensor]:
        """(w13, w2, expert_slots) whose addresses never change."""
        cache = self._layers[layer]
        return cache.w13, cache.w2, cache.slots

    def resident(self, layer: int) -> tuple[int, ...]:
        """Experts on the device, least recently used first."""
        return tuple(self._layers[layer].resident)

    def has(self, layer: int) -> bool:
        return layer in self._layers

    def passes(self, layer: int, moe_idx: Tensor, n_rows: int) -> Iterator[None]:
        """moe_idx [T, K].  Yields once for each set of experts brought near; the caller runs its expert ops
        each time."""
        cache = self._layers[layer]
        needed = _experts(moe_idx, n_rows)
        here = [e for e in needed if e in cache.resident]
        absent = [e for e in needed if e not in cache.resident]
        self.counters.hits += len(here)
        self.counters.misses += len(absent)
        if cache.predicted is not None:
            self.counters.predicted_needed += len(needed)
            self.counters.predicted_right += len(cache.predicted & set(needed))
            cache.predicted = None
        # those already here first: a later group may then evict them
        order = here + absent
        size = len(cache.resident) + len(cache.free)
        for begin in range(0, max(1, len(order)), size):
            self._load(cache, order[begin : begin + size])
            self.counters.passes += 1
            yield

    def predict(self, layer: int, predicted: Tensor, n_rows: int) -> None:
        """predicted [T, K]: bring these experts of a coming layer near, most wanted first, as far as the
        cache holds them."""
        cache = self._layers[layer]
        named = _experts(predicted, n_rows)
        cache.predicted = frozenset(named)
        wanted = named[: len(cache.resident) + len(cache.free)]
        self.counters.prefetched += sum(e not in cache.resident for e in wanted)
        self._load(cache, wanted)

    def _load(self, cache: _LayerCache, experts: list[int]) -> None:
        for e in experts:
            if e in cache.resident:
                cache.resident.move_to_end(e)
        for e in experts:
            if e in cache.resident:
                continue
            w13, w2 = self._fetch(cache.role, e)  # may raise: nothing has been given up for it yet
            if cache.free:
                row = cache.free.pop()
            else:
                old, row = cache.resident.popitem(last=False)
                cache.slots[old] = seams.resident_slot(old, -1)
            copy_row(cache.w13, row, w13)
            copy_row(cache.w2, row, w2)
            cache.resident[e] = row
            cache.slots[e] = seams.resident_slot(e, row)

    def _fetch(self, role: LayerRole, e: int) -> tuple[Weight, Weight]:
        key = (role.index, e)
        if key not in self._host:
            self._host[key] = expert(
                self.weights, role, f"experts.{e}", torch.device("cpu"), dense=self.dense
            )
        return self._host[key]


def _experts(idx: Tensor, n_rows: int) -> list[int]:
    """Distinct experts of the live rows, most wanted first (ties: lowest id)."""
    flat = idx[:n_rows].flatten()
    ids, counts = torch.unique(flat[flat >= 0], return_counts=True)
    ranked = sorted(zip((-counts).tolist(), ids.tolist(), strict=True))
    return [e for _, e in ranked]


def _blank_bank(one: Weight, n: int, device: torch.device) -> Weight:
    """A bank of n rows of NaN bytes: an expert that was never loaded is nobody's zeros."""
    bank = stack([one] * n)

    def blank(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        moved = t.to(device)
        moved.view(torch.uint8).fill_(0xFF)
        return moved

    codes = blank(bank.codes)
    assert codes is not None
    return Weight(bank.kind, codes, blank(bank.scale), blank(bank.dense), bank.shape)
