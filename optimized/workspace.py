"""Every buffer that the ops of a step write beside the state: one set a bucket of T rows and S context
tokens.

Nothing here outlives a step: any step may overwrite it, and checking mode poisons it between steps.  Names
are those of the op contract; the taps of a step are copies of these buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from optimized.state_pool import StatePool
from optimized.step import Rows, make_rows
from reference.config import V41Config

BF16, F32, I64, U8 = torch.bfloat16, torch.float32, torch.int64, torch.uint8
NO_ID = -(2**31)  # no token, row or expert
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass
class Workspace:
    rows: Rows
    stream: tuple[Tensor, Tensor]  # bf16 [T, N, D], written in turn
    mix: Tensor  # f32 [T, splits, (2+N)N + 1]
    pre_attn: Tensor  # f32 [T, N]
    pre_ffn: Tensor  # f32 [T, N], also what enters the first layer
    post: Tensor  # f32 [T, N]
    comb: Tensor  # f32 [T, N, N]
    x: Tensor  # bf16 [T, D] a sublayer's input
    xq: Tensor  # bf16 [T, D] Q8(x) as values: code * scale fits bf16 exactly
    xs: Tensor  # u8 [T, D/32] the scale bytes, of use where xq holds codes
    qkv: Tensor  # bf16 [T, q_lora + C]
    qr: Tensor  # bf16 [T, q_lora]
    qr_q: Tensor
    qr_s: Tensor
    win_row: Tensor  # u8 [T, C + C/32]
    q: Tensor  # bf16 [T, H, C]
    kv_row: Tensor  # bf16 [T, C] compressor product at ratio 1
    kv_score: Tensor  # f32 [T, 2C] above
    latent_row: Tensor  # bf16 [T, C]
    ik_raw: Tensor  # bf16 [T, Ci]
    iq_raw: Tensor  # bf16 [T, Hi * Ci]
    iq: Tensor  # u8 [T, Hi, Ci/2]
    iq_s: Tensor  # u8 [T, Hi, Ci/32]
    index_w: Tensor  # bf16 [T, Hi]
    score: dict[int, Tensor]  # ratio -> bf16 [T, S/r]
    score_masked: dict[int, Tensor]
    blocks: Tensor  # bool [T, candidate blocks of S]
    selection: Tensor  # i64 [T, topk]
    sel_row: Tensor  # i64 [T, topk]
    sparse_o: Tensor  # bf16 [T, H, C]
    o: Tensor  # bf16 [T, H, C]
    u: Tensor  # bf16 [T, G * o_lora]
    uq: Tensor
    us: Tensor
    attn_out: Tensor  # bf16 [T, D]
    route_logits: Tensor  # f32 [T, E]
    moe_idx: Tensor  # i64 [T, K]
    moe_w: Tensor  # f32 [T, K]
    next_idx: Tensor  # i64 [T, K] predicted experts of the next layer
    next_w: Tensor
    h: Tensor  # bf16 [T, K+1, F]
    hq: Tensor
    hs: Tensor
    ye: Tensor  # bf16 [T, K+1, D]
    ffn_out: Tensor  # bf16 [T, D]
    hashes: Tensor  # i64 [T, engram layers, columns]
    ngram_row: Tensor  # i32 [T]
    engram_x: Tensor  # bf16 [T, columns * width]
    engram_xq: Tensor
    engram_xs: Tensor
    engram_kv: Tensor  # bf16 [T, (N+1) * D]
    engram_gate: Tensor  # f32 [T, N]
    collapsed: Tensor  # bf16 [T, D]
    normed: Tensor  # bf16 [T, D]
    logits: Tensor  # f32 [T, V]
    scratch: dict[str, Tensor] = field(default_factory=dict)
    taps: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        return self.rows.n_rows

    def tap_buffer(self, name: str, part: int, source: Tensor) -> Tensor:
        """A buffer of its own for a copy of `source`, at the same address at every step."""
        key = (name, part)
        if key not in self.taps:
            self.taps[key] = torch.empty_like(source, memory_format=torch.contiguous_format)
        return self.taps[key]

    def poison(self) -> None:
        """NaN bytes into every buffer of values, ids of nothing into those of ids: a reader of what this step
        hasn't written shows. A kernel's own counters in `scratch` stay, they count from what they left."""
        kept = {t.data_ptr() for t in self.scratch.values()}
        for tensor in self._buffers():
            if tensor.dtype is torch.bool:
                tensor.fill_(True)
            elif tensor.dtype.itemsize == 1:
                tensor.view(U8).fill_(0xFF)
            elif tensor.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            elif tensor.data_ptr() not in kept:
                tensor.fill_(NO_ID)

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._buffers())

    def _buffers(self) -> list[Tensor]:
        found: list[Tensor] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, dict):
                found.extend(value.values())
            elif isinstance(value, tuple):
                found.extend(value)
        return found


def make_workspace(
    config: V41Config,
    pool: StatePool,
    n_rows: int,
    context: int,
    *,
    splits: int = 1,
    scratch: Shapes | None = None,
    plain: bool = True,
) -> Workspace:
    """splits: partial results of hc_mix.  plain: for the plain-torch ops, with every context row's address;
    kernels walk the
    page table."""
    device, t, c = pool.device, n_rows, config
    n, d, width, heads = c.hc_mult, c.hidden_size, c.head_dim, c.num_attention_heads
    low, grouped = c.q_lora_rank, c.o_groups * c.o_lora_rank
    hi, ci, k, inner = c.index_n_heads, c.index_head_dim, c.num_experts_per_tok, c.moe_intermediate_size
    columns = c.engram_columns if c.hashes_ngrams else 0
    engram_width, orders = columns * c.engram_head_dim, max(1, len(c.engram_layer_ids))
    rows = make_rows(config, pool, n_rows, context, addresses=plain)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Workspace(
        rows=rows,
        stream=(new(BF16, t, n, d), new(BF16, t, n, d)),
        mix=new(F32, t, splits, (2 + n) * n + 1),
        pre_attn=new(F32, t, n),
        pre_ffn=new(F32, t, n),
        post=new(F32, t, n),
        comb=new(F32, t, n, n),
        x=new(BF16, t, d),
        xq=new(BF16, t, d),
        xs=new(U8, t, d // 32),
        qkv=new(BF16, t, low + width),
        qr=new(BF16, t, low),
        qr_q=new(BF16, t, low),
        qr_s=new(U8, t, low // 32),
        win_row=new(U8, t, width + width // 32),
        q=new(BF16, t, heads, width),
        kv_row=new(BF16, t, width),
        kv_score=new(F32, t, 2 * width),
        latent_row=new(BF16, t, width),
        ik_raw=new(BF16, t, ci),
        iq_raw=new(BF16, t, hi * ci),
        iq=new(U8, t, hi, ci // 2),
        iq_s=new(U8, t, hi, ci // 32),
        index_w=new(BF16, t, hi),
        score={r: new(BF16, t, context // r) for r in rows.ratios},
        score_masked={r: new(BF16, t, context // r) for r in rows.ratios},
        blocks=new(torch.bool, t, _candidate_blocks(c, context)),
        selection=new(I64, t, c.index_topk),
        sel_row=new(I64, t, c.index_topk),
        sparse_o=new(BF16, t, heads, width),
        o=new(BF16, t, heads, width),
        u=new(BF16, t, grouped),
        uq=new(BF16, t, grouped),
        us=new(U8, t, grouped // 32),
        attn_out=new(BF16, t, d),
        route_logits=new(F32, t, c.n_routed_experts),
        moe_idx=new(I64, t, k),
        moe_w=new(F32, t, k),
        next_idx=new(I64, t, k),
        next_w=new(F32, t, k),
        h=new(BF16, t, k + 1, inner),
        hq=new(BF16, t, k + 1, inner),
        hs=new(U8, t, k + 1, inner // 32),
        ye=new(BF16, t, k + 1, d),
        ffn_out=new(BF16, t, d),
        hashes=new(I64, t, orders, columns),
        ngram_row=new(torch.int32, t),
        engram_x=new(BF16, t, engram_width),
        engram_xq=new(BF16, t, engram_width),
        engram_xs=new(U8, t, engram_width // 32),
        engram_kv=new(BF16, t, (n + 1) * d if columns else 0),
        engram_gate=new(F32, t, n),
        collapsed=new(BF16, t, d),
        normed=new(BF16, t, d),
        logits=new(F32, t, c.vocab_size),
        scratch={name: new(dtype, *shape) for name, (shape, dtype) in (scratch or {}).items()},
    )


def _candidate_blocks(config: V41Config, context: int) -> int:
    if config.candidate_source_layer_id < 0:
        return 0
    rows = context // max(1, config.compress_ratios[config.candidate_source_layer_id])
    return -(-rows // config.candidate_block_size)
