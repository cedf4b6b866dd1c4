"""Verification of golden files against the reference: every case, every variant, every recorded tensor.

with recorded inputs    limits hold; decisions equal or tied; stored rows equal or a code step apart
free-running            from the tokens alone: reported beside, without a limit (the stacks are chaotic:
one
                        rounding flips a code, then a selection or an expert)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from golden import measure
from golden.cases import Case, load_case
from golden.draft import verify_draft
from golden.measure import Label, Measure
from golden.paths import PATHS, paths_taken
from golden.replay import release_model, replay
from golden.stack import first_row, recorded_decisions, verify_stack
from golden.units import verify_units
from harness.compare import row_errors
from reference.engram import hash_constants

# recorded tensors that are inputs of the comparison or judges of a decision
NOT_COMPARED = frozenset(
    ["index_margin", "cand_margin", "route_margin", "latent_step", "input_ids", "token_map", "logits_all"]
)


@dataclass(frozen=True)
class FreeRun:
    """The reference from the tokens alone, beside the recorded run: no limit stands against it."""

    variant: str
    stream_worst: float
    stream_median: float
    argmax_agree: float
    selections_equal: float
    experts_equal: float


@dataclass
class CaseResult:
    """What one golden file gave."""

    case: str
    path: Path
    measures: list[Measure] = field(default_factory=list)
    paths: dict[str, int] = field(default_factory=dict)
    free: FreeRun | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(m.ok for m in self.measures)

    @property
    def failures(self) -> list[Measure]:
        return [m for m in self.measures if not m.ok]


def verify(
    paths: Iterable[Path], *, free: bool = True, progress: Callable[[CaseResult], None] = lambda result: None
) -> list[CaseResult]:
    """Every file in turn; `progress` is called after each.  Raises WeightsError for a file that cannot be
    read."""
    results = []
    for path in paths:
        result = verify_case(load_case(path), free=free)
        progress(result)
        results.append(result)
    return results


def verify_case(case: Case, *, free: bool = True) -> CaseResult:
    began = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: a second thread costs more than it gives
    try:
        result = CaseResult(case.name, case.path)
        if case.is_units:
            result.measures = verify_units(case)
        else:
            _verify_model_case(case, result, free)
    finally:
        torch.set_num_threads(threads)
    result.seconds = time.perf_counter() - began
    return result


def missing_paths(results: Iterable[CaseResult]) -> list[str]:
    """Paths that no case took.  A whole set of goldens must take all of them."""
    taken = dict.fromkeys(PATHS, 0)
    for result in results:
        for name, count in result.paths.items():
            taken[name] += count
    return [name for name, count in taken.items() if count == 0]


def _verify_model_case(case: Case, result: CaseResult, free: bool) -> None:
    result.measures += _hash_constants(case)
    for variant in case.variants:
        measures, run = verify_stack(case, variant)
        result.measures += measures + verify_draft(case, variant)
        if variant == case.variants[0]:
            result.paths = paths_taken(case, variant, release_model(case, variant), run)
    if free and case.block_layer is None:
        result.free = _free_run(case, case.variants[0])
    result.measures += _unmeasured(case, result.measures)


def _hash_constants(case: Case) -> list[Measure]:
    constants = hash_constants(case.config)
    ours = {
        "multipliers": constants.multipliers,
        "primes": constants.primes,
        "offsets": constants.offsets.flatten(1),
    }
    return [
        measure.exact(
            Label(case.name, "in", None, f"engram_{name}"), case.tensors[f"in.engram_{name}"], value
        )
        for name, value in ours.items()
        if f"in.engram_{name}" in case.tensors
    ]


def _free_run(case: Case, variant: str) -> FreeRun:
    start, last = first_row(case, variant), case.config.num_hidden_layers - 1
    run = replay(case, release_model(case, variant), variant, recorded=False)
    stream, logits = case.rows(variant, f"L{last}.stream"), case.decoded(variant, "logits")
    assert stream is not None and logits is not None
    errors = row_errors(stream[:, start:].flatten(0, 1), run.taps[f"L{last}.stream"][:, start:].flatten(0, 1))
    agree = run.taps["logits"][:, case.prompt :].argmax(-1) == logits.argmax(-1)
    equal: dict[str, list[torch.Tensor]] = {"selection": [], "moe_idx": []}
    for name, theirs in recorded_decisions(case, variant).forced.items():
        short = name.split(".")[1]
        if short in equal:
            ours = run.taps[name]
            equal[short].append((ours.sort(-1).values == theirs.sort(-1).values).all(-1)[:, start:])
    shares = {name: torch.stack(rows).double().mean().item() for name, rows in equal.items()}
    return FreeRun(
        variant,
        errors.max().item(),
        errors.median().item(),
        agree.double().mean().item(),
        shares["selection"],
        shares["moe_idx"],
    )


def _unmeasured(case: Case, measures: list[Measure]) -> list[Measure]:
    """Recorded tensors that no comparison looked at: a hole in the verification, so each is a failure."""
    compared = {re.sub(r"\[.*", "", m.name) for m in measures}
    compared |= {name.removesuffix("_final") for name in compared}
    recorded = {name.split(".", 1)[1] for name in case.tensors if not name.startswith("in.")}
    left = {
        n
        for n in recorded
        if n.removesuffix("_final") not in compared and n.split(".")[-1] not in NOT_COMPARED
    }
    note = "no comparison is written for it"
    return [
        Measure(case.name, "all", None, name, "exact", ok=False, rows=0, note=note) for name in sorted(left)
    ]
