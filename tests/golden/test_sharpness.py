"""A change of a recorded tensor, or of the mathematics, fails and is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from golden import stack
from golden.cases import OFFICIAL, Case, load_case
from golden.draft import verify_draft
from golden.stack import verify_stack
from golden.units import verify_units
from golden.verify import verify_case
from reference import attention, layer
from reference.config import V41Config
from reference.model import Model
from reference.precision import Precision
from tests.golden.tools import TIES, UNDERFILL, YARN, changed

UNITS = OFFICIAL / "units.safetensors"
DSPARK = OFFICIAL / "f_dspark_fp8fp4_p9.safetensors"


def failed(case: Case, variant: str = "decfix") -> dict[str, str]:
    return {m.name: m.message for m in verify_stack(case, variant)[0] if not m.ok}


def scaled(index: tuple[int, ...], factor: float) -> Callable[[Tensor], None]:
    def change(x: Tensor) -> None:
        x[index] *= factor

    return change


def stored(index: tuple[int, ...], value: float) -> Callable[[Tensor], None]:
    def change(x: Tensor) -> None:
        x[index] = value

    return change


@pytest.mark.parametrize(
    ("name", "change", "tensor", "position"),
    [
        ("dec.L0.attn_out", scaled((3, 0, 0), 1.03), "L0.attn_out", 12),
        ("pre.L3.stream", scaled((0, 4, 2), 1.06), "L3.stream", 4),
        ("decfix.L7.engram_gate", scaled((2, 0, 0), 1.02), "L7.engram_gate", 11),
        ("pre.L5.index_score", scaled((0, 8), 1.2), "L5.index_score", 8),
        ("dec.L0.moe_w", scaled((5, 0, 0), 1.02), "L0.moe_w", 14),
        ("pre.final_normed", scaled((0, 8), 1.02), "final_normed", 8),
        ("pre.logits_all", scaled((0, 2), 1.02), "logits", 2),
        ("pre.L2.cmp_state_kv", scaled((0, 0), 1.02), "L2.cmp_state_kv", 8),
        ("decfix.L5.idx_cache_final", stored((0, 20, 0), 40.0), "L5.idx_cache[:21]", 20),
        ("pre.L4.cmp_cache", stored((0, 1, 5), float("nan")), "L4.cmp_cache[:4]", 1),
        ("pre.L6.win_cache", stored((0, 3, 9), -9.0), "L6.win_cache", 3),
        ("dec.engram_hash", stored((4, 0, 0, 1, 2), 7), "engram_hash", 13),
        ("decfix.L8.topk_idxs", stored((6, 0, 0, 7), -1), "L8.topk_idxs", 15),
        ("dec.L0.moe_idx", stored((1, 0, 0, 0), 5), "L0.moe_idx", 10),
        ("pre.output_ids", stored((0,), 17), "output_ids", 8),
    ],
)  # fmt: skip
def test_changed_tensor_is_named_with_its_place(
    name: str, change: Callable[[Tensor], None], tensor: str, position: int
) -> None:
    messages = failed(changed(TIES, name, change))
    assert tensor in messages
    assert f"position {position}" in messages[tensor], messages[tensor]


def test_a_selection_beyond_the_noise_is_wrong() -> None:
    # the last prompt row chose rows 0 1 2 5 7 10; row 9 scores 6 % below row 7
    case = changed(YARN, "pre.L5.topk_idxs", stored((0, 16, 12), 17 + 9))
    messages = failed(case)
    assert "1 of 41 wrong" in messages["L5.selection"] and "position 16" in messages["L5.selection"]


def test_draft_tensors_are_named() -> None:
    case = changed(DSPARK, "decfix.dspark.base_logits", scaled((3, 0, 1), 1.02))
    names = [m.name for m in verify_draft(case, "decfix") if not m.ok]
    assert names == ["dspark.base_logits"]


def test_units_name_a_code() -> None:
    def flip(x: Tensor) -> None:
        x.view(torch.uint8)[5, 3] ^= 1

    case = changed(UNITS, "quant.fp4_e8m0.q_packed", flip)
    assert [m.name for m in verify_units(case) if not m.ok] == ["quant.fp4_e8m0.q_packed"]


def test_a_tensor_that_nobody_compares_is_a_failure() -> None:
    case = load_case(TIES)
    case = replace(case, tensors={**case.tensors, "pre.L3.new_tensor": torch.zeros(1, 9, 4)})
    assert [m.name for m in verify_case(case, free=False).failures] == ["L3.new_tensor"]


def test_nineteen_sinkhorn_iterations_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    released = replace(V41Config.flash(), hc_sinkhorn_iters=19)
    monkeypatch.setattr(V41Config, "flash", lambda: released)
    assert [m.name for m in verify_units(load_case(UNITS)) if not m.ok] == ["hc.comb"]


def test_a_missing_cast_of_the_probabilities_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = attention.sparse_attention

    def without_cast(q: Tensor, rows: Tensor, present: Tensor, sink: Tensor, precision: Precision) -> Tensor:
        wide = kept(q.double(), rows.double(), present, sink.double(), Precision("float64"))
        return precision.bf16(wide.float())

    monkeypatch.setattr(attention, "sparse_attention", without_cast)
    messages = failed(load_case(YARN))
    assert sum(name.endswith(".attn_out") for name in messages) == 9


def test_route_weight_after_the_second_product_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference import moe

    kept = moe.run_expert

    def after(
        x: Tensor, w: moe.Expert, limit: float, precision: Precision, weight: Tensor | None = None
    ) -> Tensor:
        y = kept(x, w, limit, precision)
        return y if weight is None else weight.unsqueeze(-1) * y

    monkeypatch.setattr(moe, "run_expert", after)
    assert any(name.endswith(".ffn_out") for name in failed(load_case(TIES)))
    assert layer.moe is moe.moe


def model_with(**switches: bool) -> Callable[[Case, str], Model]:
    return lambda case, variant: Model(case.weights, **switches)


def test_stale_keys_are_needed_for_the_release_to_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "release_model", model_with(release_underfilled_selection=True))
    measures = verify_stack(load_case(YARN), "dec")[0]
    first = next(m for m in measures if not m.ok)
    assert first.name == "L2.selection" and first.place is not None and first.place.position % 2 == 0


def test_underfilled_selection_is_needed_for_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "release_model", model_with())
    assert "L7.selection" in failed(load_case(UNDERFILL))


def test_block_cases_beside_the_checkout() -> None:
    beside = Path(__file__).parents[3] / "shared" / "golden" / "h_block_L2_bf16.safetensors"
    if not beside.exists():
        pytest.skip("single-block cases are not part of the committed subset")
    assert verify_case(load_case(beside)).ok
    assert "L2.latent" in failed(changed(beside, "pre.L2.latent", scaled((0, 30), 1.02)), "dec")
