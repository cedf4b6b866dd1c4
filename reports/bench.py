"""Running the benchmarks, and holding them against a baseline.

The suite is tests/benchmarks, run by pytest-benchmark in a process of its own. Against a baseline there are two ways:

    paired      the baseline's commit is checked out beside (git worktree) and both run again in turn, B A, A B, ...:
                each pair of neighbouring processes gives one ratio, and drift of the machine cancels
    recorded    that commit is not at hand: the new processes' medians against the recorded ones, with a wider
                tolerance, since nothing shows how far two processes of the same code lie apart
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reports.compare_runs import Comparison, abba, compare_files, compare_paired, same_machine
from reports.record import HISTORY, Run, load_history, machine_info, read_run

ROOT = Path(__file__).parent.parent
SUITE = Path("tests") / "benchmarks"
LOCAL = ROOT / "reports" / "out" / "baseline.json"
PAIRS = 6
RECORDED_TOLERANCE = (
    0.10  # two processes of the same code differ by several per cent; samples of one don't show it
)
PROCESS_TIMEOUT = 900


class BenchError(RuntimeError):
    """A benchmark can't be run or compared here; the text says why and what to do."""


def run_suite(out: Path, *, select: str = "", root: Path = ROOT, slow: bool = False) -> Run:
    """The suite once, in a process of its own, into a pytest-benchmark JSON. slow: what takes minutes too."""
    if not (root / SUITE).is_dir():
        raise BenchError(f"no {SUITE} under {root}: benchmarks run from a checkout of the repository")
    command = [sys.executable, "-m", "pytest", str(SUITE), "-q", "--benchmark-enable", "--benchmark-only"]
    command += ["-p", "no:cacheprovider", f"--benchmark-json={out.resolve()}"]
    command += [*(["-k", select] if select else []), *(["-m", "not gpu"] if slow else [])]
    out.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PROCESS_TIMEOUT)
    if done.returncode != 0 or not out.exists():
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise BenchError(f"the benchmarks failed (pytest exit status {done.returncode}):\n{tail}")
    return read_run(out)


def run_many(
    out: Path,
    processes: int,
    select: str = "",
    tell: Callable[[str], None] = lambda text: None,
    slow: bool = False,
) -> Run:
    """Several processes merged into one file: `blocks_us` of each figure holds their medians."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.json" for i in range(processes)]
        for i, path in enumerate(paths):
            tell(f"process {i + 1} of {processes}")
            run_suite(path, select=select, slow=slow)
        merged = merge([json.loads(path.read_text(encoding="utf-8")) for path in paths])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    return read_run(out)


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The first run's file with the medians of all processes beside each figure; a check failed once has failed."""
    first = runs[0]
    for entry in first["benchmarks"]:
        same = [b for run in runs for b in run["benchmarks"] if b["fullname"] == entry["fullname"]]
        entry["extra_info"]["blocks_us"] = [b["stats"]["median"] * 1e6 for b in same]
        failed = [b for b in same if not (b["extra_info"].get("correctness") or {}).get("passed")]
        if failed:
            entry["extra_info"]["correctness"] = failed[0]["extra_info"].get("correctness")
    return first


def here() -> Run:
    """This machine as an empty run, to compare with."""
    import torch

    machine = machine_info("cuda" if torch.cuda.is_available() else "cpu")
    return Run(Path(), "", "", None, machine, ())


def find_baseline(history: Path = HISTORY, local: Path = LOCAL) -> Path | None:
    """The local baseline, or the newest run of the history that was measured on a machine like this one."""
    if local.exists():
        return local
    mine = here()
    fitting = (
        [run for run in load_history(history) if not same_machine(run, mine)] if history.is_dir() else []
    )
    return fitting[-1].path if fitting else None


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The commit's files in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "baseline"
        _git("worktree", "add", "--detach", str(place), commit)
        try:
            yield place
        finally:
            _git("worktree", "remove", "--force", str(place))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=120
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BenchError(
            f"git {' '.join(arguments[:2])} failed: {getattr(error, 'stderr', error)}"
        ) from error
    return done.stdout


def has_suite(commit: str) -> bool:
    """Whether git knows the commit and it holds the benchmarks."""
    try:
        return bool(_git("ls-tree", "--name-only", commit, str(SUITE)).strip())
    except BenchError:
        return False


def against(
    baseline: Path,
    *,
    pairs: int = PAIRS,
    select: str = "",
    out: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """Compare this checkout with a baseline file. BenchError: another machine, or nothing in common."""
    base = read_run(baseline)
    differs = same_machine(base, here())
    if differs:
        raise BenchError(
            f"{baseline} was measured elsewhere ({differs}); make a baseline on this machine first"
        )
    if base.dirty is False and has_suite(base.commit):
        with worktree(base.commit) as place:
            found = paired(place, ROOT, pairs=pairs, select=select, tell=tell)
    else:
        tell(f"commit {base.commit[:10]} is not at hand: comparing with the recorded times")
        with tempfile.TemporaryDirectory() as folder:
            new = run_many(out or Path(folder) / "new.json", 3, select, tell)
        found = compare_files(base, new, tolerance=RECORDED_TOLERANCE)
    if not found:
        raise BenchError(f"{baseline} and this checkout have no figure in common whose check passed")
    return found


def paired(
    a: Path, b: Path, *, pairs: int = PAIRS, select: str = "", tell: Callable[[str], None] = lambda text: None
) -> list[Comparison]:
    """Two checkouts in turn, one process each; the least time of a process stands for it (load only adds)."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, b_first in enumerate(abba(pairs)):
            tell(f"pair {i + 1} of {pairs}")
            runs: dict[bool, Run] = {}
            for is_b in (True, False) if b_first else (False, True):
                runs[is_b] = run_suite(Path(folder) / f"{i}{is_b}.json", select=select, root=b if is_b else a)
            old = {record.key: record for record in runs[False].records if record.passed}
            for record in runs[True].records:
                if record.passed and record.key in old:
                    first, second = times.setdefault(record.name, ([], []))
                    first.append(min(old[record.key].samples_us))
                    second.append(min(record.samples_us))
    return [compare_paired(name, x, y) for name, (x, y) in times.items() if len(x) >= 2]
