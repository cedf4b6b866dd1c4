"""From the raw copies that a step took to the taps' values: decoded, cut to the live rows and to what each
row can see.

Score-like taps are as wide as the longest run needs (end // r rows); beyond a row's own run they hold NaN,
`candidates` False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.ops.moe import expert_scores
from optimized.ops.quantise import FP8, decode_q4i, decode_q8
from optimized.step import HostTable
from optimized.weights import LayerWeights
from reference.config import V41Config
from reference.indexer import block_scores, selection_margin

GLOBAL = ("engram_hash", "final_collapsed", "final_normed", "hidden", "logits", "main_hidden")


def finish(
    recorded: dict[str, tuple[Tensor, ...]],
    host: HostTable,
    config: V41Config,
    weights: dict[int, LayerWeights],
) -> dict[str, Tensor]:
    """Copies by tap name -> values by tap name."""
    live = {name: tuple(part[: host.n_rows] for part in parts) for name, parts in recorded.items()}
    values = {
        name: _value(name, parts, host, config, weights)
        for name, parts in live.items()
        if not name.endswith(".entry")
    }
    entries = [live[f"L{i}.entry"][0] for i in config.dspark_target_layer_ids if f"L{i}.entry" in live]
    if entries:
        values["main_hidden"] = torch.cat([e.float().mean(1).bfloat16().float() for e in entries], dim=-1)
    return values


def _value(
    name: str, parts: tuple[Tensor, ...], host: HostTable, config: V41Config, weights: dict[int, LayerWeights]
) -> Tensor:
    if name in GLOBAL:
        return _plain(parts[0])
    layer, short = int(name[1 : name.index(".")]), name[name.index(".") + 1 :]
    ratio = config.layer(layer).ratio
    if short == "win_row":
        return decode_q8(parts[0][:, : config.head_dim].view(FP8), parts[0][:, config.head_dim :])
    if short == "index_q":
        return decode_q4i(*parts)
    if short in ("index_score", "index_score_masked"):
        return _cut(parts[0].float(), host, ratio, torch.nan)
    if short == "candidates":
        return _cut(parts[0].repeat_interleave(config.candidate_block_size, dim=1), host, ratio, False)
    if short == "index_margin":
        return torch.cat([selection_margin(row, config.index_topk) for row in _runs(parts[0], host, ratio)])
    if short == "cand_margin":
        return _candidate_margin(parts[0], host, ratio, config)
    if short == "route_margin":
        return _route_margin(parts[0], host, config, weights[layer])
    if short == "topk_idxs" and len(parts) == 2:
        selected = torch.where(parts[1] < 0, -1, parts[1] + config.sliding_window)
        return torch.cat((parts[0], selected), dim=1)
    return _plain(parts[0])


def _plain(t: Tensor) -> Tensor:
    return t.float() if t.dtype is torch.bfloat16 else t.clone()


def _cut(t: Tensor, host: HostTable, ratio: int, beyond: float | bool) -> Tensor:
    widths = torch.tensor([end // ratio for end in host.ends], device=t.device)
    t = t[:, : int(widths.max())]
    return t.masked_fill(torch.arange(t.shape[1], device=t.device) >= widths.unsqueeze(-1), beyond)


def _runs(scores: Tensor, host: HostTable, ratio: int) -> list[Tensor]:
    """Each row's scores, as wide as its run can see."""
    return [scores[t : t + 1, : end // ratio].float() for t, end in enumerate(host.ends)]


def _candidate_margin(scores: Tensor, host: HostTable, ratio: int, config: V41Config) -> Tensor:
    margins = []
    for position, row in zip(host.columns["positions"], _runs(scores, host, ratio), strict=True):
        visible = torch.tensor([(position + 1) // ratio], device=row.device)
        blocks = block_scores(row, visible, config.candidate_block_size) if row.shape[1] else row
        margins.append(selection_margin(blocks, config.candidate_topk_blocks))
    return torch.cat(margins)


def _route_margin(logits: Tensor, host: HostTable, config: V41Config, weights: LayerWeights) -> Tensor:
    image = torch.tensor(host.columns["image_mask"], dtype=torch.bool, device=logits.device).unsqueeze(-1)
    biased = expert_scores(logits / config.gate_temp, config.scoring_func)
    biased = biased + torch.where(image, weights.ffn.bias_vl, weights.ffn.bias)
    k = config.num_experts_per_tok
    if k == biased.shape[1]:
        return biased.new_full((len(biased),), torch.inf)
    best = biased.sort(dim=-1, descending=True).values
    return best[:, k - 1] - best[:, k]
