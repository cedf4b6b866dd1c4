"""Peers of one reuse layer at decode, in plain torch: eager and compiled; each checked before it is timed.

Their weights are bf16 (said in the record), so the bytes floor in their record is that of bf16. What can't run on this
machine is skipped with the reason.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from reference.config import load_config
from reference.engine import ReferenceEngine, Run
from reference.quantize import qdq_fp8
from reference.random_weights import RandomWeights
from reports.roofline import Step, layer_costs
from tests.benchmarks.conftest import device_name
from tests.benchmarks.peers import Inputs, TorchLayer, fp8, update_error

LAYER, CONTEXT = 3, 40
# bf16 arithmetic rounds each of a dozen steps to 2^-9: twice the reference's own release error is let pass
FACTOR = 4.0
CONFIG = replace(load_config("toy"), dtype="bf16", expert_dtype="bf16")
WEIGHTS = RandomWeights(CONFIG, 11)
NOTE = "bf16 weights, two to four times the bytes of ours; activations are not quantised"


def recorded(precision: str, batch: int):
    """The reference over `batch` sequences: what enters layer 3 at the last position, and what leaves it."""
    engine = ReferenceEngine(CONFIG, WEIGHTS, precision=precision)
    found = []
    for salt in range(batch):
        sequence = engine.open(CONTEXT)
        ids = tuple((5 * i + 17 * salt + i * i) % CONFIG.vocab_size for i in range(CONTEXT))
        taps = ("L2.stream", "L2.pre_mix", f"L{LAYER}.selection", f"L{LAYER}.stream")
        taps = engine.step([Run(sequence, ids, 0)], taps=taps).taps
        layers = engine.history(sequence).layers
        ring = layers[LAYER].window.rows(CONTEXT - CONFIG.sliding_window, CONTEXT - 1)
        chosen = taps[f"L{LAYER}.selection"][-1]
        assert (chosen >= 0).all()
        rows = layers[2].latent.rows(0, CONTEXT // 2)[chosen]
        found.append(
            (taps["L2.stream"][-1], taps["L2.pre_mix"][-1], ring, rows, taps[f"L{LAYER}.stream"][-1])
        )
    stream, pre_mix, ring, rows, out = (torch.stack(parts) for parts in zip(*found, strict=True))
    return Inputs(stream, pre_mix, ring, rows, CONTEXT - 1), out


def peer_inputs(batch: int, dtype=torch.bfloat16) -> Inputs:
    given, _ = recorded("release", batch)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(
        given.stream.to(dtype),
        given.pre_mix.to(wide),
        given.ring.to(dtype),
        given.rows.to(dtype),
        given.position,
    )


def check(layer: TorchLayer, call, batch: int) -> dict:
    """Against the same formulas in float64, by the error that release precision makes on the same inputs."""
    given, release = recorded("release", batch)
    exact = TorchLayer(CONFIG, LAYER, WEIGHTS, dtype=torch.float64)(peer_inputs(batch, torch.float64))[0]
    allowed = update_error(release, exact, given.stream)
    error = update_error(call(peer_inputs(batch).to(device_name()))[0].cpu(), exact, given.stream)
    passed = bool((error <= FACTOR * allowed).all())
    detail = {"worst": float(error.max()), "release_worst": float(allowed.max()), "factor": FACTOR}
    return {
        "passed": passed,
        "check": "the layer's update against float64, by release precision's error",
        "detail": detail,
    }


def costs(batch: int):
    return layer_costs(CONFIG, CONFIG.layer(LAYER), Step(batch, 1, CONTEXT))


def test_peer_layer_is_the_layer():
    """In float64 the peer's formulas give what the reference gives in float64, to its last places."""
    given, out = recorded("float64", 2)
    for form in ("eager", "scalars"):
        layer = TorchLayer(CONFIG, LAYER, WEIGHTS, dtype=torch.float64, form=form)
        assert update_error(layer(given)[0], out, given.stream).max() < 1e-9


def test_fp8_rounding_is_the_reference_s():
    x = torch.randn(64, 96) * torch.logspace(-6, 3, 64).unsqueeze(1)
    assert torch.equal(fp8(x), qdq_fp8(x))
    assert torch.equal(fp8(x.bfloat16()).float(), qdq_fp8(x.bfloat16().float()))


def test_a_wrong_peer_fails_its_check():
    layer = TorchLayer(CONFIG, LAYER, WEIGHTS, device_name())
    assert check(layer, layer, 2)["passed"]
    layer.config = replace(CONFIG, routed_scaling_factor=1.0)
    assert not check(layer, layer, 2)["passed"]


def time_layer(measure, engine: str, mode: str, call, layer, batch: int, **info) -> None:
    given = peer_inputs(batch).to(device_name())
    measure(
        "layer.reuse",
        engine,
        lambda: call(given),
        parts=costs(batch),
        correctness=lambda: check(layer, call, batch),
        mode=mode,
        backend="torch",
        device=device_name(),
        layer=LAYER,
        batch=batch,
        context=CONTEXT,
        format="bf16",
        comparable=False,
        note=NOTE,
        **info,
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_torch_eager(measure, batch):
    layer = TorchLayer(CONFIG, LAYER, WEIGHTS, device_name())
    time_layer(measure, "peer.torch_eager", "eager", layer, layer, batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1])
def test_torch_compile(measure, batch):
    if device_name() == "cpu" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on a CPU")
    layer = TorchLayer(CONFIG, LAYER, WEIGHTS, device_name(), form="scalars")
    time_layer(measure, "peer.torch_compile", "compile", torch.compile(layer, dynamic=False), layer, batch)
