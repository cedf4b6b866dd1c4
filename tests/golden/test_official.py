"""Every golden file that comes with the package holds, and every path is taken by one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden.cases import OFFICIAL, case_paths, load_case
from golden.paths import PATHS
from golden.verify import CaseResult, missing_paths, verify_case

GOLDEN_FAMILY = "official"  # every file of golden/official is used here
FILES = case_paths([OFFICIAL])
RESULTS: dict[Path, CaseResult] = {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_file_holds(path: Path) -> None:
    result = verify_case(load_case(path), free=False)
    RESULTS[path] = result
    assert result.measures
    assert not result.failures, "\n".join(m.message for m in result.failures)


def test_every_path_is_taken() -> None:
    results = [RESULTS.get(path) or verify_case(load_case(path), free=False) for path in FILES]
    assert missing_paths(results) == []
    assert missing_paths([]) == list(PATHS)


def test_committed_subset_is_small() -> None:
    assert sum(path.stat().st_size for path in OFFICIAL.glob("*")) <= 20_000_000


def test_large_activations_hit_as_many_clamps_as_the_release_counted() -> None:
    path = OFFICIAL / "g_large_fp8fp4_p16.safetensors"
    result = RESULTS.get(path) or verify_case(load_case(path), free=False)
    counted = load_case(path).meta["clamped"]
    # one element within a rounding of the limit may fall on its other side
    assert abs(result.paths["clamps hit"] - (counted["up"] + counted["gate"])) <= 2


def test_free_run_is_reported_without_a_limit() -> None:
    result = verify_case(load_case(OFFICIAL / "j_full_topk_bf16_p17.safetensors"))
    assert result.free is not None and result.ok
    assert 0 < result.free.stream_worst < 1 and result.free.argmax_agree > 0.5
