"""A stand-alone engine behind the remote protocol: one file, numpy only, nothing of this project imported.

It keeps the token ids of every sequence and computes all rows again at each step, straight from the numeric contract:
slow, plain, and unable to have a state bug. `--fault NAME` breaks it on purpose, to show what the harness says then.

    dsv41 verify --remote "python tests/harness/example_engine.py"
"""

import hashlib
import json
import math
import struct
import sys
import time

import numpy as np

F32, F64 = np.float32, np.float64
DTYPES = {
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F16": np.float16,
}
NAMES = {np.dtype(value): key for key, value in DTYPES.items()}


# --- frames and safetensors ----------------------------------------------------------------------------------------


def read_frame(stream):
    prefix = stream.read(16)
    if len(prefix) < 16:
        raise SystemExit(0)  # the harness has gone
    magic, header, payload = struct.unpack("<4sIQ", prefix)
    if magic != b"DSV1":
        raise SystemExit("not a frame")
    return json.loads(stream.read(header)), unpack_tensors(stream.read(payload)) if payload else {}


def write_frame(stream, header, tensors=None):
    text = json.dumps(header).encode()
    payload = pack_tensors(tensors) if tensors else b""
    stream.write(struct.pack("<4sIQ", b"DSV1", len(text), len(payload)) + text + payload)
    stream.flush()


def unpack_tensors(data):
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    tensors = {}
    for name, info in header.items():
        if name != "__metadata__":
            begin, end = info["data_offsets"]
            tensors[name] = np.frombuffer(body[begin:end], DTYPES[info["dtype"]]).reshape(info["shape"])
    return tensors


def pack_tensors(tensors):
    header, chunks, offset = {}, [], 0
    for name, value in tensors.items():
        data = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


# --- roundings and quantisers --------------------------------------------------------------------------------------


def bf16(x):
    """Round to nearest even at 8 significant bits."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(F32)


def e4m3(x):
    _, exponent = np.frexp(x)
    step = np.ldexp(F32(1), np.maximum(exponent - 1, -6) - 3).astype(F32)
    return np.clip(np.rint(x / step) * step, -448, 448).astype(F32)


def e2m1(x):
    size = np.minimum(np.abs(x), F32(6))
    step = np.where(size < 2, F32(0.5), np.where(size < 4, F32(1), F32(2)))
    return np.copysign(np.rint(size / step) * step, x).astype(F32)


def power_of_two_ceil(x):
    bits = x.astype(F32).view(np.uint32)
    return (((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23).astype(np.uint32).view(F32)


def quantised(x, group, floor, scale_of, code_of, largest):
    parts = x.astype(F32).reshape(*x.shape[:-1], -1, group)
    amax = np.maximum(np.abs(parts).max(-1, keepdims=True), F32(floor))
    scale = scale_of(amax)
    return (code_of(np.clip(parts / scale, -largest, largest)) * scale).reshape(x.shape).astype(F32)


def q8(x):
    return quantised(x, 32, 1e-4, lambda a: power_of_two_ceil(a * F32(1 / 448)), e4m3, F32(448))


def q4_index(x):
    return quantised(x, 32, 6 * 2.0**-126, lambda a: power_of_two_ceil(a * F32(1 / 6)), e2m1, F32(6))


def q4_latent(x):
    return quantised(x, 16, 6 * 2.0**-9, lambda a: e4m3(np.minimum(a / F32(6), F32(448))), e2m1, F32(6))


def product(x, weight):
    """x [..., K], weight [N, K]: accumulated in float64, one rounding to float32."""
    return (x.astype(F64) @ weight.astype(F64).T).astype(F32)


def inverse_rms(x, eps):
    return (1 / np.sqrt(np.mean(np.square(x), -1, keepdims=True, dtype=F32) + F32(eps))).astype(F32)


def sigmoid(x):
    return (1 / (1 + np.exp(-x.astype(F32)))).astype(F32)


# --- the model -----------------------------------------------------------------------------------------------------


class Model:
    def __init__(self, config, weights):
        self.c, self.w, self.eps = config, weights, config["rms_norm_eps"]
        self.frequencies = {r: self.layer_frequencies(r) for r in set(config["compress_ratios"])}
        self.primes = self.draw_primes()

    # pieces

    def norm(self, x, name):
        return bf16(self.w[f"{name}.weight"] * (x * inverse_rms(x, self.eps)))

    def linear(self, x, name):
        """Which products quantise their input: numeric contract, section 3."""
        last = name.rsplit(".", 1)[-1]
        expert = ".experts." in name
        dense = (
            last in ("wq_a", "wq_b", "wo_b")
            or name.endswith(("attn.wkv", "engram.wkv"))
            or ".shared_experts." in name
        )
        kind = self.c["expert_dtype"] if expert else self.c["dtype"] if dense else "bf16"
        return bf16(product(q8(x) if kind in ("fp8", "fp4") else x, self.w[f"{name}.weight"]))

    def layer_frequencies(self, ratio):
        c, rotary = self.c, self.c["qk_rope_head_dim"]
        theta = F32(c["compress_rope_theta"] if ratio else c["rope_theta"])
        pair = np.arange(rotary // 2, dtype=F32)
        plain = (F32(1) / theta ** (2 * pair / rotary)).astype(F32)
        original = c["original_max_position_embeddings"]
        if ratio == 0 or original == 0:
            return plain

        def correction(rotations):
            return (
                rotary
                * math.log(original / (2 * math.pi * rotations))
                / (2 * math.log(c["compress_rope_theta"]))
            )

        low = max(math.floor(correction(c["rope_beta_fast"])), 0)
        high = min(math.ceil(correction(c["rope_beta_slow"])), rotary - 1)
        ramp = np.clip((pair - low) / max(high - low, 1e-3), 0, 1).astype(F32)
        return (plain / F32(c["rope_factor"]) * ramp + plain * (1 - ramp)).astype(F32)

    def rotate(self, x, positions, ratio, inverse=False):
        frequencies = self.frequencies[ratio]
        angle = (positions.astype(F32)[:, None] * frequencies).astype(F32)
        angle = angle.reshape(len(positions), *(1,) * (x.ndim - 2), -1)
        cos, sin = np.cos(angle), np.sin(angle) * (-1 if inverse else 1)
        plain, turning = x[..., : -2 * len(frequencies)], x[..., -2 * len(frequencies) :]
        re, im = turning[..., 0::2], turning[..., 1::2]
        turned = np.stack((re * cos - im * sin, re * sin + im * cos), -1).reshape(turning.shape)
        return np.concatenate((plain, bf16(turned)), -1)

    def coefficients(self, h, site):
        c, n = self.c, self.c["hc_mult"]
        flat = h.reshape(len(h), -1)
        m = product(flat, self.w[f"{site}_fn"]) * inverse_rms(flat, self.eps)
        scale, base, eps = self.w[f"{site}_scale"], self.w[f"{site}_base"], F32(c["hc_eps"])
        pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        comb = np.exp(comb - comb.max(-1, keepdims=True))
        comb = comb / comb.sum(-1, keepdims=True) + eps
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-1, keepdims=True) + eps)
            comb = comb / (comb.sum(-2, keepdims=True) + eps)
        return pre, post, comb

    def collapse(self, h, weights):
        return bf16((weights[..., None] * h).sum(1))

    def expand(self, y, h, post, comb):
        mixed = np.einsum("tjk,tjd->tkd", comb.astype(F64), h.astype(F64)).astype(F32)
        return bf16(post[..., None] * y[:, None] + mixed)

    # n-gram memory

    def draw_primes(self):
        c, taken, primes = self.c, set(), {}
        for layer in c["engram_layer_ids"]:
            for order in range(c["engram_max_ngram_size"] - 1):
                candidate = c["engram_vocab_size"] - 1
                for head in range(c["engram_n_heads"]):
                    candidate += 1
                    while candidate in taken or any(
                        candidate % d == 0 for d in range(2, math.isqrt(candidate) + 1)
                    ):
                        candidate += 1
                    taken.add(candidate)
                    primes[layer, order, head] = candidate
        return primes

    def ngram_rows(self, layer, tokens, image):
        """Table rows [T, columns] of every position."""
        c, n = self.c, self.c["engram_max_ngram_size"]
        ids = np.where(image, -1, self.w["token_map"][tokens])
        pad = int(self.w["token_map"][c["engram_pad_token_id"]])
        bound = max(1, (2**63 - 1) // c["engram_compressed_vocab_size"] // 2)
        multipliers = np.random.default_rng(10007 * layer).integers(0, bound, size=n, dtype=np.int64) * 2 + 1
        rows = []
        for t in range(len(ids)):
            blocked, lookback = False, []
            for k in range(n):
                blocked = blocked or t < k or ids[t - k] == -1
                lookback.append(pad if blocked else int(ids[t - k]))
            rolling, offset, columns = lookback[0] * int(multipliers[0]), 0, []
            for order in range(n - 1):
                rolling ^= lookback[order + 1] * int(multipliers[order + 1])
                for head in range(c["engram_n_heads"]):
                    prime = self.primes[layer, order, head]
                    columns.append(offset + rolling % prime)
                    offset += prime
            rows.append(columns)
        return np.array(rows, np.int64)

    def engram(self, h, rows, image, name):
        n, width = h.shape[1:]
        values = self.w[f"{name}.embed.weight"][rows].reshape(len(rows), -1)
        kv = self.linear(values, f"{name}.wkv")
        key, value = kv[:, : n * width].reshape(-1, n, width), kv[:, n * width :]
        both = (self.w[f"{name}.q_weight"] * self.w[f"{name}.k_weight"]).astype(F64)
        dot = np.einsum("tnd,nd,tnd->tn", h.astype(F64), both, key.astype(F64)).astype(F32)
        dot = dot * (inverse_rms(h, self.eps) * inverse_rms(key, self.eps))[..., 0] * F32(width**-0.5)
        gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), F32(1e-6))), dot))
        gate = np.where(image[:, None], F32(0), gate)
        return bf16(h + gate[..., None] * value[:, None]), gate

    # attention

    def attention(self, x, layer, shared, taps):
        c, name, ratio = self.c, f"layers.{layer}.attn", self.c["compress_ratios"][layer]
        heads, width, count = c["num_attention_heads"], c["head_dim"], len(x)
        positions = np.arange(count)
        qr = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = self.rotate(self.linear(qr, f"{name}.wq_b").reshape(count, heads, width), positions, ratio)
        window = q8(
            self.rotate(self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm"), positions, ratio)
        )
        taps["q"], taps["win_row"] = q, window
        if ratio and layer in c["kv_source_layer_ids"]:
            self.compress(x, layer, ratio, shared, taps)
        if ratio and layer in c["index_source_layer_ids"]:
            self.index(x, qr, layer, ratio, shared, taps)
        places = positions[:, None] + np.arange(1 - c["sliding_window"], 1)
        lists, sources = [np.where(places < 0, -1, places)], [window]
        if ratio:
            lists.append(shared["selection"])
            sources.append(shared["latent"])
            taps["selection"] = shared["selection"]
        rows = np.concatenate([s[np.maximum(p, 0)] if len(s) else np.zeros((*p.shape, width), F32)
                               for s, p in zip(sources, lists, strict=True)], 1)  # fmt: skip
        o = self.sparse(q, rows, np.concatenate([p >= 0 for p in lists], 1), self.w[f"{name}.attn_sink"])
        taps["sparse_o"] = o
        o = self.rotate(o, positions, ratio, inverse=True)
        groups = c["o_groups"]
        wo_a = self.w[f"{name}.wo_a.weight"].reshape(groups, c["o_lora_rank"], -1).astype(F64)
        u = np.einsum("tgk,grk->tgr", o.reshape(count, groups, -1).astype(F64), wo_a).astype(F32)
        return self.linear(bf16(u).reshape(count, -1), f"{name}.wo_b")

    def compress(self, x, layer, ratio, shared, taps):
        c, name, groups = self.c, f"layers.{layer}.attn", len(x) // ratio
        completed = np.full((len(x), c["head_dim"]), np.nan, F32)
        shared["keys"] = np.zeros((0, c["index_head_dim"]), F32)
        shared["latent"] = np.zeros((0, c["head_dim"]), F32)
        taps["latent"] = completed
        if groups == 0:
            return
        positions = np.arange(groups) * ratio
        x = x[: groups * ratio]
        kv = product(x, self.w[f"{name}.compressor.wkv.weight"])
        if ratio == 1:
            pooled = bf16(kv)
        else:
            score = product(x, self.w[f"{name}.compressor.wgate.weight"])
            kv, score = (v.reshape(groups, ratio, -1) for v in (kv, score))
            weights = np.exp(score - score.max(1, keepdims=True))
            pooled = bf16((kv * (weights / weights.sum(1, keepdims=True))).sum(1))
        latent = self.norm(pooled, f"{name}.compressor.norm")
        keys = self.norm(self.linear(latent, f"{name}.indexer.wk"), f"{name}.indexer.k_norm")
        shared["keys"] = q4_index(self.rotate(keys, positions, ratio))
        shared["latent"] = q4_latent(self.rotate(latent, positions, ratio))
        completed[positions + ratio - 1] = latent

    def index(self, x, qr, layer, ratio, shared, taps):
        c, name = self.c, f"layers.{layer}.attn.indexer"
        heads, width, topk = c["index_n_heads"], c["index_head_dim"], c["index_topk"]
        count, keys = len(x), shared["keys"]
        positions = np.arange(count)
        q = self.linear(qr, f"{name}.wq_b").reshape(count, heads, width)
        q = q4_index(self.rotate(q, positions, ratio))
        weights = bf16(self.linear(x, f"{name}.weights_proj") * F32(width**-0.5 * heads**-0.5))
        dot = bf16(np.einsum("thc,sc->ths", q.astype(F64), keys.astype(F64)).astype(F32))
        score = bf16(bf16(np.maximum(dot, 0) * weights[..., None]).sum(1, dtype=F32))
        visible = (positions + 1) // ratio
        score = np.where(np.arange(len(keys)) >= visible[:, None], F32(-np.inf), score)
        taps.update(index_q=q, index_w=weights, index_score=score)
        candidate = c["candidate_source_layer_id"]
        if layer == candidate:
            shared["candidates"] = taps["candidates"] = self.candidates(score, visible)
        elif 0 <= candidate < layer:
            score = taps["index_score_masked"] = np.where(shared["candidates"], score, F32(-np.inf))
        selection = np.full((count, topk), -1, np.int64)
        for t in range(count):
            best = np.argsort(-score[t], kind="stable")[:topk]
            best = np.sort(best[score[t][best] > -np.inf])
            selection[t, : len(best)] = best
        shared["selection"] = selection

    def candidates(self, score, visible):
        size, keep = self.c["candidate_block_size"], self.c["candidate_topk_blocks"]
        mask = np.zeros(score.shape, np.bool_)
        for t in range(len(score)):
            blocks = [score[t, i : i + size].max() for i in range(0, score.shape[1], size)]
            if visible[t]:
                blocks[(visible[t] - 1) // size] = np.inf
            for block in np.argsort(-np.array(blocks), kind="stable")[:keep]:
                if blocks[block] > -np.inf:
                    mask[t, block * size : (block + 1) * size] = True
        return mask

    def sparse(self, q, rows, present, sink):
        count, heads, width = q.shape
        highest, total = np.full((count, heads, 1), -1e30, F32), np.zeros((count, heads, 1), F32)
        out = np.zeros(q.shape, F32)
        for begin in range(0, rows.shape[1], 64):
            there = present[:, begin : begin + 64]
            kv = np.where(there[..., None], rows[:, begin : begin + 64], F32(0)).astype(F64)
            s = (np.einsum("thc,tlc->thl", q.astype(F64), kv).astype(F32) * F32(width**-0.5)).astype(F32)
            s = np.where(there[:, None], s, F32(-np.inf))
            higher = np.maximum(highest, s.max(-1, keepdims=True))
            p, correction = np.exp(s - higher), np.exp(highest - higher)
            total = total * correction + p.sum(-1, keepdims=True, dtype=F32)
            out = out * correction + np.einsum("thl,tlc->thc", bf16(p).astype(F64), kv).astype(F32)
            highest = higher
        return bf16(out / (total + np.exp(sink[:, None] - highest)))

    # experts

    def experts(self, x, image, layer, taps):
        c, name = self.c, f"layers.{layer}.ffn"
        logits = product(x, self.w[f"{name}.gate.weight"]) / F32(c["gate_temp"])
        scores = np.sqrt(np.where(logits > 20, logits, np.log1p(np.exp(np.minimum(logits, 20)))).astype(F32))
        bias = self.w[f"{name}.gate.bias"]
        biased = scores + np.where(image[:, None], self.w.get(f"{name}.gate.bias_vl", bias), bias)
        chosen = np.argsort(-biased, -1, kind="stable")[:, : c["num_experts_per_tok"]]
        weights = np.take_along_axis(scores, chosen, -1)
        if c["norm_topk_prob"] and chosen.shape[1] > 1:
            weights = weights / (weights.sum(-1, keepdims=True) + F32(1e-20))
        weights = (weights * F32(c["routed_scaling_factor"])).astype(F32)
        taps["moe_idx"], taps["moe_w"] = chosen.astype(np.int64), weights
        y = np.zeros_like(x)
        for expert in np.unique(chosen):
            token, place = np.nonzero(chosen == expert)
            y[token] += self.expert(x[token], f"{name}.experts.{expert}", weights[token, place][:, None])
        return bf16(y + self.expert(x, f"{name}.shared_experts", None))

    def expert(self, x, name, weight):
        gate, up, limit = (
            self.linear(x, f"{name}.w1"),
            self.linear(x, f"{name}.w3"),
            F32(self.c["swiglu_limit"]),
        )
        if limit > 0:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        z = gate * sigmoid(gate) * up
        return self.linear(bf16(z if weight is None else weight * z), f"{name}.w2")

    # all of it

    def forward(self, tokens, image):
        """Every row of one sequence: hidden [T, D], logits [T, V], taps."""
        c, tokens, taps, shared = self.c, np.array(tokens), {}, {}
        image = np.array(image, np.bool_)
        h = np.repeat(self.w["embed.weight"][tokens][:, None], c["hc_mult"], 1)
        pre_mix = np.zeros(h.shape[:2], F32)
        pre_mix[:, 0] = 1
        hashes = [self.ngram_rows(layer, tokens, image) for layer in c["engram_layer_ids"]]
        if hashes:
            taps["engram_hash"] = np.stack(hashes, 1)
        for layer in c["layer_ids"]:
            name, inner = f"layers.{layer}", {}
            if layer in c["engram_layer_ids"]:
                rows = hashes[c["engram_layer_ids"].index(layer)]
                h, inner["engram_gate"] = self.engram(h, rows, image, f"{name}.engram")
            inner["engram_out"] = h
            pre, post, comb = self.coefficients(h, f"{name}.hc_attn")
            x = self.norm(self.collapse(h, pre_mix), f"{name}.attn_norm")
            y = self.attention(x, layer, shared, inner)
            h = self.expand(y, h, post, comb)
            inner.update(attn_pre=pre, attn_in=x, attn_out=y, mid_stream=h)
            pre_mix, post, comb = self.coefficients(h, f"{name}.hc_ffn")
            x = self.norm(self.collapse(h, pre), f"{name}.ffn_norm")
            y = self.experts(x, image, layer, inner)
            h = self.expand(y, h, post, comb)
            inner.update(ffn_in=x, ffn_out=y, stream=h, pre_mix=pre_mix)
            taps.update({f"L{layer}.{key}": value for key, value in inner.items()})
        collapsed = self.collapse(h, pre_mix)
        hidden = self.norm(collapsed, "norm")
        logits = product(hidden, self.w["head.weight"])
        taps.update(final_collapsed=collapsed, final_normed=hidden, logits=logits)
        return hidden, logits, taps


# --- the verbs -----------------------------------------------------------------------------------------------------


class Refused(Exception):
    """An error of the contract: its class, the field, what was expected of it and what came."""

    def __init__(self, kind, field, expected, actual):
        super().__init__(f"{kind}: {field}: expected {expected}, got {actual}")
        self.report = {"type": kind, "field": field, "expected": expected, "actual": actual}


class Server:
    def __init__(self, fault):
        self.fault, self.sequences, self.opened, self.steps = fault, {}, 0, 0

    def hello(self, request, tensors):
        self.config, self.digest = request["config"], request["digest"]
        version = 99 if self.fault == "version" else 1
        return {"protocol": version, "name": "example (numpy)", "max_rollback": self.config["max_position_embeddings"],
                "declines": ["graphs", "bitwise"], "weights": "dense"}, {}  # fmt: skip

    def weights(self, request, tensors):
        self.model = Model(self.config, tensors)
        return {}, {}

    def sequence(self, name):
        if name not in self.sequences:
            raise Refused("StateError", "sequence", "a live sequence", name)
        return self.sequences[name]

    def adopt(self, tokens, image, capacity):
        if not isinstance(capacity, int) or not 0 < capacity <= self.config["max_position_embeddings"]:
            raise Refused("CapacityError", "capacity", "1 .. max_position_embeddings", capacity)
        self.opened += 1
        self.sequences[self.opened] = {"tokens": list(tokens), "image": list(image), "capacity": capacity}
        return {"sequence": self.opened}, {}

    def open(self, request, tensors):
        return self.adopt([], [], request["capacity"])

    def length(self, request, tensors):
        return {"length": len(self.sequence(request["sequence"])["tokens"])}, {}

    def close(self, request, tensors):
        name = request["sequence"]
        if not isinstance(name, int) or not 0 < name <= self.opened:
            raise Refused("StateError", "sequence", "one that was opened", name)
        self.sequences.pop(name, None)
        return {}, {}

    def rollback(self, request, tensors):
        held, length = self.sequence(request["sequence"]), request["length"]
        if not 0 <= length <= len(held["tokens"]):
            raise Refused("RollbackError", "length", f"0 .. {len(held['tokens'])}", length)
        held["tokens"], held["image"] = held["tokens"][:length], held["image"][:length]
        return {}, {}

    def branch(self, request, tensors):
        held = self.sequence(request["source"])
        return self.adopt(held["tokens"], held["image"], held["capacity"])

    def snapshot(self, request, tensors):
        held = self.sequence(request["sequence"])
        body = json.dumps({"tokens": held["tokens"], "image": held["image"], "config": self.digest}).encode()
        return {}, {"blob": np.frombuffer(hashlib.sha256(body).digest() + body, np.uint8)}

    def restore(self, request, tensors):
        blob = tensors["blob"].tobytes()
        if hashlib.sha256(blob[32:]).digest() != blob[:32]:
            raise Refused("SnapshotError", "blob", "its own checksum", "another")
        held = json.loads(blob[32:])
        if held["config"] != self.digest or len(held["tokens"]) > request["capacity"]:
            raise Refused("SnapshotError", "blob", "this config, at most the capacity", "another, or more")
        return self.adopt(held["tokens"], held["image"], request["capacity"])

    def ledger(self, request, tensors):
        live = len(self.sequences)
        size = sum(9 * len(held["tokens"]) for held in self.sequences.values())
        return {
            "ledger": {"bytes_by_kind": {"history": size}, "sequences": live, "live": live, "total": live}
        }, {}

    def state_digest(self, request, tensors):
        held = self.sequence(request["sequence"])
        text = json.dumps([held["tokens"], held["image"]]).encode()
        return {"digest": {"history": hashlib.sha256(text).hexdigest()}}, {}

    def check_runs(self, runs):
        names = [run["sequence"] for run in runs]
        if not runs or len(set(names)) != len(names):
            raise Refused("InputError", "runs", "each sequence once in a step", names)
        for run in runs:
            held, ids = self.sequence(run["sequence"]), run["token_ids"]
            if not ids or not all(type(t) is int and 0 <= t < self.config["vocab_size"] for t in ids):
                raise Refused("InputError", "token_ids", "ids of the vocabulary", ids)
            if run["image_mask"] is not None and len(run["image_mask"]) != len(ids):
                raise Refused("InputError", "image_mask", f"{len(ids)} flags", len(run["image_mask"]))
            if run["start"] != len(held["tokens"]):
                raise Refused("StateError", "start", len(held["tokens"]), run["start"])
            if run["start"] + len(ids) > held["capacity"]:
                raise Refused("CapacityError", "end", f"at most {held['capacity']}", run["start"] + len(ids))

    def step(self, request, tensors):
        self.check_runs(request["runs"])
        self.steps += 1
        hidden, logits, taps = [], [], {}
        for run in request["runs"]:
            held, ids = self.sequences[run["sequence"]], run["token_ids"]
            image = run["image_mask"] or [t == self.config["image_token_id"] for t in ids]
            held["tokens"] += ids
            held["image"] += image
            h, z, all_taps = self.model.forward(held["tokens"], held["image"])
            hidden.append(h[run["start"] :])
            logits.append(z[run["start"] :])
            for name in request["taps"]:
                if name in all_taps:
                    taps.setdefault(name, []).append(all_taps[name][run["start"] :])
        result = {"hidden": np.concatenate(hidden), "logits": np.concatenate(logits)}
        result |= {f"tap:{name}": stacked(parts) for name, parts in taps.items()}
        return {}, self.broken(result)

    def broken(self, result):
        fault = self.fault if self.steps > 2 else None
        if fault == "shape":
            result["hidden"] = result["hidden"][:, :-1].copy()
        elif fault == "count":
            result = {name: value[:-1] for name, value in result.items()}
        elif fault == "dtype":
            result["logits"] = result["logits"].astype(np.float16)
        elif fault == "nan":
            result["logits"] = result["logits"].copy()
            result["logits"][-1, 7] = np.nan
        elif fault == "crash":
            raise SystemExit("out of luck")
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "late":
            time.sleep(0.75)
        return result


def stacked(parts):
    """Rows of several sequences; columns that only some contexts have are NaN, -1 or False."""
    if len({p.shape[1:] for p in parts}) == 1:
        return np.concatenate(parts)
    width = max(p.shape[1] for p in parts)
    fill = {"f": np.nan, "b": False}.get(parts[0].dtype.kind, -1)
    padded = [np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=fill) for p in parts]
    return np.concatenate(padded)


def main():
    fault = sys.argv[sys.argv.index("--fault") + 1] if "--fault" in sys.argv else None
    server, stdin, stdout = Server(fault), sys.stdin.buffer, sys.stdout.buffer
    while True:
        request, tensors = read_frame(stdin)
        verb = request["verb"]
        try:
            answer, result = ({}, {}) if verb == "bye" else getattr(server, verb)(request, tensors)
        except Refused as error:
            write_frame(
                stdout,
                {"id": request["id"], "ok": False, "error": error.report},
            )
            continue
        if verb == "step" and fault in ("half", "nonsense"):
            stdout.write(
                b"DSV1\x10\x00\x00\x00" if fault == "half" else b"Traceback (most recent call last):\n"
            )
            stdout.flush()
            raise SystemExit(3)
        write_frame(stdout, {"id": request["id"], "ok": True, **answer}, result)
        if verb == "bye":
            return


if __name__ == "__main__":
    main()
