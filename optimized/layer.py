"""One block as a list of launches; what it computes is reference/layer.py `block`, reference/attention.py
and reference/moe.py.

    [engram: expand, hash rows, product, gate]
    expand of the sublayer before + mixes, collapse with the delayed pre        -> x
    qkv, q_norm / window row, q, [compress, index key], [index query, scores, selection], attention, output
    expand + mixes, collapse                                                     -> x
    router, experts up, experts down, combine

A sublayer's output is not added at once: it travels as `Pending` to the next site, where expanding and
mixing are one launch. What a layer publishes (latent rows, index keys, candidate blocks, the selection)
travels in `Flow`, a value that lives for one forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from optimized import seams
from optimized.experts import ExpertCache
from optimized.launch import Launcher
from optimized.step import COMPRESSED, PLAIN
from optimized.weights import (
    AttentionWeights,
    CompressorWeights,
    IndexerWeights,
    LayerWeights,
    MoeWeights,
    Site,
)
from optimized.workspace import Workspace
from reference.config import LayerRole, V41Config


@dataclass(frozen=True)
class Pending:
    """A sublayer's output that the next site adds to the streams. tap: name of the streams once it is
    added.
    """

    y: Tensor
    tap: str


@dataclass
class Flow:
    """What one forward carries from op to op and layer to layer."""

    ws: Workspace
    launch: Launcher
    n_rows: int  # live rows
    wanted: tuple[str, ...] = ()  # taps
    stream: int = 0  # which of ws.stream holds the streams
    pending: Pending | None = None
    latent: Tensor | None = None  # published rows of the kv source below
    keys: Tensor | None = None  # published index keys
    experts: ExpertCache | None = None
    keep_unreachable: bool = False
    recorded: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)  # tap name -> copies

    def tap(self, name: str, *sources: Tensor) -> None:
        """Keep a copy of these buffers if somebody asked for the tap."""
        if name in self.wanted:
            copies = tuple(self.ws.tap_buffer(name, i, s) for i, s in enumerate(sources))
            for copy, source in zip(copies, sources, strict=True):
                self.launch("copy_tap", copy, source)
            self.recorded[name] = copies

    @property
    def streams(self) -> Tensor:
        return self.ws.stream[self.stream]

    def turn(self) -> tuple[Tensor, Tensor]:
        """(the streams, the buffer that becomes the streams)."""
        old = self.streams
        self.stream = 1 - self.stream
        return self.streams, old


@dataclass(frozen=True)
class LayerState:
    """This layer's own state, flat: window u8 [rows, C + C/32]; of a kv source also latent, index_key u8
    and, at r > 1, pending.
    """

    window: Tensor
    latent: Tensor | None
    index_key: Tensor | None
    pending: Tensor | None


class Block:
    """One layer's launches. state: the pool's buffers of this layer; next_gate: the next layer's router,
    for prediction.
    """

    def __init__(
        self,
        config: V41Config,
        role: LayerRole,
        weights: LayerWeights,
        state: LayerState,
        next_router: MoeWeights | None = None,
        next_index: int | None = None,
    ) -> None:
        self.config, self.role, self.weights, self.state = config, role, weights, state
        self.next_router, self.next_index = next_router, next_index
        self.name = f"L{role.index}"
        self.rope = {"kind": COMPRESSED if role.ratio else PLAIN, "rotary": config.qk_rope_head_dim}
        self.eps = {"norm_eps": config.rms_norm_eps}
        self.hc = {**self.eps, "hc_eps": config.hc_eps, "iters": config.hc_sinkhorn_iters}
        self.routing = {
            "scoring": config.scoring_func,
            "temperature": config.gate_temp,
            "normalize": config.norm_topk_prob,
            "route_scale": config.routed_scaling_factor,
        }
        self.index_scale = (
            config.index_head_dim**-0.5 * config.index_n_heads**-0.5 if role.is_index_source else 0.0
        )
        self.engram_place = config.engram_layer_ids.index(role.index) if role.has_engram else -1

    def forward(self, flow: Flow) -> None:
        """Streams and delayed pre of flow.ws -> the same after this layer, its FFN output still pending."""
        w, ws = self.weights, flow.ws
        self._enter(flow)
        self._site(flow, w.hc_attn, ws.pre_attn, ws.pre_ffn)
        flow.tap(f"{self.name}.attn_pre", ws.pre_attn)
        flow.tap(f"{self.name}.attn_in", ws.x)
        self._attention(flow, w.attn)
        flow.tap(f"{self.name}.attn_out", ws.attn_out)
        flow.pending = Pending(ws.attn_out, f"{self.name}.mid_stream")
        expand_and_mix(flow, w.hc_ffn)
        self._site(flow, w.hc_ffn, ws.pre_ffn, ws.pre_attn)
        flow.tap(f"{self.name}.pre_mix", ws.pre_ffn)
        flow.tap(f"{self.name}.ffn_in", ws.x)
        self._moe(flow, w.ffn)
        flow.tap(f"{self.name}.ffn_out", ws.ffn_out)
        flow.pending = Pending(ws.ffn_out, f"{self.name}.stream")

    # entry and sites

    def _enter(self, flow: Flow) -> None:
        if self.weights.engram is None:
            self._listen(flow)
            expand_and_mix(flow, self.weights.hc_attn)
            flow.tap(f"{self.name}.engram_out", flow.streams)
            return
        settle(flow)
        ws, launch, engram = flow.ws, flow.launch, self.weights.engram
        rows = (ws.engram_x, ws.engram_xq, ws.engram_xs)
        launch("engram_gather", *rows, ws.hashes, engram.table, layer_index=self.engram_place)
        launch("linear", ws.engram_kv, *rows, engram.wkv)
        launch("engram_gate", flow.streams, ws.engram_gate, ws.engram_kv, engram.qk, ws.rows, **self.eps)
        flow.tap(f"{self.name}.engram_gate", ws.engram_gate)
        flow.tap(f"{self.name}.engram_out", flow.streams)
        self._listen(flow)
        launch("hc_mix", ws.mix, flow.streams, self.weights.hc_attn.fn)

    def _listen(self, flow: Flow) -> None:
        """The streams that enter the layer, for the draft stages that listen to it."""
        name = f"{self.name}.entry"
        if "main_hidden" in flow.wanted and self.role.index in self.config.dspark_target_layer_ids:
            settle(flow)
            flow.wanted = (*flow.wanted, name)
            flow.tap(name, flow.streams)

    def _site(self, flow: Flow, site: Site, pre: Tensor, pre_in: Tensor) -> None:
        ws = flow.ws
        flow.launch(
            "hc_collapse",
            pre,
            ws.post,
            ws.comb,
            ws.x,
            ws.xq,
            ws.xs,
            ws.mix,
            flow.streams,
            pre_in,
            site,
            **self.hc,
        )

    # attention

    def _attention(self, flow: Flow, w: AttentionWeights) -> None:
        ws, launch, rows, role = flow.ws, flow.launch, flow.ws.rows, self.role
        launch("linear", ws.qkv, ws.x, ws.xq, ws.xs, w.wqa_kv)
        qr = (ws.qr, ws.qr_q, ws.qr_s)
        launch("attn_prep", *qr, ws.win_row, ws.qkv, w.q_norm, w.kv_norm, rows, **self.rope, **self.eps)
        launch("linear_rope", ws.q, ws.qr_q, ws.qr_s, ws.qr, w.wq_b, rows, **self.rope)
        flow.tap(f"{self.name}.q", ws.q)
        flow.tap(f"{self.name}.win_row", ws.win_row)
        if w.compressor is not None:
            self._compress(flow, w.compressor)
        if role.is_kv_source:
            flow.latent = self.state.latent
        flow.keys = seams.published_keys(self.state.index_key, flow.keys)
        if w.indexer is not None:
            self._index(flow, w.indexer)
        compressed = role.kv_source is not None
        if compressed:
            flow.tap(f"{self.name}.selection", ws.selection)
            flow.tap(f"{self.name}.topk_idxs", rows.window_position, ws.selection)
        else:
            flow.tap(f"{self.name}.topk_idxs", rows.window_position)
        launch(
            "sparse_attention",
            ws.o,
            ws.sparse_o,
            ws.q,
            ws.win_row,
            self.state.window,
            flow.latent if compressed else None,
            ws.sel_row if compressed else None,
            w.attn_sink,
            rows,
            **self.rope,
            scale=self.config.head_dim**-0.5,
        )
        flow.tap(f"{self.name}.sparse_o", ws.sparse_o)
        launch("grouped_out", ws.u, ws.uq, ws.us, ws.o, w.wo_a)
        launch("linear", ws.attn_out, ws.u, ws.uq, ws.us, w.wo_b)
        launch("commit_window", self.state.window, ws.win_row, rows)
        if self.state.pending is not None:
            launch("commit_pending", self.state.pending, ws.kv_score, rows, ratio=role.ratio)

    def _compress(self, flow: Flow, w: CompressorWeights) -> None:
        ws, launch, ratio = flow.ws, flow.launch, self.role.ratio
        group = {"ratio": ratio, "rotary": self.config.qk_rope_head_dim, **self.eps}
        product = ws.kv_row if ratio == 1 else ws.kv_score
        launch("linear", product, ws.x, None, None, w.kv_gate)
        launch(
            "compress",
            ws.latent_row,
            self.state.latent,
            product,
            self.state.pending,
            w.norm,
            ws.rows,
            **group,
        )
        flow.tap(f"{self.name}.latent", ws.latent_row)
        launch("linear", ws.ik_raw, ws.latent_row, None, None, w.wk)
        launch("index_key", self.state.index_key, ws.ik_raw, w.k_norm, ws.rows, **group)

    def _index(self, flow: Flow, w: IndexerWeights) -> None:
        ws, launch, rows, role, config = flow.ws, flow.launch, flow.ws.rows, self.role, self.config
        launch("linear", ws.iq_raw, ws.qr, ws.qr_q, ws.qr_s, w.wq_b)
        launch("index_query", ws.iq, ws.iq_s, ws.iq_raw, rows, **self.rope)
        launch("linear", ws.index_w, ws.x, ws.xq, ws.xs, w.weights_proj, scale=self.index_scale)
        score = ws.score[role.ratio]
        launch("index_scores", score, ws.iq, ws.iq_s, ws.index_w, flow.keys, rows, ratio=role.ratio)
        flow.tap(f"{self.name}.index_q", ws.iq, ws.iq_s)
        flow.tap(f"{self.name}.index_w", ws.index_w)
        flow.tap(f"{self.name}.index_score", score)
        if role.is_candidate_source:
            size = config.candidate_block_size
            blocks = {"block_size": size, "topk_blocks": config.candidate_topk_blocks}
            launch("candidate_blocks", ws.blocks, score, rows, ratio=role.ratio, **blocks)
            flow.tap(f"{self.name}.candidates", ws.blocks)
            flow.tap(f"{self.name}.cand_margin", score)
        elif role.uses_candidates:
            masked = ws.score_masked[role.ratio]
            launch("mask_scores", masked, score, ws.blocks, block_size=config.candidate_block_size)
            score = masked
            flow.tap(f"{self.name}.index_score_masked", score)
        flow.tap(f"{self.name}.index_margin", score)
        select = {"ratio": role.ratio, "keep_unreachable": flow.keep_unreachable}
        launch("select", ws.selection, ws.sel_row, score, rows, **select)

    # experts

    def _moe(self, flow: Flow, w: MoeWeights) -> None:
        ws, launch = flow.ws, flow.launch
        launch("linear", ws.route_logits, ws.x, None, None, w.gate)
        launch("route", ws.moe_idx, ws.moe_w, ws.route_logits, w.bias, w.bias_vl, ws.rows, **self.routing)
        flow.tap(f"{self.name}.route_margin", ws.route_logits)
        flow.tap(f"{self.name}.moe_idx", ws.moe_idx)
        flow.tap(f"{self.name}.moe_w", ws.moe_w)
        if flow.experts is None:
            assert w.w13 is not None and w.w2 is not None
            self._predict(flow)
            self._experts(flow, w, w.w13, w.w2, None)
        else:
            for _ in flow.experts.passes(self.role.index, ws.moe_idx, flow.n_rows):
                self._experts(flow, w, *flow.experts.bank(self.role.index))
            self._predict(flow)
        launch("moe_combine", ws.ffn_out, ws.ye, ws.moe_idx)

    def _experts(self, flow: Flow, w: MoeWeights, w13: object, w2: object, slots: Tensor | None) -> None:
        ws = flow.ws
        hidden = (ws.h, ws.hq, ws.hs)
        x = (ws.x, ws.xq, ws.xs)
        where = {} if slots is None else {"expert_slots": slots}
        limit = self.config.swiglu_limit
        flow.launch("expert_up", *hidden, *x, ws.moe_idx, ws.moe_w, w13, w.shared_w13, limit=limit, **where)
        flow.launch("expert_down", ws.ye, *hidden, ws.moe_idx, w2, w.shared_w2, **where)

    def _predict(self, flow: Flow) -> None:
        """The next layer's router on this layer's input: which experts it will probably ask for. Changes no
        result.
        """
        tap = f"{self.name}.next_experts"
        if (
            self.next_router is None
            or self.next_index is None
            or (flow.experts is None and tap not in flow.wanted)
        ):
            return
        ws, router = flow.ws, self.next_router
        flow.launch("linear", ws.route_logits, ws.x, None, None, router.gate)
        flow.launch(
            "route",
            ws.next_idx,
            ws.next_w,
            ws.route_logits,
            router.bias,
            router.bias_vl,
            ws.rows,
            **self.routing,
        )
        flow.tap(tap, ws.next_idx)
        if flow.experts is not None:
            flow.experts.predict(self.next_index, ws.next_idx, flow.n_rows)


def settle(flow: Flow) -> None:
    """Add the pending output to the streams, if there is one."""
    if flow.pending is None:
        return
    pending, ws = flow.pending, flow.ws
    new, old = flow.turn()
    flow.launch("hc_expand", new, pending.y, old, ws.post, ws.comb)
    flow.pending = None
    flow.tap(pending.tap, new)


def expand_and_mix(flow: Flow, site: Site) -> None:
    """Add the pending output, and the site's projections of the result."""
    ws, pending = flow.ws, flow.pending
    if pending is None:
        flow.launch("hc_mix", ws.mix, flow.streams, site.fn)
        return
    new, old = flow.turn()
    flow.launch("hc_expand_mix", new, ws.mix, pending.y, old, ws.post, ws.comb, site.fn)
    flow.pending = None
    flow.tap(pending.tap, new)
