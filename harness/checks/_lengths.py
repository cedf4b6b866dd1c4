"""Lengths at which something begins, ends, wraps or is cut, from the config alone."""

from __future__ import annotations

from typing import Any


def ratios(config: Any) -> list[int]:
    return sorted({role.ratio for role in config.layers() if role.ratio > 0})


def horizon(config: Any) -> int:
    """Tokens of a check's sequences: far enough for every cut of a small config, for three windows of a large one."""
    window = config.sliding_window
    return 5 * window + 8 if window <= 32 else 3 * window + 40


def cuts(config: Any) -> list[int]:
    """First lengths at which a selection leaves rows out, and at which candidate blocks are left out."""
    found = [r * (config.index_topk + 1) for r in ratios(config)]
    for role in config.layers():
        if role.is_candidate_source:
            found.append(role.ratio * (config.candidate_topk_blocks * config.candidate_block_size + 1))
    return found


def boundaries(config: Any, limit: int | None = None) -> list[int]:
    """Lengths at which something begins, ends or wraps, with their neighbours."""
    window, limit = config.sliding_window, limit or horizon(config)
    lengths = {1, 2, 3, 4, 5}
    for r in ratios(config):
        lengths |= {r - 1, r, r + 1, r + 2}
    lengths |= {window + d for d in (-2, -1, 0, 1, 2)}
    for multiple in (2, 3, 4):
        lengths |= {multiple * window + d for d in (-1, 0, 1)}
    for cut in cuts(config):
        lengths |= {cut - 1, cut, cut + 1}
    return sorted(n for n in lengths if 0 < n <= limit)
