"""Record the timing noise that tests/reports/test_compare_runs.py replays: one op timed against itself,
in pairs.

    python -m tests.reports.record_noise        writes tests/reports/data/noise_cpu.json

Two series: the machine left alone, and with more busy processes than cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from reference.hyper_connections import sinkhorn
from reports.compare_runs import abba, wall
from reports.record import machine_info

PAIRS, INNER = 600, 5


def pairs() -> list[list[float]]:
    """[[a_us, b_us], ...] of the same call on both sides."""
    logits = torch.randn(64, 4, 4)

    def least() -> float:
        return min(wall(lambda: sinkhorn(logits, 20, 1e-6)) for _ in range(INNER)) * 1e6

    out = []
    for b_first in abba(PAIRS):
        first, second = least(), least()
        out.append([round(x, 2) for x in ((second, first) if b_first else (first, second))])
    return out


def main() -> None:
    torch.set_num_threads(1)
    quiet = pairs()
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 1)
    ]
    try:
        loaded = pairs()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    data = {
        "op": "sinkhorn, 64 rows, 20 iterations",
        "machine": machine_info(),
        "quiet": quiet,
        "loaded": loaded,
    }
    Path(__file__).with_name("data").joinpath("noise_cpu.json").write_text(
        json.dumps(data) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
