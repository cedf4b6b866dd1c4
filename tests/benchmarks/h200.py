"""One run at released widths: our whole layer and the plain-torch peers, in one process, each behind its check.

    python -m tests.benchmarks.h200 --out FILE [--batches 1 8 64] [--context 4096] [--peers eager liger compile] ...

Layers 20 (full-context index source, ratio 1) and 21 (reuse) of the released configuration, all 384 experts, weights
drawn on the device. Our launches of one layer are captured in one CUDA graph and replays are timed by events. Without a
GPU the same code runs at toy widths on the plain-torch ops and wall time: a rehearsal, not a measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimized.engine import OptimizedEngine
from reference.config import LayerRole, V41Config, load_config
from reference.engine import Run
from reference.quantize import dequantize_fp4_e4m3, dequantize_fp8, unpack_fp4
from reference.random_weights import FP4_STD, FP8_STD, RECIPES
from reference.weight_source import Weights
from reference.weight_specs import TensorSpec, spec_of, tensor_specs
from reports.record import make_record, write_run
from reports.roofline import GPUS, Step, layer_costs
from tests.benchmarks.launches import trace
from tests.benchmarks.peers import Inputs, TorchLayer, update_error

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# our update's distance from the plain form with the same casts, as a share of bf16's own distance from fp32: below 1
# where only sums differ in order; a route weight left out gives 1.7 to 5. A row whose routing flips at a tie is far
# off.
MEDIAN, WORST, FLIPPED = 1.5, 2.5, 0.1
NOTE = "bf16 weights, two to four times the bytes of ours; activations are not quantised"
RUN_ID = time.strftime("%Y%m%dT%H%M%S")


class DeviceWeights(Weights):
    """Random weights drawn on the device by name: released widths in seconds. The distributions are RandomWeights'."""

    @property
    def token_map(self) -> Tensor:
        ids = torch.arange(self.config.vocab_size)
        return ids % max(1, self.config.engram_compressed_vocab_size)

    def __contains__(self, name: object) -> bool:
        return name in tensor_specs(self.config)

    def _load(self, spec: TensorSpec) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(spec.name.encode()).digest()[:7], "little")
        generator = torch.Generator(DEVICE).manual_seed(seed)
        recipe = RECIPES[spec.role.removesuffix(".scale")]
        if spec.dtype == torch.float8_e8m0fnu:
            weight = spec_of(self.config, spec.name.removesuffix("scale") + "weight")
            fp4 = weight.dtype == torch.uint8
            std = recipe.std or recipe.gain / (weight.shape[1] * (2 if fp4 else 1)) ** 0.5
            exponent = 127 + round(torch.tensor(std / (FP4_STD if fp4 else FP8_STD)).log2().item())
            spread = torch.randint(-1, 2, spec.shape, generator=generator, device=DEVICE)
            return (exponent + spread).to(torch.uint8).view(spec.dtype)
        if spec.dtype == torch.uint8:
            return torch.randint(0, 256, spec.shape, generator=generator, device=DEVICE, dtype=torch.uint8)
        values = torch.randn(spec.shape, generator=generator, device=DEVICE)
        if spec.dtype == torch.float8_e4m3fn:
            return (values * FP8_STD).clamp(-448, 448).to(spec.dtype)
        std = recipe.gain / spec.shape[-1] ** 0.5 if recipe.std is None else recipe.std
        return (recipe.mean + std * values).to(spec.dtype)


def timed(call: Callable[[], Any], repeats: int = 2, seconds: float = 0.4) -> tuple[list[float], bool]:
    """Seconds a call of many replays of one graph that holds `repeats` calls; wall time without a GPU."""
    if not CUDA:
        samples = []
        for _ in range(7):
            began = time.perf_counter()
            call()
            samples.append(time.perf_counter() - began)
        return samples, False
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    count = int(min(200, max(20, seconds / max(time.perf_counter() - began, 1e-6))))
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(count)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 / repeats for start, end in events], True


def kernels(call: Callable[[], Any]) -> int | None:
    """Device kernels of one call, copies and fills included."""
    if not CUDA:
        return None
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return int(sum(e.count for e in found.key_averages() if str(e.device_type).endswith("CUDA")))


class Bench:
    """The engine with `batch` sequences of `context` tokens, and what was measured."""

    def __init__(self, config: V41Config, weights: Weights, batches: list[int], context: int) -> None:
        self.config, self.weights, self.context = config, weights, context
        self.source, self.reuse = config.layers()
        self.records: list[dict[str, Any]] = []
        self.engine = OptimizedEngine(
            config,
            weights,
            max_sequences=max(batches) + 1,
            max_tokens=context + 64,
            device=DEVICE,
            backend="triton" if CUDA else "torch",
        )
        self.generator = torch.Generator().manual_seed(7)
        self.sequences = [self.filled() for _ in range(max(batches))]

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, self.config.vocab_size, (count,), generator=self.generator).tolist())

    def filled(self) -> Any:
        sequence = self.engine.open(self.context + 32)
        for begin in range(0, self.context, 4096):
            count = min(4096, self.context - begin)
            self.engine.step([Run(sequence, self.tokens(count), begin)])
        return sequence

    def back(self) -> None:
        for sequence in self.sequences:
            if self.engine.length(sequence) > self.context:
                self.engine.rollback(sequence, self.context)

    # what a peer is given, and the check of our own layer

    def inputs(self, role: LayerRole, batch: int) -> tuple[Inputs, Tensor, Tensor]:
        """What enters a layer in one decode step, what our layer makes of it, and its chosen experts.

        Raises AssertionError when the index source's selection is not the stable top-k of its own scores.
        """
        i, below = role.index, self.source.index
        names = (
            f"L{i}.engram_out",
            f"L{below}.pre_mix",
            f"L{below}.selection",
            f"L{i}.stream",
            f"L{i}.moe_idx",
        )
        names = (*names, f"L{below}.index_score")
        sequences = self.sequences[:batch]
        runs = [Run(s, self.tokens(1), self.context) for s in sequences]
        taps = self.engine.step(runs, taps=names).taps
        pool, rings, rows = self.engine.pool, [], []
        window = next(s for s in pool.stores if s.kind == "window" and s.layer == i)
        latent = next(s for s in pool.stores if s.kind == "latent" and s.layer == below)
        width = self.config.head_dim
        for row, sequence in enumerate(sequences):
            tenant = pool.tenant(sequence)
            packed = pool.read(
                tenant, window, range(self.context + 1 - self.config.sliding_window, self.context)
            )
            codes = packed[:, :width].contiguous().view(torch.float8_e4m3fn)
            rings.append(dequantize_fp8(codes, packed[:, width:].contiguous()).to(torch.bfloat16))
            chosen = taps[f"L{below}.selection"][row]
            assert (chosen >= 0).all(), "the context is too short for a full selection"
            score = taps[names[5]][row].float()
            best = score.sort(descending=True, stable=True)[1][: len(chosen)].sort()[0]
            assert torch.equal(best.cpu(), chosen.cpu().long()), (
                "the selection is not the top-k of its scores"
            )
            every = pool.read(tenant, latent, range(0, (self.context + 1) // self.source.ratio))[
                chosen.to(DEVICE)
            ]
            scale = every[:, width // 2 :].contiguous().view(torch.float8_e4m3fn)
            rows.append(dequantize_fp4_e4m3(unpack_fp4(every[:, : width // 2]), scale).to(torch.bfloat16))
        self.back()
        stream = taps[names[0]].to(DEVICE, torch.bfloat16)
        mix = taps[names[1]].to(DEVICE).float()
        if role is self.source:  # the first layer of the slice: one-hot on the first stream
            mix = torch.zeros_like(mix).index_fill_(1, torch.tensor([0], device=DEVICE), 1.0)
        given = Inputs(stream, mix, torch.stack(rings), torch.stack(rows), self.context)
        return given, taps[names[3]].to(DEVICE), taps[names[4]]

    def check_ours(self, role: LayerRole, plain: TorchLayer, batch: int) -> dict[str, Any]:
        """Our layer's update against the plain form with the release's casts, row by row, by what bf16 itself costs."""
        given, ours, _ = self.inputs(role, batch)
        exact = self.plain(plain, torch.float32, True, given)
        rounded = self.plain(plain, torch.bfloat16, True, given)
        noise = update_error(rounded, exact, given.stream).clamp_min(2.0**-8)
        ratio = update_error(ours, rounded, given.stream) / noise
        passed = bool(ratio.median() <= MEDIAN) and bool((ratio > WORST).double().mean() <= FLIPPED)
        detail = {
            "median": float(ratio.median()),
            "worst": float(ratio.max()),
            "noise_median": float(noise.median()),
            "rows_beyond": int((ratio > WORST).sum()),
        }
        what = "the update against plain torch with the release's casts, as a share of what bf16 costs against fp32"
        what += "; the selection is the stable top-k of its scores"
        return {"passed": passed, "check": what, "detail": detail}

    @staticmethod
    def plain(layer: TorchLayer, dtype: torch.dtype, quantise: bool, given: Inputs) -> Tensor:
        before = layer.dtype, layer.quantise, layer.experts
        layer.dtype, layer.quantise, layer.experts = dtype, quantise, "gather"
        parts = []
        try:
            for begin in range(0, len(given.stream), 4):  # few rows at a time: each copies its experts
                rows = slice(begin, begin + 4)
                part = Inputs(
                    given.stream[rows],
                    given.pre_mix[rows],
                    given.ring[rows],
                    given.rows[rows],
                    given.position,
                )
                parts.append(layer(part)[0])
        finally:
            layer.dtype, layer.quantise, layer.experts = before
        return torch.cat(parts)

    def check_peer(self, layer: TorchLayer, call: Callable[[Inputs], Any], given: Inputs) -> dict[str, Any]:
        exact = self.plain(layer, torch.float32, False, given)
        error = update_error(call(given)[0], exact, given.stream)
        passed = bool(error.median() <= 2.0**-5) and bool((error > 2.0**-3).double().mean() <= 0.05)
        detail = {"median": float(error.median()), "worst": float(error.max())}
        return {
            "passed": passed,
            "check": "the peer's update against its own formulas in fp32",
            "detail": detail,
        }

    # figures

    def ours(self, role: LayerRole, batch: int, check: dict[str, Any]) -> None:
        runs = [Run(s, self.tokens(1), self.context) for s in self.sequences[:batch]]
        chosen = self.engine.step(runs, taps=(f"L{role.index}.moe_idx",)).taps[f"L{role.index}.moe_idx"]
        self.back()
        launches = [t for t in trace(self.engine, lambda: self.engine.step(runs)) if t.layer == role.index]
        self.back()
        component = "layer.reuse" if role.kind == "reuse" else "layer.index_source"
        self.figure(component, role, batch, 1, chosen.unique().numel(), [t.call for t in launches], check)
        for name in sorted({t.component for t in launches}):
            self.figure(f"op.{name}", role, batch, 1, chosen.unique().numel(),
                        [t.call for t in launches if t.component == name], check, (name,))  # fmt: skip

    def figure(
        self, component: str, role: LayerRole, batch: int, tokens: int, experts: float, calls: list, check: dict,
        only: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        def call() -> None:
            for one in calls:
                one()

        samples, _ = timed(call)
        names = ("routed_experts", "shared_expert") if only == ("experts",) else only
        parts = layer_costs(self.config, role, Step(batch, tokens, self.context + (tokens == 1), experts))
        parts = [p for p in parts if not names or p.name in names]
        backend = "triton" if CUDA else "torch"
        self.add(component, "optimized", samples, parts, check, role, batch, tokens, experts, backend=backend,
                 nodes=kernels(call), mode="graph" if CUDA else "eager")  # fmt: skip

    def peer(self, layer: TorchLayer, kind: str, batch: int, mode: str = "default") -> None:
        layer.form, layer.experts = ("eager", "gather") if kind == "eager" else ("scalars", "gather")
        if CUDA and batch > 8:
            layer.experts = "grouped"
        given, _, chosen = self.inputs(self.reuse, batch)
        call: Callable[[Inputs], Any] = layer
        if kind == "compile":
            call = torch.compile(layer, dynamic=False, mode=mode)
        check = self.check_peer(layer, call, given)
        samples, _ = timed(lambda: call(given))
        config = replace(self.config, dtype="bf16", expert_dtype="bf16")
        experts = chosen.unique().numel()
        note = f"{NOTE}; {layer.experts} experts" + (f"; mode {mode}" if kind == "compile" else "")
        parts = layer_costs(config, self.reuse, Step(batch, 1, self.context + 1, experts))
        self.add("layer.reuse", f"peer.torch_{kind}", samples, parts, check, self.reuse, batch, 1, experts,
                 backend="torch", nodes=kernels(lambda: call(given)), mode="graph" if kind == "eager" else "compile",
                 format="bf16", comparable=False, note=note)  # fmt: skip

    def liger(self, layer: TorchLayer, batch: int) -> None:
        """liger-kernel's hyper-connections: coefficients, collapse and expand of both sites."""
        try:
            from liger_kernel.ops import mhc
        except ImportError as error:
            print(f"peer liger skipped: {error}", flush=True)
            return
        given, _, _ = self.inputs(self.reuse, batch)
        h, eps = given.stream, (20, 1e-20, 1e-6, 1e-6, 2.0)
        y = torch.randn_like(h[:, 0])
        sites = []
        for site in ("attn", "ffn"):
            fn, base, scale = (getattr(layer, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
            sites.append((fn.t().contiguous(), base, *(s.clone() for s in scale)))

        def one(weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            pre, post, comb = mhc.LigerMHCCoeffsFunction.apply(h, *weights, True, *eps)
            x = mhc.LigerMHCPreFunction.apply(h, pre)
            return pre, post, comb, x, mhc.LigerMHCPostResFunction.apply(h, y, post, comb)

        exact = layer.mix(h, "attn")
        found = one(sites[0])
        errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found[:3], exact, strict=True)]
        names = ("pre", "post", "comb")
        check = {
            "passed": max(errors) <= 2.0**-7,
            "check": "pre, post and comb of one site against plain torch in fp32",
            "detail": dict(zip(names, errors, strict=True)),
        }
        samples, _ = timed(lambda: [one(weights) for weights in sites])
        parts = [
            p for p in layer_costs(self.config, self.reuse, Step(batch)) if p.name == "hyper_connections"
        ]
        note = (
            "collapses with its own pre mix, expands over the other index of comb; coefficients are the same"
        )
        self.add("op.hyper_connections", "peer.liger", samples, parts, check, self.reuse, batch, 1, 0,
                 backend="triton", nodes=kernels(lambda: [one(w) for w in sites]), mode="graph", format="fp32",
                 comparable=False, note=note)  # fmt: skip

    def prefill(self, tokens: int) -> None:
        """One chunk of `tokens` from an empty sequence; checked by its last row, which decode must give bit for bit."""
        ids, name = self.tokens(tokens), f"L{self.reuse.index}.stream"
        sequence = self.engine.open(tokens + 32)
        whole = self.engine.step([Run(sequence, ids, 0)], taps=(name, f"L{self.reuse.index}.moe_idx")).taps
        self.engine.close(sequence)
        sequence = self.engine.open(tokens + 32)
        self.engine.step([Run(sequence, ids[:-1], 0)])
        last = self.engine.step([Run(sequence, ids[-1:], tokens - 1)], taps=(name,)).taps[name]
        self.engine.close(sequence)
        same = bool(torch.equal(last[-1], whole[name][-1]))
        what = "the last row of the chunk and of a decode step of the same token, bit for bit"
        check = {"passed": same, "check": what, "detail": {"tokens": tokens}}
        sequence = self.engine.open(tokens + 32)
        found = trace(self.engine, lambda: self.engine.step([Run(sequence, ids, 0)]))
        calls = [t.call for t in found if t.layer == self.reuse.index]
        experts = whole[f"L{self.reuse.index}.moe_idx"].unique().numel()
        context, self.context = self.context, tokens
        self.figure("prefill.reuse", self.reuse, 1, tokens, experts, calls, check)
        self.context = context
        self.engine.close(sequence)

    def add(self, component: str, engine: str, samples: list[float], parts: list, check: dict, role: LayerRole,
            batch: int, tokens: int, experts: float, **info: Any) -> None:  # fmt: skip
        gpu = GPUS["h200"]
        name = f"{component} {engine} b{batch} t{tokens} c{self.context}"
        record = make_record(
            name, component, engine, samples,
            bytes=sum(p.bytes for p in parts), flops=sum(p.flops for p in parts), correctness=check,
            compute_floor_us=sum(p.compute_us(gpu) for p in parts), device=DEVICE, layer=role.index,
            config="flash" if CUDA else "toy", batch=batch, tokens=tokens, context=self.context,
            distinct_experts=experts, run_id=RUN_ID, **info,
        )  # fmt: skip
        self.records.append(record)
        shown = record["stats"]["median"] * 1e6
        ratio = record["extra_info"]["ratio"]
        print(
            f"{name:60s} {shown:9.1f} us  x{ratio:.2f}  nodes {info.get('nodes')}  check {check}", flush=True
        )


def guarded(name: str, calls: Iterator[Callable[[], None]] | list[Callable[[], None]]) -> None:
    """A figure that breaks is said, and the next one is measured all the same."""
    for call in calls:
        try:
            call()
        except Exception:
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
            if CUDA:
                torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of a run; written to --out as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64] if CUDA else [1, 3])
    parser.add_argument("--context", type=int, default=4096 if CUDA else 48)
    parser.add_argument("--peers", nargs="*", default=["eager"])
    parser.add_argument("--compile-mode", default="max-autotune-no-cudagraphs" if CUDA else "default")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--note", default="")
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    if not CUDA:
        torch.set_num_threads(1)
    began = time.perf_counter()
    config = load_config("flash").sliced((20, 21)) if CUDA else load_config("toy").sliced((5, 6))
    # neither layer has an n-gram memory, whose tables would not fit
    config = replace(config, engram_layer_ids=(), engram_num_embeddings=())
    weights = DeviceWeights(config)
    bench = Bench(config, weights, options.batches, options.context)
    print(f"engine with {max(options.batches)} sequences: {time.perf_counter() - began:.0f} s", flush=True)
    plain = {r.index: TorchLayer(config, r.index, weights, DEVICE) for r in config.layers()}
    print(f"plain layers: {time.perf_counter() - began:.0f} s", flush=True)

    def ours(role: LayerRole, batch: int) -> None:
        bench.ours(role, batch, bench.check_ours(role, plain[role.index], batch))

    layer = plain[bench.reuse.index]

    def save(what: str) -> None:
        write_run(options.out, bench.records, device=DEVICE, note=options.note)
        print(f"{what}: {len(bench.records)} records, {time.perf_counter() - began:.0f} s", flush=True)

    for batch in options.batches:
        guarded("ours", [lambda role=role, batch=batch: ours(role, batch) for role in config.layers()])
        if "eager" in options.peers:
            guarded("peer", [lambda batch=batch: bench.peer(layer, "eager", batch)])
        if "liger" in options.peers:
            guarded("liger", [lambda batch=batch: bench.liger(layer, batch)])
        save(f"batch {batch}")
    if options.prefill:
        guarded("prefill", [lambda: bench.prefill(options.prefill)])
        save("prefill")
    if "compile" in options.peers:  # minutes of compiling, so last
        guarded(
            "compiled peer",
            [lambda: bench.peer(layer, "compile", min(options.batches), options.compile_mode)],
        )
        save("compiled peer")
    return bench.records


if __name__ == "__main__":
    main()
