"""The detection matrix: every fault on trial, every check on the correct engine, in as many processes as there are
cores.

    matrix = run_matrix(ids, seeds=20)      matrix.to_dict(), matrix.problems()

A fault may be caught by any one of its named detectors; with `full` every check is tried on every fault, which
shows what each of them sees but takes hours on the whole catalogue.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from harness.check import discover
from harness.faults.catalogue import BY_ID, CATALOGUE, FAMILIES, Fault, find
from harness.faults.trial import SEARCHES, Trial, false_alarms, try_fault

Progress = Callable[[str, int, int], None]  # what was done last, how many are done, of how many
MOST_OPERATIONS, MEDIAN_OPERATIONS = 10, 5  # of a shrunk repro


@dataclass
class Matrix:
    """Trials by fault id. alarms: findings on the correct engine by seed. extra: checks that see a fault (`full`)."""

    engine: str
    config: str
    seed: int
    trials: dict[str, Trial] = field(default_factory=dict)
    alarms: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    extra: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: int = 0  # jobs that the budget had no time for
    seconds: float = 0.0

    def with_status(self, status: str) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.status == status]

    @property
    def operations(self) -> list[int]:
        return sorted(trial.operations for trial in self.with_status("caught"))

    def problems(self) -> list[str]:
        """Everything that keeps the gate shut, in words."""
        found = []
        for trial in self.trials.values():
            if trial.status == "missed":
                found.append(f"{trial.id} was not found by any of {', '.join(BY_ID[trial.id].detectors)}")
            if trial.status == "broken":
                found.append(f"the mutation of {trial.id} is broken: {trial.message}")
            if trial.control is False:
                found.append(f"{trial.id} is found by {trial.check} without its comparison")
            if trial.status == "caught" and trial.operations > MOST_OPERATIONS:
                found.append(
                    f"{trial.id} takes {trial.operations} operations to show, more than {MOST_OPERATIONS}"
                )
        for seed, findings in self.alarms.items():
            found += [f"false alarm with seed {seed}: {f['check']}: {f['message']}" for f in findings]
        if self.left_out:
            found.append(f"{self.left_out} faults and seeds were not begun within the budget")
        return found

    def detected_by(self, fault: str) -> dict[str, str]:
        """Detector by check that found the fault."""
        trial = self.trials[fault]
        own = {trial.check: trial.detector} if trial.status == "caught" else {}
        return {**self.extra.get(fault, {}), **own}

    def by_check(self) -> Counter[str]:
        return Counter(trial.check for trial in self.with_status("caught"))

    def to_dict(self) -> dict[str, Any]:
        operations = self.operations
        return {
            "format": 1,
            "made": time.strftime("%Y-%m-%d %H:%M:%S"),
            "when": time.strftime("%Y-%m-%d"),
            "engine": self.engine,
            "config": self.config,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "totals": {
                "faults": len(self.trials),
                **{s: len(self.with_status(s)) for s in ("caught", "missed", "broken", "out_of_reach")},
                "median operations": statistics.median(operations) if operations else None,
                "most operations": operations[-1] if operations else None,
                "caught by": dict(self.by_check()),
                "seeds of the correct engine": len(self.alarms),
                "false alarms": sum(len(found) for found in self.alarms.values()),
            },
            "problems": self.problems(),
            "faults": [self._row(BY_ID[name]) for name in self.trials],
            "alarms": {str(seed): found for seed, found in self.alarms.items() if found},
        }

    def _row(self, fault: Fault) -> dict[str, Any]:
        trial = self.trials[fault.id]
        about = {
            "id": fault.id,
            "family": FAMILIES[fault.family],
            "reports": fault.reports,
            "symptom": fault.symptom,
            "cause": fault.cause,
            "trigger": fault.trigger,
            "detectors": list(fault.detectors),
            "seam": fault.seam,
            "change": fault.change,
            "out_of_reach": fault.out_of_reach,
        }
        return {**about, **trial.to_dict(), "detected_by": self.detected_by(fault.id)}


def run_matrix(
    ids: Iterable[str] | None = None,
    *,
    engine: str = "optimized",
    config: str = "toy",
    seed: int = 0,
    seeds: int = 20,
    control: bool = False,
    full: bool = False,
    budget: float = float("inf"),
    workers: int | None = None,
    progress: Progress = lambda last, done, total: None,
) -> Matrix:
    """Try the faults (default: all) and `seeds` seeds of the correct engine; nothing begins after `budget` seconds."""
    began = time.perf_counter()
    faults = find(list(ids) if ids is not None else None)
    matrix = Matrix(engine, config, seed)
    jobs: list[tuple[Any, ...]] = [("fault", f.id, engine, config, seed, control) for f in faults]
    jobs += [("seed", seed + i, engine, config) for i in range(seeds)]
    if full:
        names = [name for name in discover() if name not in SEARCHES]
        jobs += [
            ("cell", f.id, name, engine, config, seed) for f in faults if not f.out_of_reach for name in names
        ]
    # the long ones first, so that no core waits at the end
    jobs.sort(key=lambda job: job[0] != "seed")
    for done, (job, answer) in enumerate(answers(jobs, workers, began + budget), start=1):
        if answer is None:
            matrix.left_out += 1
            if job[0] == "fault":
                matrix.trials[job[1]] = Trial(job[1], "not_run")
        elif job[0] == "fault":
            matrix.trials[job[1]] = Trial.from_dict(answer)
        elif job[0] == "seed":
            matrix.alarms[job[1]] = answer
        elif answer:
            matrix.extra.setdefault(job[1], {})[job[2]] = answer
        progress(f"seed {job[1]}" if job[0] == "seed" else str(job[1]), done, len(jobs))
    order = [fault.id for fault in CATALOGUE]
    matrix.trials = dict(sorted(matrix.trials.items(), key=lambda item: order.index(item[0])))
    matrix.alarms = dict(sorted(matrix.alarms.items()))
    matrix.seconds = time.perf_counter() - began
    return matrix


def answers(
    jobs: list[tuple[Any, ...]], workers: int | None, deadline: float
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Jobs with their answers, as they come; None for one that the deadline left out. One core: in this process."""
    count = min(workers or os.cpu_count() or 1, len(jobs))
    if count <= 1 or len(jobs) <= 2:
        for job in jobs:
            yield job, work(job) if time.perf_counter() < deadline else None
        return
    waiting = list(reversed(jobs))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        running: dict[Future[Any], tuple[Any, ...]] = {}
        while waiting or running:
            while waiting and len(running) < count and time.perf_counter() < deadline:
                job = waiting.pop()
                running[pool.submit(work, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
            if not running and time.perf_counter() >= deadline:
                yield from ((job, None) for job in reversed(waiting))
                return


def work(job: tuple[Any, ...]) -> Any:
    """One job, its answer as plain data."""
    import torch

    torch.set_num_threads(1)
    kind, name, *rest = job
    if kind == "fault":
        engine, config, seed, control = rest
        return try_fault(name, engine=engine, config=config, seed=seed, control=control).to_dict()
    if kind == "cell":
        check, engine, config, seed = rest
        trial = try_fault(name, engine=engine, config=config, seed=seed, only=[check], shrinking=False)
        return trial.detector if trial.status == "caught" else ""
    engine, config = rest
    return [
        f.to_dict() for result in false_alarms(name, engine=engine, config=config) for f in result.findings
    ]
