"""Launches of real steps with what the plain-torch ops made of them: the cases that every kernel is held to.

An engine on the torch backend takes a few steps; of every op a handful of launches with distinct argument
shapes and constants
is kept, its arguments copied before and after.  A kernel gets the copies from before and must leave what stands after.
Workspaces are poisoned with NaN, so an element that a kernel fails to write shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimized.engine import OptimizedEngine
from reference.config import V41Config
from reference.engine import Run
from reference.weight_source import Weights

# ops whose sums have another order than the torch form's float64: largest error relative to the largest element of the
# tensor. bf16 results may round to the neighbour (2^-8 of an element); everything else must be equal bit for bit
FP32, BF16 = 1e-5, 2.0**-7
ROUNDED = {
    "hc_mix": FP32,
    "hc_collapse": BF16,
    "hc_expand_mix": BF16,
    "hc_expand": BF16,
    "final_collapse": BF16,
    "linear": BF16,
    "linear_rope": BF16,
    "grouped_out": BF16,
    "route": FP32,
    "expert_up": BF16,
    "expert_down": BF16,
    "moe_combine": BF16,
    "engram_gate": BF16,
    "sparse_attention": BF16,
    "attn_prep": BF16,
    "compress": BF16,
    "index_scores": BF16,
}
CODES_MAY_DIFFER = 0.01  # share of quantised bytes behind a rounded sum that may be a neighbour's
SLOTS = 4


@dataclass
class Sample:
    before: list[Any]
    after: list[Any]
    constants: dict[str, Any]


def copied(args: Sequence[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


def collect(
    config: V41Config,
    weights: Weights,
    device: str,
    steps: Sequence[Sequence[tuple[int, int]]],
    most: int,
    capacity: int = 96,
) -> dict[str, list[Sample]]:
    """steps: each a list of (sequence, tokens). most: samples of one op."""
    engine = OptimizedEngine(
        config, weights, device=device, checking=True, max_sequences=SLOTS, max_tokens=capacity
    )
    found: dict[str, list[Sample]] = {}
    seen: set[tuple[Any, ...]] = set()

    def keep(name: str, op: Any) -> Any:
        def run(*args: Any, scratch: Any = None, **constants: Any) -> None:
            shapes = tuple(
                (tuple(a.shape), a.dtype) if isinstance(a, Tensor) else getattr(a, "kind", None) for a in args
            )
            key = (
                name,
                shapes,
                tuple(sorted((k, v) for k, v in constants.items() if not isinstance(v, Tensor))),
            )
            wanted = key not in seen and len(found.setdefault(name, [])) < most
            before = copied(args) if wanted else []
            op(*args, scratch=scratch, **constants)
            if wanted:
                seen.add(key)
                found[name].append(Sample(before, copied(args), constants))

        return run

    for name in list(engine.model.ops):
        engine.model.ops.replace(name, keep(name, engine.model.ops[name]))
    handles, at = [engine.open(capacity) for _ in range(SLOTS)], [0] * SLOTS
    for step in steps:
        runs = []
        for sequence, count in step:
            ids = tuple(
                (7 * (at[sequence] + i) ** 2 + 3 + sequence) % (config.vocab_size - 1) for i in range(count)
            )
            runs.append(Run(handles[sequence], ids, at[sequence]))
            at[sequence] += count
        engine.step(runs)
    return found


def dump_rows(name: str, argument: int, rows: int) -> int:
    """Rows of a state buffer that padding and unfinished groups write, in an order that is nobody's business."""
    if name.startswith("commit_") and argument == 0:
        return rows // (SLOTS + 1)
    return 16 if (name, argument) in (("compress", 1), ("index_key", 0)) else 0


def differences(name: str, got: Sequence[Any], sample: Sample) -> list[str]:
    """What a kernel left that differs from the torch form beyond ROUNDED."""
    problems = []
    limit = ROUNDED.get(name, 0.0)
    for i, (a, b) in enumerate(zip(sample.after, got, strict=True)):
        if not isinstance(a, Tensor):
            continue
        kept = a.shape[0] - dump_rows(name, i, a.shape[0])
        a, b = a[:kept], b[:kept]
        if a.dtype.itemsize == 1 and a.dtype is not torch.bool:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        if a.is_floating_point():
            if bool(((a == b) | (a.isnan() & b.isnan())).all()):
                continue
            if not torch.equal(a.isfinite(), b.isfinite()):
                problems.append(f"{name} argument {i}: other elements are finite")
                continue
            x, y = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
            error = float((x - y).abs().max() / x.abs().max().clamp_min(1e-30))
            if error > limit:
                problems.append(
                    f"{name} argument {i}: {error:.3g} of the largest element, allowed {limit:.3g}"
                )
        else:
            share = float((a != b).float().mean())
            if share > (CODES_MAY_DIFFER if limit and a.dtype == torch.uint8 else 0.0):
                problems.append(f"{name} argument {i}: {share:.3g} of the elements differ")
    return problems
