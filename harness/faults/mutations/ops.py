"""Faults of arithmetic: scores, selections, attention, norms, mixing, quantisers, products, experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.faults.mutation import Patch, mutation
from harness.faults.mutations.rows import live, widths


def before_attention(patch: Patch, change: Any) -> None:
    """`change(arguments, rows, engine)` may alter the named arguments of sparse_attention, copies included."""
    names = ("o", "sparse_o", "q", "win_row", "window", "latent", "sel_row", "attn_sink", "rows")

    def wrap(old: Any, engine: Any) -> Any:
        def sparse_attention(*given: Any, **constants: Any) -> None:
            arguments = dict(zip(names, given, strict=True))
            change(arguments, arguments["rows"], engine)
            old(*arguments.values(), **constants)

        return sparse_attention

    patch.op("sparse_attention", wrap)


def after_select(patch: Patch, change: Any) -> None:
    """`change(selection, sel_row, before, rows, plan)`: before = (selection, sel_row) as the buffers were."""

    def wrap(old: Any, engine: Any) -> Any:
        def select(selection: Tensor, sel_row: Tensor, score: Tensor, rows: Any, **constants: Any) -> None:
            before = selection.clone(), sel_row.clone()
            old(selection, sel_row, score, rows, **constants)
            change(selection, sel_row, before, rows, rows.ratios[constants["ratio"]])

        return select

    patch.op("select", wrap)


# indexer and selection


@mutation("F08")
def no_causal_mask(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def index_scores(*given: Any, ratio: int, **constants: Any) -> None:
            rows = given[5]
            plan = rows.ratios[ratio]
            visible = plan.visible.clone()
            plan.visible.copy_(torch.where(live(rows), rows.ends // ratio, visible))
            old(*given, ratio=ratio, **constants)
            plan.visible.copy_(visible)

        return index_scores

    patch.op("index_scores", wrap)


@mutation("F10")
def window_alone_in_prefill(patch: Patch) -> None:
    def change(arguments: dict[str, Any], rows: Any, _: Any) -> None:
        if arguments["sel_row"] is not None:
            several = (live(rows) & (widths(rows) > 1)).unsqueeze(1)
            arguments["sel_row"] = arguments["sel_row"].masked_fill(several, -1)

    before_attention(patch, change)


def first_rows(sel_row: Tensor, plan: Any, which: Tensor) -> None:
    """The first rows of the context for these queries, whether or not anybody has written them."""
    count = min(sel_row.shape[1], plan.address.shape[1])
    sel_row[:, :count] = torch.where(which.unsqueeze(1), plan.address[:, :count], sel_row[:, :count])


@mutation("F11")
def everything_when_nothing(patch: Patch) -> None:
    def change(selection: Tensor, sel_row: Tensor, _: Any, rows: Any, plan: Any) -> None:
        first_rows(sel_row, plan, live(rows) & (plan.visible == 0))

    after_select(patch, change)


@mutation("F60")
def one_past_an_empty_batch(patch: Patch) -> None:
    def change(selection: Tensor, sel_row: Tensor, _: Any, rows: Any, plan: Any) -> None:
        if not bool((plan.visible[live(rows)] > 0).any()):
            sel_row[:, 0] = plan.address[:, 0]

    after_select(patch, change)


@mutation("F27")
def indices_of_the_last_step(patch: Patch) -> None:
    def change(selection: Tensor, sel_row: Tensor, before: Any, rows: Any, plan: Any) -> None:
        absent = selection < 0
        selection.copy_(torch.where(absent, before[0], selection))
        sel_row.copy_(torch.where(absent, before[1], sel_row))

    after_select(patch, change)


@mutation("V11")
def empty_selection_not_published(patch: Patch) -> None:
    def change(selection: Tensor, sel_row: Tensor, before: Any, rows: Any, plan: Any) -> None:
        empty = (live(rows) & (plan.visible == 0)).unsqueeze(1)
        selection.copy_(torch.where(empty, before[0], selection))
        sel_row.copy_(torch.where(empty, before[1], sel_row))

    after_select(patch, change)


@mutation("F28")
def absent_row_addressed(patch: Patch) -> None:
    def change(arguments: dict[str, Any], rows: Any, _: Any) -> None:
        if arguments["sel_row"] is not None:
            sel_row, last = arguments["sel_row"], arguments["latent"].shape[0] - 1
            arguments["sel_row"] = torch.where(sel_row < 0, last, sel_row)

    before_attention(patch, change)


@mutation("F30")
def no_relu(patch: Patch) -> None:
    patch.seam("score_activation", lambda old: lambda d: d)


BUCKET = 4  # entries of the threshold bucket that are kept


@mutation("F32")
def bucket_cut_by_arrival(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
            kept = scores.clone()
            for t, row in enumerate(scores.float()):
                finite = row > -torch.inf
                if int(finite.sum()) <= k:
                    continue
                coarse = torch.sign(row) * row.abs().clamp(min=2.0**-20).log2().floor().add(32).clamp(min=0)
                threshold = old(coarse.masked_fill(~finite, -torch.inf).unsqueeze(0), k)[0][0, -1]
                bucket = (finite & (coarse == threshold)).nonzero().flatten()
                room = k - int((finite & (coarse > threshold)).sum())
                late = bucket.flip(0)[max(BUCKET, room) :]  # arrived last, whatever its score
                kept[t, late] = -torch.inf
            return old(kept, k)

        return top_k

    patch.seam("top_k", wrap)


@mutation("F33")
def ties_by_arrival(patch: Patch) -> None:
    calls = [0]

    def wrap(old: Any) -> Any:
        def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
            calls[0] += 1
            shift = calls[0] % max(1, scores.shape[1])
            best, order = old(scores.roll(shift, dims=1), k)
            return best, (order - shift) % scores.shape[1]

        return top_k

    patch.seam("top_k", wrap)


@mutation("V10")
def keys_published_when_written(patch: Patch) -> None:
    last: dict[int, Tensor | None] = {}
    current: dict[str, Any] = {}

    def remember(old: Any, engine: Any) -> Any:
        def plan_rows(rows: Any, **constants: Any) -> None:
            old(rows, **constants)
            current.update(rows=rows, engine=engine)

        return plan_rows

    def wrap(old: Any) -> Any:
        def published_keys(own: Tensor | None, published: Tensor | None) -> Tensor | None:
            if own is None or not current:
                return old(own, published)
            pool, rows = current["engine"].pool, current["rows"]
            layer = next((i for i, t in pool.index_key.items() if t.data_ptr() == own.data_ptr()), None)
            if layer is None:
                return own
            written = bool(rows.ratios[pool.config.layer(layer).ratio].completes.any())
            if written or last.get(id(pool)) is None:
                last[id(pool)] = own
            return last[id(pool)]

        return published_keys

    patch.op("plan_rows", remember)
    patch.seam("published_keys", wrap)


# pooling


@mutation("F12")
def imprecise_pooling(patch: Patch) -> None:
    def group_softmax(scores: Tensor) -> Tensor:
        y = (scores - scores.amax(1, keepdim=True)).to(torch.bfloat16).float() * 1.4426950408889634
        whole = y.floor()
        p = (
            (torch.exp2(whole) * (1 + y - whole)).to(torch.bfloat16).float()
        )  # a straight line between powers of two
        return p / p.sum(1, keepdim=True)

    patch.seam("group_softmax", lambda old: group_softmax)


# rotation


def halves(x: Tensor, turn: Tensor) -> Tensor:
    """Channel i turned with channel i + R/2."""
    turned = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


@mutation("F40")
def index_rotation_by_halves(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        return lambda x, turn, site: halves(x, turn) if site in ("index_q", "index_k") else old(x, turn, site)

    patch.seam("rotate", wrap)


@mutation("F44")
def compressed_rows_not_rotated(patch: Patch) -> None:
    patch.seam("rotate", lambda old: lambda x, turn, site: x if site == "latent" else old(x, turn, site))


# hyper-connections, norms, products


@mutation("F104")
def comb_untransposed(patch: Patch) -> None:
    patch.seam("expand", lambda old: lambda y, stream, post, comb: old(y, stream, post, comb.mT.contiguous()))


@mutation("F105")
def half_of_the_squares(patch: Patch) -> None:
    def mean_square(x: Tensor) -> Tensor:
        return x[..., : x.shape[-1] // 2].square().sum(-1, keepdim=True) / x.shape[-1]

    patch.seam("mean_square", lambda old: mean_square)


@mutation("F106")
def rows_and_columns_exchanged(patch: Patch) -> None:
    def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
        c = torch.softmax(logits, dim=-1) + eps
        c = c / (c.sum(-1, keepdim=True) + eps)
        for _ in range(iters - 1):
            c = c / (c.sum(-2, keepdim=True) + eps)
            c = c / (c.sum(-1, keepdim=True) + eps)
        return c

    patch.seam("sinkhorn", lambda old: sinkhorn)


def half_of(x: Tensor | None, upper: bool) -> Tensor | None:
    """The activation rows with the other half of their channels zero."""
    if x is None:
        return None
    out, half = x.clone(), x.shape[-1] // 2
    part = out[..., :half] if upper else out[..., half:]
    (part.view(torch.uint8) if part.element_size() == 1 else part).zero_()
    return out


@mutation("F107")
def splits_by_row_count(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def linear(out: Tensor, x: Any, xq: Any, xs: Any, w: Any, **more: Any) -> None:
            if out.shape[0] <= 4:
                old(out, x, xq, xs, w, **more)
                return
            parts = [torch.empty_like(out) for _ in range(2)]
            for part, upper in zip(parts, (False, True), strict=True):
                old(part, half_of(x, upper), half_of(xq, upper), xs, w, **more)
            out.copy_(parts[0].to(torch.bfloat16).float() + parts[1].to(torch.bfloat16).float())

        return linear

    patch.op("linear", wrap)


@mutation("F109")
def norm_of_each_head(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def linear_rope(out: Tensor, *given: Any, **constants: Any) -> None:
            old(out, *given, **constants)
            value = out.float()
            out.copy_(value * (value.square().mean(-1, keepdim=True) + 1e-20).rsqrt())

        return linear_rope

    patch.op("linear_rope", wrap)


@mutation("F110")
def own_pre(patch: Patch) -> None:
    patch.seam("pre_used", lambda old: lambda delayed, own: own)


# quantisers and layouts


@mutation("F112")
def mantissa_of_the_scale_dropped(patch: Patch) -> None:
    patch.seam("fp8_scale", lambda old: lambda amax: amax / 448)


@mutation("F113")
def unmasked_exponents(patch: Patch) -> None:
    kept: dict[str, Tensor] = {}

    def keep(old: Any) -> Any:
        def fp8_scale(amax: Tensor) -> Tensor:
            kept["bits"] = (amax / 448).view(torch.int32).clone()
            return old(amax)

        return fp8_scale

    def wrap(old: Any) -> Any:
        def encode_e8m0(scale: Tensor) -> Tensor:
            byte, bits = old(scale), kept.get("bits")
            if scale.shape[0] > 1 or bits is None or bits.shape != scale.shape:
                return byte
            return byte | ((bits >> 15) & 0xFF)  # the neighbour's mantissa in this byte

        return encode_e8m0

    patch.seam("fp8_scale", keep)
    patch.seam("encode_e8m0", wrap)


@mutation("F114")
def byte_as_a_number(patch: Patch) -> None:
    patch.seam("decode_e8m0", lambda old: lambda exponent: exponent.view(torch.uint8).to(torch.float32))


@mutation("F116")
def packed_bytes_as_fp32(patch: Patch) -> None:
    def wrap(old: Any) -> Any:
        def decode_e8m0(exponent: Tensor) -> Tensor:
            if exponent.shape[-1] % 4:
                return old(exponent)
            words = exponent.view(torch.uint8).contiguous().view(torch.float32)
            return words.repeat_interleave(4, dim=-1)

        return decode_e8m0

    patch.seam("decode_e8m0", wrap)


@mutation("F117")
def one_pool_of_another_width(patch: Patch) -> None:
    def change(arguments: dict[str, Any], rows: Any, engine: Any) -> None:
        first = engine.pool.window[engine.config.layer_ids[0]]
        if arguments["window"].data_ptr() == first.data_ptr():
            width = arguments["q"].shape[2]
            for name in ("window", "win_row"):
                other = arguments[name].clone()
                other[:, width:] = arguments[name][:, width:].roll(1, dims=1)
                arguments[name] = other

    before_attention(patch, change)


@mutation("F118")
def scales_of_the_next_row(patch: Patch) -> None:
    def change(arguments: dict[str, Any], rows: Any, _: Any) -> None:
        if arguments["latent"] is not None:
            latent, half = arguments["latent"].clone(), arguments["q"].shape[2] // 2
            latent[:, half:] = latent[:, half:].roll(-1, dims=0)
            arguments["latent"] = latent

    before_attention(patch, change)


@mutation("F119")
def rotated_channels_in_four_bits(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def attn_prep(
            qr: Any, qr_q: Any, qr_s: Any, win_row: Tensor, *given: Any, rotary: int, **more: Any
        ) -> None:
            old(qr, qr_q, qr_s, win_row, *given, rotary=rotary, **more)
            width = given[2].shape[0]
            codes = win_row[:, width - rotary : width].view(torch.float8_e4m3fn)
            value = codes.float()
            step = value.abs().amax(-1, keepdim=True).clamp(min=2.0**-6) / 6
            codes.copy_((value / step).round().clamp(-6, 6) * step)

        return attn_prep

    patch.op("attn_prep", wrap)


# attention over nothing


def empty_part(rows: Any, sel_row: Tensor | None) -> Tensor | None:
    return None if sel_row is None else live(rows) & (sel_row < 0).all(-1)


@mutation("F123")
def unguarded_maximum(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        def sparse_attention(o: Tensor, *given: Any, **constants: Any) -> None:
            old(o, *given, **constants)
            empty = empty_part(given[7], given[5])
            if empty is not None and bool(empty.any()):
                scores = torch.full((1,), -torch.inf)
                o[empty] += (scores - scores.max()).exp().to(o.dtype)  # the selected part's own softmax

        return sparse_attention

    patch.op("sparse_attention", wrap)


@mutation("F124")
def empty_part_of_lse_zero(patch: Patch) -> None:
    def wrap(old: Any, engine: Any) -> Any:
        from optimized.ops.attention import _window_rows

        def sparse_attention(o: Tensor, sparse_o: Tensor, q: Tensor, win_row: Tensor, window: Tensor, *given: Any,
                             scale: float, **constants: Any) -> None:  # fmt: skip
            old(o, sparse_o, q, win_row, window, *given, scale=scale, **constants)
            rows, empty = given[3], empty_part(given[3], given[1])
            if empty is None or not bool(empty.any()):
                return
            kv, there = _window_rows(win_row, window, rows, q.shape[2])
            scores = torch.einsum("thc,tlc->thl", q.float(), kv.nan_to_num(0.0)) * scale
            lse = scores.masked_fill(~there.unsqueeze(1), -torch.inf).logsumexp(-1, keepdim=True)
            weight = (0 - lse).exp()  # of the empty part, whose lse should be -inf
            merged = (o.float() + weight * 0) / (1 + weight)
            o.copy_(torch.where(empty.view(-1, 1, 1), merged, o.float()))

        return sparse_attention

    patch.op("sparse_attention", wrap)


@mutation("F55")
def skipped_padding_flows_on(patch: Patch) -> None:
    current: dict[int, Any] = {}

    def remember(old: Any, engine: Any) -> Any:
        def route(*given: Any, **constants: Any) -> None:
            old(*given, **constants)
            current[id(engine)] = given[5]

        return route

    def wrap(old: Any, engine: Any) -> Any:
        def moe_combine(out: Tensor, ye: Tensor, moe_idx: Tensor, **constants: Any) -> None:
            old(out, ye, moe_idx, **constants)
            rows = current[id(engine)]
            padding = (~live(rows)).nonzero().flatten()
            if len(padding):
                out[padding] = torch.randn_like(out[padding])  # what torch.empty happened to hold
                out[0] += out[int(padding[0])]

        return moe_combine

    patch.op("route", remember)
    patch.op("moe_combine", wrap)


@mutation("F99")
def folded_ids(patch: Patch) -> None:
    def change(engine: Any) -> None:
        from dataclasses import replace

        if engine.model.hash is None:
            return
        token_map = engine.model.hash.token_map.clone()
        distinct = (token_map != token_map[0]).nonzero().flatten()
        token_map[int(distinct[-1])] = token_map[0]
        engine.model.hash = replace(engine.model.hash, token_map=token_map)

    patch.built(change)
