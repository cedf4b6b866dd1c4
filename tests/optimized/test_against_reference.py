"""Every tap of the optimised step against the reference: each layer fed what the engine had, decisions
forced.

The reference runs in float64 and in release precision on the same inputs; an engine's row may be four times
as far from float64 as release precision is (harness/tolerances.py).  The plain-torch ops keep the
contract's casts, so they must also stand much nearer to release precision than that is to float64.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from harness import tolerances
from harness.compare import compare, contract_ratio, limits
from harness.taps import LAYER_TAPS, describe
from reference.config import V41Config
from reference.model import Model
from reference.precision import FLOAT64, RELEASE, Precision
from tests.optimized.step_tools import TOKENS, new_model, run, weights

CONFIG = V41Config.toy()
LENGTH = 48
DECISIONS = ("selection", "candidates", "moe_idx")
NAMES = tuple(
    f"L{role.index}.{tap.name}" for role in CONFIG.layers() for tap in LAYER_TAPS if tap.kind != "margin"
)
GLOBAL = ("engram_hash", "main_hidden", "final_collapsed", "final_normed", "logits")
SPLIT = (1, 2, 3, 5, 8, 1, 1, 9, 18)


@lru_cache(maxsize=1)
def engine_taps() -> dict[str, Tensor]:
    """A prompt in chunks of mixed sizes: windows wrap, groups stay open, top-k and candidates cut."""
    model, start, parts = new_model(), 0, []
    for count in SPLIT:
        parts.append(model.step([run(1, start, count)], taps=(*NAMES, *GLOBAL)).taps)
        start += count
    assert start == LENGTH

    def join(name: str) -> Tensor:
        pieces = [p[name] for p in parts]
        width = max(p.shape[1] for p in pieces) if pieces[0].dim() > 1 else 0
        if any(p.shape[1:] != pieces[-1].shape[1:] for p in pieces):
            fill = False if pieces[0].dtype is torch.bool else -torch.inf
            pieces = [torch.nn.functional.pad(p, (0, width - p.shape[1]), value=fill) for p in pieces]
        return torch.cat(pieces)

    return {name: join(name) for name in parts[-1]}


@lru_cache(maxsize=2)
def reference_taps(precision: Precision) -> dict[str, Tensor]:
    ours = engine_taps()
    ids = [role.index for role in CONFIG.layers()]
    inputs = {
        i: (ours[f"L{below}.stream"], ours[f"L{below}.pre_mix"])
        for below, i in pairwise(ids)
    }
    forced = {name: value for name, value in ours.items() if name.split(".")[-1] in DECISIONS}
    model = Model(weights(), precision)
    out = model.forward(
        model.new_history(LENGTH),
        torch.tensor(TOKENS[1][:LENGTH]),
        torch.zeros(LENGTH, dtype=torch.bool),
        taps=(*NAMES, *GLOBAL),
        forced=forced,
        layer_inputs=inputs,
    )
    return out.taps


def test_every_tap_of_the_reference_is_there() -> None:
    assert set(engine_taps()) == set(reference_taps(RELEASE))
    for name, value in reference_taps(RELEASE).items():
        assert engine_taps()[name].shape == value.shape, name


@pytest.mark.parametrize("layer", [*(role.index for role in CONFIG.layers()), None])
def test_values_are_within_the_derived_limits(layer: int | None) -> None:
    ours, exact, release = engine_taps(), reference_taps(FLOAT64), reference_taps(RELEASE)
    names = [n for n in ours if (n.startswith(f"L{layer}.") if layer is not None else n in GLOBAL)]
    compared, near = 0, []
    for name in names:
        tap = describe(name)
        if tap.kind not in ("value", "scores") or name == "engram_hash":
            continue
        tolerance = tolerances.for_tap(tap.name, tap.kind)
        found = compare(exact[name], ours[name], limits(exact[name], release[name], tolerance))
        assert found is None, f"{name}: {found}"
        near.append(contract_ratio(exact[name], release[name], ours[name], tolerance.floor))
        compared += 1
    assert compared >= (12 if layer is not None else 4)
    assert max(near) <= tolerances.CONTRACT_K, dict(zip(names, near, strict=False))
    assert sum(r <= tolerances.CONTRACT_FOLLOWS for r in near) > len(near) / 2


def test_decisions_are_the_references_own_on_the_same_inputs() -> None:
    """Not forced here: release precision decides anew from the engine's inputs; only the hash is integer
    arithmetic.
    """
    ours = engine_taps()
    ids = [role.index for role in CONFIG.layers()]
    inputs = {
        i: (ours[f"L{below}.stream"], ours[f"L{below}.pre_mix"])
        for below, i in pairwise(ids)
    }
    model = Model(weights())
    names = [n for n in ours if n.split(".")[-1] in DECISIONS] + ["engram_hash"]
    out = model.forward(
        model.new_history(LENGTH),
        torch.tensor(TOKENS[1][:LENGTH]),
        torch.zeros(LENGTH, dtype=torch.bool),
        taps=names,
        layer_inputs=inputs,
    )
    for name in names:
        differs = ours[name] != out.taps[name]
        if name.endswith("candidates"):  # a block's rows beyond what a query sees belong to nobody's decision
            differs &= torch.arange(LENGTH) <= torch.arange(LENGTH).unsqueeze(-1)
        differing = differs.flatten(1).any(1).sum().item()
        # the coefficients' last bits are free, so a near tie may fall the other way in a row of hundreds
        assert differing <= (0 if name == "engram_hash" else 1), f"{name}: {differing} rows"
