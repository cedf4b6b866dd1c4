"""Rotation of the last channels, adjacent pairs as complex numbers (reference/rotary.py; numeric contract, section 7).

    (re, im) -> (re cos - im sin, re sin + im cos) in float32; the inverse negates sin

cos and sin of every row and rope kind come from plan_rows.
"""

from __future__ import annotations

from torch import Tensor

from optimized import seams
from optimized.step import Rows


def rotate(out: Tensor, x: Tensor, rows: Rows, site: str, *, kind: int, rotary: int) -> None:
    """out [T, ..., C] <- x [T, ..., C] (may be the same tensor); only the last `rotary` channels are written.

    site: q | window | latent | index_q | index_k | out, whose rotation is the inverse.
    """
    shape = (x.shape[0], *(1,) * (x.dim() - 2), rotary // 2)
    cos, sin = rows.rope_cos[kind].view(shape), rows.rope_sin[kind].view(shape)
    if site == "out":
        sin = -sin
    out[..., -rotary:] = seams.rotate(x[..., -rotary:].float(), cos, sin, site)
