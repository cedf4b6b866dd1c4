"""Files that are no golden files give one typed error each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from golden.cases import OFFICIAL, case_paths, load_case
from reference.errors import InputError, WeightsError
from tests.golden.tools import TIES


def test_truncated_file(tmp_path: Path) -> None:
    cut = tmp_path / TIES.name
    cut.write_bytes(TIES.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="a whole safetensors file"):
        load_case(cut)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64])
def test_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"x\.safetensors"):
        load_case(path)


def test_file_without_case_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(WeightsError, match="metadata"):
        load_case(path)


def test_missing_weights_file(tmp_path: Path) -> None:
    shutil.copy(TIES, tmp_path)
    with pytest.raises(WeightsError, match=r"weights_fp8fp4\.safetensors beside it"):
        load_case(tmp_path / TIES.name)


def test_places_without_golden_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such path"):
        case_paths([tmp_path / "absent"])
    with pytest.raises(InputError, match="got none"):
        case_paths([tmp_path])


def test_weight_files_are_no_cases() -> None:
    names = [path.name for path in case_paths([OFFICIAL])]
    assert names == sorted(names) and not any(name.startswith("weights_") for name in names)


def test_decode_falls_back_where_the_repaired_run_is_equal() -> None:
    case = load_case(TIES)
    assert "decfix.L0.stream" not in case.tensors
    assert torch.equal(case.rows("decfix", "L0.stream"), case.rows("dec", "L0.stream"))
    assert case.rows("dec", "L0.ffn_out") is None  # recorded in the repaired run alone
