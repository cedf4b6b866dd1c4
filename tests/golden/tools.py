"""Golden cases that a test has changed on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from golden.cases import OFFICIAL, Case, load_case

TIES = OFFICIAL / "i_ties_fp8fp4_p9.safetensors"
UNDERFILL = OFFICIAL / "i_candidate_underfill_fp8fp4_p9.safetensors"
YARN = OFFICIAL / "e_yarn_bf16_p17.safetensors"


def changed(path: Path, name: str, change: Callable[[Tensor], None]) -> Case:
    """The case of a file with one of its tensors changed in place."""
    case = load_case(path)
    tensor = case.tensors[name].clone()
    change(tensor)
    return replace(case, tensors={**case.tensors, name: tensor})
