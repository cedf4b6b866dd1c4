"""Names of what can be observed inside a step, in dataflow order, and what each is computed from.

A tap is `L{i}.name` or a global name. Its kind says how two of them are compared: a `value` by error
against derived limits, a `decision` by the margin in float64, `scores` like a value but with -inf = masked
and NaN = padding in the same places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tap:
    """One kind of tap. `inputs`: taps of the same layer (`<` = of the layer below) whose agreement makes a
    difference its own.
    """

    name: str
    kind: str  # value | decision | scores | margin
    shape: str
    inputs: tuple[str, ...] = ()


# order = dataflow: the first name of this list that differs is where a layer went wrong
LAYER_TAPS: tuple[Tap, ...] = (
    Tap("engram_gate", "value", "[T, N]", ("<stream", "engram_hash")),
    Tap("engram_out", "value", "[T, N, D]", ("<stream", "engram_gate")),
    Tap("attn_pre", "value", "[T, N]", ("<stream",)),
    Tap("attn_in", "value", "[T, D]", ("<stream", "<pre_mix", "engram_out")),
    Tap("q", "value", "[T, H, C]", ("attn_in",)),
    Tap("win_row", "value", "[T, C]", ("attn_in",)),
    Tap("latent", "value", "[T, C]", ("attn_in",)),
    Tap("index_q", "value", "[T, Hi, Ci]", ("attn_in",)),
    Tap("index_w", "value", "[T, Hi]", ("attn_in",)),
    Tap("index_score", "scores", "[T, S]", ("index_q", "index_w", "latent")),
    Tap("candidates", "decision", "[T, S] bool", ("index_score",)),
    Tap("index_score_masked", "scores", "[T, S]", ("index_score", "candidates")),
    Tap("selection", "decision", "[T, index_topk]", ("index_score", "index_score_masked")),
    Tap("topk_idxs", "decision", "[T, W + index_topk]", ("selection",)),
    Tap("sparse_o", "value", "[T, H, C]", ("q", "win_row", "latent", "selection")),
    Tap("attn_out", "value", "[T, D]", ("sparse_o",)),
    Tap("mid_stream", "value", "[T, N, D]", ("attn_out", "<stream", "engram_out")),
    Tap("ffn_in", "value", "[T, D]", ("mid_stream", "attn_pre")),
    Tap("moe_idx", "decision", "[T, K]", ("ffn_in",)),
    Tap("moe_w", "value", "[T, K]", ("ffn_in", "moe_idx")),
    Tap("ffn_out", "value", "[T, D]", ("ffn_in", "moe_idx", "moe_w")),
    Tap("stream", "value", "[T, N, D]", ("ffn_out", "mid_stream")),
    Tap("pre_mix", "value", "[T, N]", ("mid_stream",)),
    Tap("index_margin", "margin", "[T]"),
    Tap("cand_margin", "margin", "[T]"),
    Tap("route_margin", "margin", "[T]"),
)
FIRST_TAPS: tuple[Tap, ...] = (Tap("engram_hash", "decision", "[T, layers, columns]"),)
LAST_TAPS: tuple[Tap, ...] = (
    Tap("final_collapsed", "value", "[T, D]", ("<stream", "<pre_mix")),
    Tap("final_normed", "value", "[T, D]", ("final_collapsed",)),
    Tap("hidden", "value", "[T, D]", ("final_collapsed",)),
    Tap("logits", "value", "[T, V]", ("final_normed", "hidden")),
)
_ORDER = {tap.name: index for index, tap in enumerate(LAYER_TAPS)}
_FIRST = {tap.name: tap for tap in FIRST_TAPS}
_LAST = {tap.name: tap for tap in LAST_TAPS}
_LAYER = {tap.name: tap for tap in LAYER_TAPS}
_PATTERN = re.compile(r"L(\d+)\.(\w+)")


def split(name: str) -> tuple[int | None, str]:
    """`L5.selection` -> (5, "selection"); a global name -> (None, name)."""
    match = _PATTERN.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def describe(name: str) -> Tap:
    """The tap's kind and inputs. An unknown name is a value: engines may offer more than this table."""
    _, short = split(name)
    return _LAYER.get(short) or _FIRST.get(short) or _LAST.get(short) or Tap(short, "value", "[T, ...]")


def order(name: str) -> tuple[int, int, int]:
    """Sort key: dataflow order of the whole model."""
    layer, short = split(name)
    if layer is None:
        if short in _FIRST:
            return (-1, 0, 0)
        return (10**6, 0, list(_LAST).index(short) if short in _LAST else len(_LAST))
    return (layer, 0, _ORDER.get(short, len(_ORDER)))


def input_names(name: str, available: Iterable[str], layer_ids: Iterable[int]) -> list[str]:
    """The taps, among those available, that this one is computed from."""
    layer, _ = split(name)
    have, ids = set(available), sorted(layer_ids)
    below = [i for i in ids if layer is None or i < layer]
    found = []
    for item in describe(name).inputs:
        if item.startswith("<"):
            full = f"L{below[-1]}.{item[1:]}" if below else ""
        else:
            full = item if layer is None or item in _FIRST else f"L{layer}.{item}"
        if full in have:
            found.append(full)
    return found


def layer_taps(config: Any, names: Iterable[str]) -> list[str]:
    """`L{i}.name` for every layer of the config that has such a tap, in dataflow order."""
    wanted = list(names)
    found = [
        f"L{role.index}.{name}"
        for role in config.layers()
        for name in wanted
        if name in _LAYER and exists(role, name)
    ]
    return sorted(found, key=order)


def exists(role: Any, name: str) -> bool:
    """Whether a layer of this role has the tap."""
    if name in ("engram_gate", "engram_out"):
        return role.has_engram
    if name == "latent":
        return role.is_kv_source
    if name in ("index_q", "index_w", "index_score", "index_margin"):
        return role.is_index_source
    if name in ("candidates", "cand_margin"):
        return role.is_candidate_source
    if name == "index_score_masked":
        return role.is_index_source and role.uses_candidates
    if name == "selection":
        return role.ratio > 0
    return True


COMPARED = tuple(tap.name for tap in LAYER_TAPS if tap.kind != "margin")


def all_taps(config: Any) -> list[str]:
    """Every tap of the model that two engines are compared on, in dataflow order."""
    first = [tap.name for tap in FIRST_TAPS] if config.hashes_ngrams else []
    return [*first, *layer_taps(config, COMPARED), "final_collapsed", "final_normed", "logits"]
