"""Loading and workspaces of the model: banks from elsewhere, buffers kept and dropped, poison changes nothing."""

from __future__ import annotations

import pytest
import torch

from optimized import model as model_module
from optimized.model import OptimizedModel
from optimized.state_pool import StatePool
from optimized.weights import Weight, expert, stack
from optimized.workspace import NO_ID
from reference.config import LayerRole
from reference.errors import ConfigError, InputError, WeightsError
from reference.linear import Linear
from tests.optimized.step_tools import TOY, new_model, run, weights

CPU = torch.device("cpu")


def test_experts_from_a_bank_made_elsewhere_give_the_same_bits() -> None:
    def bank(role: LayerRole) -> tuple[Weight, Weight]:
        pairs = [expert(weights(), role, f"experts.{e}", CPU, dense=True) for e in range(role.n_experts)]
        return stack([p[0] for p in pairs]), stack([p[1] for p in pairs])

    steps = [[run(0, 0, 5)], [run(0, 5, 1), run(1, 0, 2)]]
    ours, theirs = new_model(banks=bank), new_model()
    for runs in steps:
        assert torch.equal(ours.step(runs).logits, theirs.step(runs).logits)


def test_poison_in_the_workspace_between_steps_changes_no_bit() -> None:
    plain, poisoned = new_model(), new_model(poison=True)
    for start, count in ((0, 7), (7, 7), (14, 1)):
        assert torch.equal(
            plain.step([run(0, start, count)]).logits, poisoned.step([run(0, start, count)]).logits
        )


@pytest.mark.parametrize("op", ["grouped_out", "attn_prep", "hc_collapse", "expert_up", "select"])
@pytest.mark.parametrize("poison", [False, True])
def test_what_a_launch_leaves_unwritten_shows_in_poison(op: str, poison: bool) -> None:
    model = new_model(poison=poison)
    model.step([run(0, 0, 9)])
    whole = new_model().step([run(0, 0, 18)]).logits[9:]
    with model.ops.replaced(op, lambda *args, **constants: None):
        logits = model.step([run(0, 9, 9)]).logits
    # the last step's rows look right without it; an absent selection is a number, the others are none
    assert not torch.equal(logits, whole) and bool(logits.isnan().any()) == (poison and op != "select")
    ids = model.workspace(9, 96).selection
    assert bool((ids == NO_ID).all()) == (poison and op == "select")


def test_workspaces_are_dropped_least_recently_used_first_but_never_under_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_module, "WORKSPACES", 2)
    model = new_model(buckets=(8,))
    model.step([run(0, 0, 1)], replay=True)
    held = model.workspace(8, 96)
    for count in (2, 3, 4):
        model.step([run(1, 0, count)])
    assert model.workspace(8, 96) is held
    assert len(model._workspaces) == 2


def test_a_context_that_is_no_whole_page_is_refused() -> None:
    with pytest.raises(InputError, match="page_tokens"):
        new_model().workspace(1, 40)


def test_an_unknown_op_or_backend_is_named() -> None:
    model = new_model()
    with pytest.raises(ConfigError, match="op"):
        model.ops["attention"] = lambda: None
    with pytest.raises(ConfigError, match="backend"):
        from optimized.launch import OpTable

        OpTable("cuda")


def test_fp8_matrices_join_on_whole_tiles_only() -> None:
    from optimized.weights import pack

    part = Linear(
        torch.zeros(33, 64).to(torch.float8_e4m3fn), torch.ones(2, 2).to(torch.float8_e8m0fnu), "fp8"
    )
    with pytest.raises(WeightsError, match="multiple of the 32-row tile"):
        pack((part, part), CPU, dense=True)


def test_a_layer_without_its_pool_buffers_is_not_built_by_accident() -> None:
    other = TOY.sliced((0, 1))
    pool = StatePool(other, max_sequences=1, n_pages=2, page_tokens=16, ring_spare=8, max_capacity=32)
    with pytest.raises(KeyError):
        OptimizedModel(TOY, weights(), pool)
