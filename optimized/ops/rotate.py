"""Rotation of the last channels, adjacent pairs as complex numbers (reference/rotary.py; numeric contract,
section 7).

    (re, im) -> (re cos - im sin, re sin + im cos) in float32; the inverse negates sin

cos + i sin of every row and rope kind comes from plan_rows.
"""

from __future__ import annotations

from torch import Tensor

from optimized import seams
from optimized.step import Rows


def rotate(out: Tensor, x: Tensor, rows: Rows, site: str, *, kind: int, rotary: int) -> None:
    """out [T, ..., C] <- x [T, ..., C] (may be the same tensor); only the last `rotary` channels are written.

    site: q | window | latent | index_q | index_k | out, whose rotation is the inverse.
    """
    turn = rows.turns[kind, x.dim(), site == "out"]
    first = x.shape[-1] - rotary
    out.narrow(-1, first, rotary).copy_(seams.rotate(x.narrow(-1, first, rotary).float(), turn, site))
