"""Golden files of the release: one case a file, loaded into tensors, configuration and weights.

A file holds, for B sequences of P prompt tokens and then T teacher-forced decode steps,

    w.NAME       weights (a stack case keeps what differs from the file that meta.weights_file names)
    in.X         inputs            pre.X     [B, P, ...]    after the prefill call
    dec.X        [T, B, 1, ...]    decode, the release to the letter (stale index keys)
    decfix.X     [T, B, 1, ...]    decode with every source reading its own index keys; absent = equal to
    dec.X

`Case.rows` joins prefill and decode into one tensor [B, P + T, ...], which is how the reference computes
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference.config import V41Config
from reference.errors import InputError, WeightsError
from reference.weights import DictWeights

OFFICIAL = Path(__file__).parent / "official"
VARIANTS = ("decfix", "dec")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor of a safetensors file and its JSON metadata `meta`.  WeightsError: not a whole safetensors
    file."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = (file.metadata() or {}).get("meta")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(
            field=str(path),
            expected="a whole safetensors file",
            actual=f"{type(error).__name__}: {error}",
            hint="fetch or copy the file again; a git-lfs pointer or a cut download looks like this",
        ) from error
    if meta is None:
        raise WeightsError(
            field=f"{path}: metadata",
            expected="a JSON object under the metadata key `meta`",
            actual="no such key",
            hint="this is a safetensors file, but no golden file of the release",
        )
    return tensors, json.loads(meta)


@dataclass(frozen=True)
class Case:
    """One golden file.  `tensors` keeps the file's keys and dtypes."""

    path: Path
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    weight_tensors: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        return str(self.meta.get("case", self.path.stem))

    @property
    def is_units(self) -> bool:
        return "config" not in self.meta

    @property
    def block_layer(self) -> int | None:
        """The layer of a single-block case; None for a whole stack."""
        return self.meta.get("block_layer_id")

    @property
    def batch(self) -> int:
        return int(self.meta["batch"])

    @property
    def prompt(self) -> int:
        return int(self.meta["prompt_len"])

    @property
    def steps(self) -> int:
        return int(self.meta["steps"])

    @property
    def length(self) -> int:
        """Tokens of one sequence: prompt and decode steps."""
        return self.prompt + self.steps

    @property
    def variants(self) -> tuple[str, ...]:
        """The decode variants that the file holds, the repaired one first."""
        held = tuple(v for v in VARIANTS if any(name.startswith(f"{v}.") for name in self.tensors))
        return held if self.block_layer is None else ("dec",)

    @cached_property
    def config(self) -> V41Config:
        config = V41Config.from_json(dict(self.meta["config"]))
        return config if self.block_layer is None else config.sliced((self.block_layer,))

    @property
    def quantised(self) -> bool:
        """fp8 dense weights with fp4 experts, as against bf16 weights."""
        return self.config.dtype == "fp8"

    @cached_property
    def weights(self) -> DictWeights:
        return DictWeights(self.config, self.weight_tensors, self.tensors["in.token_map"])

    def stored(self, variant: str, name: str) -> Tensor | None:
        """dec.NAME or decfix.NAME as stored (decfix falls back to dec), None when the file lacks it."""
        held = self.tensors.get(f"{variant}.{name}")
        if held is None and variant == "decfix":
            held = self.tensors.get(f"dec.{name}")
        return held

    def decoded(self, variant: str, name: str) -> Tensor | None:
        """Decode rows [B, T, ...] of a tensor that has one row a step."""
        held = self.stored(variant, name)
        if held is None:
            return None
        first = self.tensors.get(f"{variant}.{name}_first_step", torch.tensor(0))
        held = held.transpose(0, 1)  # [B, T', 1, ...]
        if held.dim() > 2 and held.shape[2] == 1 and not name.endswith(("win_row", "logits")):
            held = held.squeeze(2)
        missing = int(first)
        if missing:
            pad = torch.full_like(held[:, :1], float("nan") if held.is_floating_point() else -1)
            held = torch.cat((pad.expand(-1, missing, *pad.shape[2:]), held), dim=1)
        return held

    def rows(self, variant: str, name: str, fill: float | int | bool = 0) -> Tensor | None:
        """[B, P + T, ...]: prefill rows, then decode rows; the narrower of the two is padded at the end with
        `fill`. A tensor absent from prefill (nothing to choose yet) is filled whole; None when decode lacks
        it."""
        after = self.decoded(variant, name)
        before = self.tensors.get(f"pre.{name}")
        if after is None:
            return None
        if before is None:
            before = torch.full((self.batch, self.prompt, *after.shape[2:]), fill, dtype=after.dtype)
        if before.dim() == 3 and before.shape[-1] != after.shape[-1]:
            width = max(before.shape[-1], after.shape[-1])
            before, after = (_padded(x, width, fill) for x in (before, after))
        return torch.cat((before, after), dim=1)

    def layer_inputs(self, variant: str) -> dict[int, tuple[Tensor, Tensor]]:
        """What entered each layer, as recorded: {layer: (stream [B, P+T, N, D], pre_mix [B, P+T, N])}.  The
        key after the last layer is what the final collapse took.  Layer 0 of a stack starts from the
        embedding and has none."""
        if self.block_layer is not None:
            return {self.block_layer: (self.tensors["in.stream"], self.tensors["in.pre_mix"])}
        inputs = {}
        for layer in range(self.config.num_hidden_layers):
            stream, pre_mix = (self.rows(variant, f"L{layer}.{x}") for x in ("stream", "pre_mix"))
            if stream is None or pre_mix is None:
                raise WeightsError(
                    field=f"{self.path}: {variant}.L{layer}.stream",
                    expected="stream and pre_mix of every layer",
                    actual="absent",
                    hint="the file is not a complete stack case",
                )
            inputs[layer + 1] = (stream, pre_mix)
        return inputs


def load_case(path: Path) -> Case:
    """One golden file with the weights it refers to.  WeightsError: unreadable, or its weights file is
    missing."""
    tensors, meta = read_tensors(path)
    weights: dict[str, Tensor] = {}
    if "weights_file" in meta:
        beside = path.parent / str(meta["weights_file"])
        if not beside.exists():
            raise WeightsError(
                field=f"{path}: weights_file",
                expected=f"{beside.name} beside it",
                actual="no such file",
                hint="copy the weights file that meta.weights_file names into the same folder",
            )
        weights.update(_weights(read_tensors(beside)[0]))
    weights.update(_weights(tensors))
    return Case(path, meta, {k: v for k, v in tensors.items() if not k.startswith("w.")}, weights)


def case_paths(places: Iterable[Path]) -> list[Path]:
    """Golden files of directories or single files, sorted; weight files alone are none.  InputError: none
    there."""
    found: list[Path] = []
    for place in places:
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        files = [f for f in files if not f.name.startswith("weights_")]
        if not files or not place.exists():
            raise InputError(
                field=str(place),
                expected="a golden file or a directory of *.safetensors golden files",
                actual="none" if place.exists() else "no such path",
                hint="leave the argument out to verify golden/official",
            )
        found.extend(files)
    return found


def _weights(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name[2:], tensor) for name, tensor in tensors.items() if name.startswith("w."))


def _padded(x: Tensor, width: int, fill: float | int | bool) -> Tensor:
    pad = torch.full((*x.shape[:-1], width - x.shape[-1]), fill, dtype=x.dtype)
    return torch.cat((x, pad), dim=-1)
