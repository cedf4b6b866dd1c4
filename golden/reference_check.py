"""Verification of the reference goldens: the files are what the manifest says, and the reference still computes them.

files       sha256, tensor checksums, config digest, the drawn weights' digests
results     every case run again on the recorded inputs of each layer: bf16 values and choices equal, fp32 and float64
            to their last places; on another processor or library the limits of the golden verification hold instead
coverage    the paths of the manifest are taken again, and each path by some case
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load

from golden.compare import Moved, moved
from golden.coverage import COUNTERS, coverage
from golden.generate import REFERENCE, GoldenCase, read_cases, run_case
from golden.manifest import checksum, environment, read_manifest, sha256, weights_vector

# what only some machines' arithmetic explains is judged by limits instead of equality
CALL_COLUMN = "in.call"  # verification makes one call of a sequence


@dataclass
class FileResult:
    """What one file gave: `problems` in words; `moved`: tensors that the reference computes otherwise now."""

    name: str
    problems: list[str] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems and not self.moved

    @property
    def message(self) -> str:
        """One line: the first thing wrong, tensor and place included."""
        if self.problems:
            return f"{self.name}: {self.problems[0]}"
        return f"{self.name}: {self.moved[0].text()}" if self.moved else f"{self.name}: as recorded"


def verify_reference(
    folder: Path = REFERENCE,
    names: Iterable[str] | None = None,
    *,
    progress: Callable[[FileResult], None] = lambda result: None,
) -> list[FileResult]:
    """Every case of the folder (or these). A file without a case, or a case without a file, is a problem of its own."""
    cases = read_cases(folder / "cases.json")
    manifest = read_manifest(folder / "manifest.json")
    wanted = list(names) if names is not None else list(cases)
    results = []
    for name in wanted:
        began = time.perf_counter()
        result = verify_file(folder, cases[name], manifest["files"].get(cases[name].file))
        result.seconds = time.perf_counter() - began
        progress(result)
        results.append(result)
    if names is None:
        results.append(verify_whole(folder, cases, manifest, results))
    return results


def verify_file(folder: Path, case: GoldenCase, entry: Mapping[str, Any] | None) -> FileResult:
    """One file against its manifest entry and against a new run."""
    result = FileResult(case.name)
    path = folder / case.file
    if entry is None or not path.exists():
        missing = "manifest entry" if entry is None else "file"
        result.problems.append(f"no {missing}; run `dsv41 golden generate {case.name}`")
        return result
    data = path.read_bytes()
    if sha256(data) != entry["sha256"]:
        result.problems.append("the file's sha256 is not the manifest's: it was changed, or cut in transport")
        return result
    if case.model_config().digest() != entry["config_digest"]:
        result.problems.append(
            "the configuration's digest is not the manifest's: a constant of the case has changed"
        )
    stored = load(data)
    wrong = [name for name, tensor in stored.items() if checksum(tensor) != entry["tensors"].get(name)]
    if wrong:
        result.problems.append(f"tensor checksums differ from the manifest: {', '.join(wrong[:3])}")
    run = run_case(case, stored)
    loose = entry["made_with"] != environment()
    expected = {name: tensor for name, tensor in stored.items() if name != CALL_COLUMN}
    actual = {name: tensor for name, tensor in run.tensors.items() if name != CALL_COLUMN}
    result.moved = moved(expected, actual, exact=False, loose=loose)
    result.coverage = coverage(case, run)
    if not loose and not result.moved and result.coverage != entry["coverage"]:
        differing = [k for k, v in result.coverage.items() if v != entry["coverage"].get(k)]
        result.problems.append(f"coverage counters moved: {', '.join(differing)}")
    return result


def verify_whole(
    folder: Path, cases: Mapping[str, GoldenCase], manifest: Mapping[str, Any], results: Iterable[FileResult]
) -> FileResult:
    """What only the whole set can show: drawn weights, paths never taken, files that nobody declares."""
    whole = FileResult("whole set")
    began = time.perf_counter()
    recorded = manifest["weights"]
    whole.problems += [
        f"the weights' generator moved: {name} has other bytes for the same name and seed"
        for name, digest in weights_vector().items()
        if recorded.get(name) != digest
    ]
    known = {case.file for case in cases.values()}
    strays = {path.name for path in folder.glob("*.safetensors")} | set(manifest["files"])
    whole.problems += [f"{name} belongs to no case of cases.json" for name in sorted(strays - known)]
    counted = [result.coverage for result in results if result.coverage]
    for path in COUNTERS if counted else ():
        if not any(c.get(path, 0) for c in counted):
            whole.problems.append(f"no case took the path: {path}")
    whole.seconds = time.perf_counter() - began
    return whole
