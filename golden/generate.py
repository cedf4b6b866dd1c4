"""Golden files of the reference: drawn from cases as data, the same bytes on every run.

A case (golden/reference/cases.json) names a configuration, a seed, how the prompt is split into calls, a number of
single steps and which taps to keep. Weights are drawn by name and seed, token ids from the same generator. The file
holds, with one row a token (all tokens of the first sequence, then of the second, ...),

    in.token_ids  in.image  in.sequence  in.position  in.call     [rows]
    out.TAP                                                        [rows, ...]

in the narrowest type that holds every value exactly (bf16 before fp32 before float64, small integers before large),
so widening loses nothing. Columns that only some calls have (index scores, candidates) are padded with NaN, -1 or 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from reference.config import V41Config, load_config
from reference.engine import ReferenceEngine, Run
from reference.errors import ConfigError
from reference.model import Model
from reference.random_weights import RandomWeights, bits

REFERENCE = Path(__file__).parent / "reference"
GENERATOR_VERSION = 1  # raised when the same case would give other tensors for a reason in this file

WHOLE = ("engram_hash", "final_normed", "logits")
BLOCK = ("stream", "pre_mix", "attn_out", "ffn_out", "engram_gate")
CHOICES = ("selection", "candidates", "moe_idx", "moe_w", "index_margin", "cand_margin", "route_margin")
INNER = ("attn_in", "attn_pre", "win_row", "latent", "index_score", "index_score_masked", "ffn_in")
TAPS: Mapping[str, tuple[str, ...]] = {
    "stream": (*(f"L*.{name}" for name in BLOCK), *WHOLE),
    "choices": (*(f"L*.{name}" for name in (*BLOCK, *CHOICES)), *WHOLE),
    "main": (*(f"L*.{name}" for name in (*BLOCK, *CHOICES, *INNER)), *WHOLE),
    "all": ("*",),
}
COUNTED = (
    "index_score",
    "index_score_masked",
    "candidates",
    "ffn_in",
    "moe_idx",
    "selection",
    "route_margin",
)


@dataclass(frozen=True)
class GoldenCase:
    """One case. calls: for each sequence the lengths of the prompt's calls; image: positions of image tokens."""

    name: str
    why: str
    seed: int
    calls: tuple[tuple[int, ...], ...]
    steps: int
    taps: str = "main"
    preset: str = "toy"
    config: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    image: tuple[tuple[int, ...], ...] = ()
    layers: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.name}.safetensors"

    @property
    def precision(self) -> str:
        return str(self.engine.get("precision", "release"))

    def model_config(self) -> V41Config:
        """The preset with the case's changes; draft stages are left out of a slice that can't feed them."""
        config = replace(load_config(self.preset), **self.config)
        return config.sliced(self.layers) if self.layers else config

    def length(self, sequence: int) -> int:
        return sum(self.calls[sequence]) + self.steps

    def token_ids(self, config: V41Config, sequence: int) -> tuple[int, ...]:
        """Prompt and steps, drawn from the seed alone."""
        raw = bits(self.seed, f"golden tokens {sequence}").random_raw(self.length(sequence))
        return tuple(int(t) for t in raw % config.vocab_size)

    def image_mask(self, sequence: int) -> tuple[bool, ...]:
        places = set(self.image[sequence]) if self.image else set()
        return tuple(p in places for p in range(self.length(sequence)))


def read_cases(path: Path = REFERENCE / "cases.json") -> dict[str, GoldenCase]:
    """The cases by name. ConfigError: a name twice, or a field unknown."""
    cases: dict[str, GoldenCase] = {}
    for entry in json.loads(path.read_text(encoding="utf-8")):
        lists = {k: tuple(map(tuple, entry[k])) for k in ("calls", "image") if k in entry}
        try:
            case = GoldenCase(**{**entry, **lists, "layers": tuple(entry.get("layers", ()))})
        except TypeError as error:
            hint = "the fields are those of golden.generate.GoldenCase"
            raise ConfigError(
                field=f"{path}: {entry.get('name')}", expected="known fields", actual=error, hint=hint
            ) from error
        if case.name in cases or case.taps not in TAPS:
            raise ConfigError(
                field=f"{path}: {case.name}",
                expected=f"one case of a name, taps of {', '.join(TAPS)}",
                actual=case.taps,
                hint="rename or correct it",
            )
        cases[case.name] = case
    return cases


def build_engine(case: GoldenCase) -> ReferenceEngine:
    config = case.model_config()
    return ReferenceEngine(config, RandomWeights(config, case.seed), **case.engine)


@dataclass(frozen=True)
class Call:
    """One call of the engine: rows begin..end of one sequence."""

    sequence: int
    begin: int
    end: int
    index: int


def calls(case: GoldenCase, whole: bool = False) -> Iterator[Call]:
    """Every call in file order: sequence by sequence, prompt calls, then single steps; `whole`: one call a sequence."""
    for sequence, lengths in enumerate(case.calls):
        begin = 0
        parts = (case.length(sequence),) if whole else (*lengths, *(1 for _ in range(case.steps)))
        for index, length in enumerate(parts):
            yield Call(sequence, begin, begin + length, index)
            begin += length


@dataclass(frozen=True)
class CaseRun:
    """tensors: what the file holds, widened. taps: those and what coverage is counted from. model: for its experts."""

    tensors: dict[str, Tensor]
    taps: dict[str, Tensor]
    model: Model


def run_case(case: GoldenCase, recorded: Mapping[str, Tensor] | None = None) -> CaseRun:
    """Run a case. With `recorded`, each layer gets its recorded inputs and a sequence is one call (which changes
    nothing but the time, except where the case reproduces a defect that depends on the calls)."""
    with one_thread():
        return _run(case, recorded)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums must not be cut differently on a machine with more cores; and toy sizes only lose by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(case: GoldenCase, recorded: Mapping[str, Tensor] | None) -> CaseRun:
    engine = build_engine(case)
    layers = [role.index for role in engine.config.layers()]
    sequences = [engine.open(case.length(b)) for b in range(len(case.calls))]
    wanted = (*TAPS[case.taps], *(f"L*.{name}" for name in COUNTED))
    parts: list[dict[str, Tensor]] = []
    counts: list[int] = []
    columns: dict[str, list[int]] = {"token_ids": [], "image": [], "sequence": [], "position": [], "call": []}
    whole = recorded is not None and not case.engine.get("release_stale_index_k")
    done = 0
    for call in calls(case, whole):
        rows, count = slice(call.begin, call.end), call.end - call.begin
        ids = case.token_ids(engine.config, call.sequence)[rows]
        image = case.image_mask(call.sequence)[rows]
        inputs = _layer_inputs(recorded, layers, done, done + count) if recorded else None
        run = Run(sequences[call.sequence], ids, call.begin, image)
        parts.append(engine.step([run], taps=wanted, layer_inputs=inputs).taps)
        counts.append(count)
        done += count
        columns["token_ids"] += ids
        columns["image"] += image
        columns["sequence"] += [call.sequence] * count
        columns["position"] += range(call.begin, call.end)
        columns["call"] += [call.index] * count
    taps = join_rows(parts, counts)
    kept = {n: t for n, t in taps.items() if any(fnmatchcase(n, pattern) for pattern in TAPS[case.taps])}
    tensors = {f"in.{name}": torch.tensor(values) for name, values in columns.items()}
    return CaseRun(tensors | {f"out.{name}": value for name, value in kept.items()}, taps, engine.model)


def _layer_inputs(
    recorded: Mapping[str, Tensor], layers: list[int], begin: int, end: int
) -> dict[int, tuple[Tensor, Tensor]]:
    """What entered each layer after the first."""
    found = {}
    for lower, upper in pairwise(layers):
        stream, mix = recorded[f"out.L{lower}.stream"], recorded[f"out.L{lower}.pre_mix"]
        found[upper] = (stream[begin:end], mix[begin:end])
    return found


def join_rows(parts: list[dict[str, Tensor]], counts: list[int]) -> dict[str, Tensor]:
    """One tensor a tap over all calls, padded to the widest call; a call without the tap gives rows of padding."""
    joined = {}
    for name in sorted({name for part in parts for name in part}):
        have = [part[name] for part in parts if name in part]
        shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in have), strict=True)]
        dtype = have[0].dtype
        fill: float | int | bool = (
            torch.nan if dtype.is_floating_point else False if dtype == torch.bool else -1
        )
        rows = []
        for part, count in zip(parts, counts, strict=True):
            block = torch.full((count, *shape), fill, dtype=dtype)
            if name in part:
                block[(slice(None), *(slice(0, n) for n in part[name].shape[1:]))] = part[name]
            rows.append(block)
        joined[name] = torch.cat(rows)
    return joined


def narrow(tensor: Tensor) -> Tensor:
    """The same values in the narrowest type of the file format that holds them all exactly."""
    if tensor.is_floating_point():
        for dtype in (torch.bfloat16, torch.float32):
            small = tensor.to(dtype)
            if torch.equal(small.to(torch.float64).nan_to_num(0.5), tensor.to(torch.float64).nan_to_num(0.5)):
                return small
        return tensor
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return tensor.to(torch.uint8)
    low, high = int(tensor.min()), int(tensor.max())
    for dtype in (torch.int8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return tensor.to(dtype)
    return tensor


def encode(case: GoldenCase, tensors: Mapping[str, Tensor]) -> bytes:
    """The file. One metadata key alone: the order of several would not be fixed."""
    meta = {
        "case": case.name,
        "config": case.model_config().to_dict(),
        "engine": dict(case.engine),
        "format": "dsv41-golden-reference/1",
        "generator": GENERATOR_VERSION,
        "prompt_calls": [list(c) for c in case.calls],
        "seed": case.seed,
        "steps": case.steps,
        "why": case.why,
    }
    text = json.dumps(meta, sort_keys=True)
    return save({name: narrow(tensors[name]).contiguous() for name in sorted(tensors)}, {"meta": text})


def generate(case: GoldenCase) -> tuple[bytes, CaseRun]:
    """The file's bytes and the run that they come from."""
    run = run_case(case)
    return encode(case, run.tensors), run
