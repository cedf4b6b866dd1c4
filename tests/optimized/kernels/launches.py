"""The compilations that steps of the toy stack and of the flash slice need, found without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from optimized.engine import OptimizedEngine
from optimized.layer import Flow
from reference.config import V41Config
from reference.engram import hash_constants
from reference.weight_source import Weights
from reference.weight_specs import TensorSpec, tensor_specs
from tests.optimized.kernels.recorder import Compilation, noted

FLASH_LAYERS = (1, 2, 3, 20, 21, 24)


class BlankWeights(Weights):
    """Zeros in the right shapes and formats."""

    @property
    def token_map(self) -> Tensor:
        return torch.arange(self.config.vocab_size) % self.config.engram_compressed_vocab_size

    def __contains__(self, name: object) -> bool:
        return name in tensor_specs(self.config)

    def _load(self, spec: TensorSpec) -> Tensor:
        return torch.zeros(spec.shape, dtype=torch.uint8 if spec.dtype.itemsize == 1 else spec.dtype).view(
            spec.dtype
        )


def flash_slice(
    layers: Iterable[int] = FLASH_LAYERS, *, experts: int = 384, vocab: int = 129280, rows: int = 160_000
) -> V41Config:
    """Released widths, all roles; a smaller vocabulary and Engram table where only widths matter."""
    flash = V41Config.flash()
    changed = replace(
        flash,
        n_routed_experts=experts,
        vocab_size=vocab,
        engram_vocab_size=rows,
        image_token_id=min(flash.image_token_id, vocab - 1),
        dspark_noise_token_id=min(flash.dspark_noise_token_id, vocab - 1),
        engram_compressed_vocab_size=min(flash.engram_compressed_vocab_size, vocab),
    )
    sizes = tuple(int(p.sum()) for p in hash_constants(changed).primes)
    return replace(changed, engram_num_embeddings=sizes).sliced(tuple(layers))


def compilations(config: V41Config, rows: Iterable[int], context: int) -> dict[Compilation, None]:
    """What captured steps of these numbers of rows compile."""
    engine = OptimizedEngine(
        config,
        BlankWeights(config),
        backend="triton",
        max_sequences=2,
        max_tokens=context,
        buckets=tuple(rows),
    )
    model, found = engine.model, {}
    for n in rows:
        ws = model.workspace(n, context)
        model.launch.scratch = ws.scratch
        model.launch.begin_recording()
        model.forward(Flow(ws, model.launch, n))
        with noted(found):
            for launch in model.launch.end_recording():
                if launch.op.__module__.startswith("optimized.kernels"):
                    launch.op(*launch.args, **launch.constants)
    return found
