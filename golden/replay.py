"""The reference run over a golden case: each layer on its recorded inputs, or free-running from the tokens.

`decfix` is one forward over all P + T rows: with every source reading its own keys, decode is prefill.  `dec`
depends on the calls (stale index keys), so it is a forward over the prompt and then one a step, as the
release was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from golden.cases import Case
from reference.history import SequenceHistory
from reference.model import LayerInputs, Model

LAYER_TAPS = [
    "engram_gate",
    "engram_out",
    "attn_pre",
    "attn_in",
    "q",
    "index_q",
    "index_w",
    "index_score",
    "index_score_masked",
    "candidates",
    "selection",
    "topk_idxs",
    "sparse_o",
    "attn_out",
    "mid_stream",
    "ffn_in",
    "moe_idx",
    "moe_w",
    "ffn_out",
    "stream",
    "pre_mix",
    "route_margin",
    "latent",
]
MODEL_TAPS = ("engram_hash", "main_hidden", "final_collapsed", "final_normed", "logits")
PADDING = {"index_score": -torch.inf, "index_score_masked": -torch.inf, "candidates": False}


@dataclass(frozen=True)
class Replay:
    """taps [B, rows, ...], rows from position `start` on; histories hold what each sequence stored."""

    start: int
    taps: Mapping[str, Tensor]
    histories: tuple[SequenceHistory, ...]


def release_model(case: Case, variant: str) -> Model:
    """The reference with the defects that the variant's numbers contain."""
    stale = variant == "dec" and case.block_layer is None
    return Model(case.weights, release_stale_index_k=stale, release_underfilled_selection=True)


def replay(
    case: Case,
    model: Model,
    variant: str,
    *,
    recorded: bool = True,
    forced: Mapping[str, Tensor] | None = None,
) -> Replay:
    """Run every sequence of the case.  forced: decisions [B, P + T, ...] by tap name, taken instead of the
    computed ones.  recorded: each layer gets its recorded inputs; otherwise what the layers before it made."""
    layers = [role.index for role in case.config.layers()]
    names = [*(f"L{layer}.{tap}" for layer in layers for tap in LAYER_TAPS), *MODEL_TAPS]
    inputs = case.layer_inputs(variant) if recorded else {}
    histories, sequences = [], []
    for b in range(case.batch):
        history = model.new_history(case.length)
        chunks = []
        for begin, end in _calls(case, variant):
            rows = slice(begin, end)
            ids = case.tensors["in.input_ids"][b, rows]
            given: LayerInputs = {i: (h[b, rows], mix[b, rows]) for i, (h, mix) in inputs.items()}
            decided = {name: value[b, rows] for name, value in (forced or {}).items()}
            for name in decided:
                if name.endswith("candidates"):  # one column a compressed row that exists so far
                    decided[name] = decided[name][
                        :, : end // case.config.layer(int(name[1:].split(".")[0])).ratio
                    ]
            image = torch.zeros(len(ids), dtype=torch.bool)
            output = model.forward(
                history, ids, image, taps=names, forced=decided, layer_inputs=given or None
            )
            chunks.append(output.taps)
        histories.append(history)
        sequences.append(_joined(chunks, [end - begin for begin, end in _calls(case, variant)]))
    taps = {name: torch.stack([s[name] for s in sequences]) for name in sequences[0]}
    return Replay(0, taps, tuple(histories))


def _calls(case: Case, variant: str) -> list[tuple[int, int]]:
    if variant == "decfix" or case.block_layer is not None:
        return [(0, case.length)]
    return [(0, case.prompt), *((p, p + 1) for p in range(case.prompt, case.length))]


def _joined(chunks: Sequence[Mapping[str, Tensor]], counts: Sequence[int]) -> dict[str, Tensor]:
    """One tensor a tap over all calls; a tap that a call did not have (no group closed, say) is filled with
    its padding."""
    joined = {}
    for name in {name for chunk in chunks for name in chunk}:
        short = name.split(".")[-1]
        shapes = [chunk[name].shape[1:] for chunk in chunks if name in chunk]
        model = next(chunk[name] for chunk in chunks if name in chunk)
        fill = PADDING.get(short, torch.nan if model.is_floating_point() else -1)
        shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
        parts = []
        for chunk, count in zip(chunks, counts, strict=True):
            part = torch.full((count, *shape), fill, dtype=model.dtype)
            if name in chunk:
                part[(slice(None), *(slice(0, n) for n in chunk[name].shape[1:]))] = chunk[name]
            parts.append(part)
        joined[name] = torch.cat(parts)
    return joined
