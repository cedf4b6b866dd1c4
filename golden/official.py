"""The manifest of the official goldens: what each file is and which paths it takes; verification asserts both.

    python -m golden.official        writes golden/official/manifest.json anew

The files themselves can't be made here: they come from the release's own code (official/NOTE.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from golden.cases import OFFICIAL, case_paths, load_case
from golden.manifest import FORMAT, checksum, read_manifest, sha256
from golden.verify import CaseResult, verify_case

WHY: Mapping[str, str] = {
    "units": "quantisers with edge cases, products, Sinkhorn of 1, 2 and 20 iterations, attention with an empty row",
    "c_len_bf16_p1": "a prompt of one token, then 24 steps: every role from its emptiest state; bf16 weights",
    "d_batch3_fp8fp4_p16": "three sequences at once; fp8 dense and fp4 expert weights",
    "e_yarn_bf16_p17": "YaRN with a short original context",
    "f_dspark_fp8fp4_p9": "the DSpark draft stages beside the stack",
    "g_large_fp8fp4_p16": "large activations: the SwiGLU clamps and the saturation of the formats matter",
    "i_candidate_underfill_fp8fp4_p9": "fewer candidate rows than top-k: what the release keeps then",
    "i_ties_fp8fp4_p9": "exact ties of index scores",
    "j_full_topk_bf16_p17": "top-k covers every row",
    "weights_bf16": "weights that the bf16 cases share",
    "weights_fp8fp4": "weights that the fp8 and fp4 cases share",
}


def entry(path: Path, result: CaseResult | None) -> dict[str, Any]:
    """One file's record; a file of weights alone has no result and no coverage."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: checksum(file.get_tensor(name)) for name in sorted(file.keys())}
        meta = json.loads((file.metadata() or {}).get("meta", "{}"))
    case = None if result is None else load_case(path)
    return {
        "sha256": sha256(path.read_bytes()),
        "bytes": path.stat().st_size,
        "why": WHY[path.stem],
        "config_digest": None if case is None or case.is_units else case.config.digest(),
        "seed": meta.get("seed"),
        "precision": "the release's own code",
        "made_with": {"torch": meta.get("torch"), "release": "dba1be0a40aa45a94ad051997016db3960a90277"},
        "coverage": {} if result is None else result.paths,
        "tensors": tensors,
    }


def problems(results: Iterable[CaseResult], folder: Path = OFFICIAL) -> list[str]:
    """What differs between the manifest and the files or the paths that verification took; empty when nothing."""
    files = read_manifest(folder / "manifest.json")["files"]
    found = []
    for name in sorted({path.name for path in folder.glob("*.safetensors")} ^ set(files)):
        found.append(f"{name}: {'no such file' if name in files else 'not in the manifest'}")
    for name, held in files.items():
        path = folder / name
        if path.exists() and sha256(path.read_bytes()) != held["sha256"]:
            found.append(f"{name}: the file's sha256 is not the manifest's")
    for result in results:
        held = files.get(result.path.name, {}).get("coverage", {})
        moved = [path for path, count in result.paths.items() if held.get(path) != count]
        found += [
            f"{result.case}: {path} taken {result.paths[path]} times, {held.get(path)} in the manifest"
            for path in moved
        ]
    return found


def main() -> None:
    results = {path: verify_case(load_case(path), free=False) for path in case_paths([OFFICIAL])}
    files = {path.name: entry(path, results.get(path)) for path in sorted(OFFICIAL.glob("*.safetensors"))}
    text = json.dumps({"format": FORMAT, "files": files}, indent=1)
    (OFFICIAL / "manifest.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
