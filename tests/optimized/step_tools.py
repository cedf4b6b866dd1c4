"""A model of the toy stack over a pool, recorded steps, and parts of a recorded launch cut out of its rows."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from optimized.launch import Launch
from optimized.layer import Flow
from optimized.model import OptimizedModel
from optimized.state_pool import StatePool
from optimized.step import COLUMNS, HostTable, Rows, RunRows
from reference.config import V41Config
from reference.weights import RandomWeights

TOKENS = torch.randint(0, 256, (4, 96), generator=torch.Generator().manual_seed(11)).tolist()


TOY = V41Config.toy()


@lru_cache(maxsize=8)
def weights(config: V41Config = TOY) -> RandomWeights:
    return RandomWeights(config, 5)


def new_model(
    sequences: int = 4, device: str = "cpu", config: V41Config = TOY, **options: Any
) -> OptimizedModel:
    """The toy stack over `sequences` slots of 96 tokens, slot i open for test sequence i."""
    torch.set_num_threads(1)
    pool = StatePool(
        config,
        max_sequences=sequences,
        n_pages=6 * sequences,
        page_tokens=16,
        ring_spare=8,
        max_capacity=96,
        device=device,
    )
    model = OptimizedModel(config, weights(config), pool, **options)
    for _ in range(sequences):
        pool.open(96)
    return model


def run(slot: int, start: int, count: int, sequence: int | None = None) -> RunRows:
    """Tokens [start, start + count) of a test sequence (that of the slot's number by default)."""
    which = slot if sequence is None else sequence
    return RunRows(slot, start, TOKENS[which][start : start + count])


def state_of(model: OptimizedModel) -> list[Tensor]:
    return [store.tensor.clone() for store in model.pool.stores]


def recorded_step(model: OptimizedModel, runs: list[RunRows]) -> list[Launch]:
    """The launches of a step, with its table uploaded, none of them run."""
    host = HostTable.of(runs)
    ws = model._workspace(host, replay=False)
    ws.rows.upload(host)
    model.launch.begin_recording()
    model.forward(Flow(ws, model.launch, host.n_rows))
    return model.launch.end_recording()


def cut_rows(rows: Rows, part: slice) -> Rows:
    """The plan of some rows of a step: what an op that reads this row table alone needs."""

    def cut(value: Any, dim: int = 0) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value[(slice(None),) * dim + (part,)].clone()

    per_row = {f.name for f in fields(Rows) if f.init} - {"frequencies", "page_table", "ratios"}
    dims = {"table": 1, "rope_cos": 1, "rope_sin": 1, "turn": 2}
    changed = {name: cut(getattr(rows, name), dims.get(name, 0)) for name in per_row}
    ratios = {
        r: replace(plan, **{f.name: cut(getattr(plan, f.name)) for f in fields(plan)})
        for r, plan in rows.ratios.items()
    }
    small = replace(rows, **changed, ratios=ratios)
    assert small.table.shape[0] == len(COLUMNS)
    return small
