"""Making, comparing and listing the reference goldens.

A file whose tensors moved is overwritten only with a reason, which the manifest keeps together with what moved: a
golden that can be refreshed by habit guards nothing.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load

from golden.cases import OFFICIAL
from golden.compare import Moved, moved
from golden.generate import GENERATOR_VERSION, REFERENCE, GoldenCase, generate, read_cases
from golden.manifest import entry, read_manifest, sha256, weights_vector, write_manifest

TESTS = Path(__file__).parent.parent / "tests"
FAMILY_MARK = "GOLDEN_FAMILY"  # a test module that goes over all files of a family says so in this constant


@dataclass
class Outcome:
    """One case made anew. status: new | same | moved (not written) | overwritten."""

    case: GoldenCase
    status: str
    moved: list[Moved] = field(default_factory=list)
    note: str = ""


def difference(case: GoldenCase, folder: Path = REFERENCE) -> list[Moved]:
    """Which tensors of the stored file a new run gives otherwise; every one is "new" where there is no file."""
    path = folder / case.file
    data, _ = generate(case)
    made = load(data)
    return moved(load(path.read_bytes()) if path.exists() else {}, made)


def make(
    names: Iterable[str] | None = None, *, reason: str = "", folder: Path = REFERENCE, keep_going: bool = True
) -> list[Outcome]:
    """Generate cases into the folder and its manifest. A file that moved stays as it is unless there is a reason."""
    cases = read_cases(folder / "cases.json")
    manifest = folder / "manifest.json"
    known = read_manifest(manifest) if manifest.exists() else {"files": {}, "weights": {}}
    files: dict[str, Any] = dict(known["files"])
    outcomes = []
    for name in names if names is not None else cases:
        outcomes.append(_make_one(cases[name], files, reason, folder))
    if names is None:
        files = {f: e for f, e in files.items() if f in {case.file for case in cases.values()}}
    # the weights' digests are a pin too: they move with a reason or not at all
    pinned = known["weights"]
    drawn = weights_vector()
    write_manifest(files, manifest, drawn if reason or not pinned else pinned)
    return outcomes


def _make_one(case: GoldenCase, files: dict[str, Any], reason: str, folder: Path) -> Outcome:
    path = folder / case.file
    data, run = generate(case)
    held = files.get(case.file)
    if held is not None and path.exists() and sha256(path.read_bytes()) == held["sha256"] == sha256(data):
        return Outcome(case, "same")
    made = entry(case, data, run)
    if held is None or not path.exists():
        path.write_bytes(data)
        files[case.file] = made | {"changes": [] if held is None else held["changes"]}
        return Outcome(case, "new")
    difference = moved(load(path.read_bytes()), load(data))
    if not reason:
        note = "" if difference else "the values are the same, but not the bytes (metadata or types)"
        return Outcome(case, "moved", difference, note)
    change = {
        "reason": reason,
        "generator": GENERATOR_VERSION,
        "before": held["sha256"],
        "moved": [m.tensor for m in difference],
        "first": difference[0].text() if difference else "metadata only",
    }
    path.write_bytes(data)
    files[case.file] = made | {"changes": [*held["changes"], change]}
    return Outcome(case, "overwritten", difference)


@dataclass(frozen=True)
class Listed:
    """One golden file of either family."""

    family: str
    name: str
    bytes: int
    why: str
    coverage: Mapping[str, int]
    tests: tuple[str, ...]


def listing(folder: Path = REFERENCE, official: Path = OFFICIAL, tests: Path = TESTS) -> list[Listed]:
    """Every golden file with the tests that use it; a file that no test uses guards nothing."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(tests.rglob("test_*.py"))}
    families = {path.name: _families(text) for path, text in sources.items()}

    def users(family: str, name: str) -> tuple[str, ...]:
        by_name = {path.name for path, text in sources.items() if name in text}
        return tuple(sorted(by_name | {file for file, marked in families.items() if family in marked}))

    found = []
    entries = read_manifest(folder / "manifest.json")["files"] if (folder / "manifest.json").exists() else {}
    for case in read_cases(folder / "cases.json").values():
        held = entries.get(case.file, {})
        size, counted = held.get("bytes", 0), held.get("coverage", {})
        found.append(Listed("reference", case.name, size, case.why, counted, users("reference", case.name)))
    notes = official / "manifest.json"
    reasons = json.loads(notes.read_text(encoding="utf-8")).get("files", {}) if notes.exists() else {}
    for path in sorted(official.glob("*.safetensors")):
        held = reasons.get(path.name, {})
        why, counted = str(held.get("why", "")), held.get("coverage", {})
        found.append(
            Listed("official", path.stem, path.stat().st_size, why, counted, users("official", path.stem))
        )
    return found


def _families(text: str) -> set[str]:
    """The values of GOLDEN_FAMILY in a test module: a string or a tuple of strings."""
    if FAMILY_MARK not in text:
        return set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == FAMILY_MARK for t in node.targets
        ):
            value = ast.literal_eval(node.value)
            return {value} if isinstance(value, str) else set(value)
    return set()
