"""The manifest of the reference goldens: what each file is, what it was made with, and why it exists.

For each file: sha256, size, config digest, seed, precision, engine switches, generator version, versions of torch and
numpy, a float64 checksum of each tensor (the exactly rounded sum of its finite values, and how many others there are),
coverage counters, the reason of its existence and the reasons of every overwrite. For all: digests of some drawn
weights, so that a new release of a library can't move the generator unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from golden.coverage import coverage
from golden.generate import GENERATOR_VERSION, REFERENCE, CaseRun, GoldenCase
from reference.config import load_config
from reference.errors import WeightsError
from reference.random_weights import RandomWeights

MANIFEST = REFERENCE / "manifest.json"
FORMAT = 1
WEIGHT_SEED = 11
# one tensor of every kind of draw
WEIGHT_NAMES = (
    *(
        "embed.weight",
        "head.weight",
        "layers.0.attn_norm.weight",
        "layers.0.hc_attn_base",
        "layers.0.hc_attn_scale",
    ),
    *("layers.1.engram.embed.weight", "layers.1.engram.embed.scale", "layers.2.attn.wq_b.weight"),
    *("layers.2.attn.wq_b.scale", "layers.2.attn.compressor.wgate.weight", "layers.2.attn.attn_sink"),
    *("layers.3.ffn.gate.weight", "layers.3.ffn.gate.bias", "layers.3.ffn.experts.5.w1.weight"),
    *("layers.3.ffn.experts.5.w1.scale", "layers.3.ffn.shared_experts.w2.weight"),
)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checksum(tensor: Tensor) -> str:
    """Type, shape, the exactly rounded sum of the finite values (no order of summation changes it), and how many are
    not finite."""
    values = tensor.to(torch.float64).flatten()
    finite = values[values.isfinite()]
    shape = "x".join(map(str, tensor.shape))
    total = math.fsum(finite.tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} {total!r} {values.numel() - finite.numel()}"


def weights_vector() -> dict[str, str]:
    """sha256 of the bytes of drawn weights of the toy configuration."""
    weights = RandomWeights(load_config("toy"), WEIGHT_SEED)
    digests = {name: sha256(_bytes(weights[name])) for name in WEIGHT_NAMES}
    return digests | {"token_map": sha256(_bytes(weights.token_map))}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def environment() -> dict[str, str]:
    """What a byte may depend on."""
    return {
        "torch": torch.__version__.split("+")[0],
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def entry(case: GoldenCase, data: bytes, run: CaseRun) -> dict[str, Any]:
    """The manifest's record of one file."""
    stored = load(data)
    return {
        "sha256": sha256(data),
        "bytes": len(data),
        "why": case.why,
        "config_digest": case.model_config().digest(),
        "seed": case.seed,
        "precision": case.precision,
        "engine": dict(case.engine),
        "generator": GENERATOR_VERSION,
        "made_with": environment(),
        "coverage": coverage(case, run),
        "tensors": {name: checksum(stored[name]) for name in sorted(stored)},
        "changes": [],
    }


def read_manifest(path: Path = MANIFEST) -> dict[str, Any]:
    """WeightsError: no manifest, or one of another format."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data["format"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise WeightsError(
            field=str(path),
            expected="the manifest of the goldens",
            actual=error,
            hint="run `dsv41 golden generate`",
        ) from error
    if found != FORMAT:
        raise WeightsError(
            field=f"{path}: format", expected=FORMAT, actual=found, hint="use the version that wrote it"
        )
    return data


def write_manifest(
    files: Mapping[str, Any], path: Path = MANIFEST, weights: Mapping[str, str] | None = None
) -> None:
    data = {
        "format": FORMAT,
        "weights": dict(weights or weights_vector()),
        "files": dict(sorted(files.items())),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
