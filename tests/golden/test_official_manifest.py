"""The manifest of the official goldens names every file as it is."""

import json
import shutil

import pytest

from golden.cases import OFFICIAL
from golden.manifest import read_manifest
from golden.official import WHY, entry, problems
from golden.paths import PATHS
from golden.verify import CaseResult

MANIFEST = read_manifest(OFFICIAL / "manifest.json")


def test_files_are_those_of_the_manifest():
    assert problems([]) == []
    assert set(WHY) == {name.removesuffix(".safetensors") for name in MANIFEST["files"]}
    assert all(e["why"] and len(e["sha256"]) == 64 and e["tensors"] for e in MANIFEST["files"].values())


def test_tensor_checksums():
    made = entry(OFFICIAL / "i_ties_fp8fp4_p9.safetensors", None)
    assert made["tensors"] == MANIFEST["files"]["i_ties_fp8fp4_p9.safetensors"]["tensors"]


def test_coverage_is_compared():
    path = OFFICIAL / "i_ties_fp8fp4_p9.safetensors"
    counted = MANIFEST["files"][path.name]["coverage"]
    assert set(counted) == set(PATHS)
    assert problems([CaseResult("i_ties", path, paths=counted)]) == []
    moved = counted | {"top-k cuts": counted["top-k cuts"] + 1}
    assert "top-k cuts" in problems([CaseResult("i_ties", path, paths=moved)])[0]


@pytest.mark.parametrize("change", ["damaged", "missing", "stray"])
def test_what_differs_is_named(tmp_path, change):
    name = "weights_fp8fp4.safetensors"
    shutil.copy(OFFICIAL / name, tmp_path)
    files = {name: MANIFEST["files"][name]}
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST | {"files": files}))
    assert problems([], tmp_path) == []
    path = tmp_path / name
    if change == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif change == "missing":
        path.unlink()
    else:
        shutil.copy(path, tmp_path / "other.safetensors")
    (found,) = problems([], tmp_path)
    assert {"damaged": "sha256", "missing": "no such file", "stray": "other"}[change] in found
