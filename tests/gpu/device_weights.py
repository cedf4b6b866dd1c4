"""Released-size weights drawn on the device: the formats and the spread of reference/random_weights.py, by
the device's generator.

A 384-expert layer is 7 GB; drawn on the host it would take minutes. Values follow the seed and the tensor's name on one
kind of device and one version of torch only, so nothing is compared with numbers from elsewhere.
"""

from __future__ import annotations

import zlib
from math import floor, log2, sqrt

import torch
from torch import Tensor

from reference.config import V41Config
from reference.random_weights import COMB_SHIFT, FP4_STD, RECIPES
from reference.weight_source import Weights
from reference.weight_specs import TensorSpec, spec_of, tensor_specs

FP8_STD = 64.0


class DeviceWeights(Weights):
    def __init__(self, config: V41Config, seed: int, device: str | torch.device) -> None:
        super().__init__(config, cache_bytes=0)
        self.seed, self.device = seed, torch.device(device)

    @property
    def token_map(self) -> Tensor:
        return (
            torch.arange(self.config.vocab_size, device=self.device)
            % self.config.engram_compressed_vocab_size
        )

    def __contains__(self, name: object) -> bool:
        return name in tensor_specs(self.config)

    def _load(self, spec: TensorSpec) -> Tensor:
        draw = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed} {spec.name}".encode()))
        role = spec.role.removesuffix(".scale")
        recipe = RECIPES[role]

        def normal(std: float, mean: float = 0.0) -> Tensor:
            return torch.randn(spec.shape, generator=draw, device=self.device).mul_(std).add_(mean)

        if spec.dtype == torch.float8_e8m0fnu:
            weight = spec_of(self.config, spec.name.removesuffix("scale") + "weight")
            fp4 = weight.dtype == torch.uint8
            columns = weight.shape[1] * (2 if fp4 else 1)
            std = recipe.gain / sqrt(columns) if recipe.std is None else recipe.std
            middle = 127 + floor(log2(std / (FP4_STD if fp4 else FP8_STD)))
            bytes_ = torch.randint(
                middle, middle + 2, spec.shape, generator=draw, device=self.device, dtype=torch.uint8
            )
            return bytes_.view(spec.dtype)
        if spec.dtype == torch.uint8:
            return torch.randint(0, 256, spec.shape, generator=draw, device=self.device, dtype=torch.uint8)
        if spec.dtype == torch.float8_e4m3fn:
            if (
                spec.shape[0] * spec.shape[1] > 1 << 28
            ):  # an Engram table: bytes whose exponents are spread, no NaN
                codes = torch.randint(
                    0, 256, spec.shape, generator=draw, device=self.device, dtype=torch.uint8
                )
                return codes.bitwise_and_(0xF7).view(spec.dtype)
            return normal(FP8_STD).clamp_(-448, 448).to(spec.dtype)
        std = recipe.gain / sqrt(spec.shape[-1]) if recipe.std is None else recipe.std
        values = normal(std, recipe.mean)
        if role == "hc_base":
            n = self.config.hc_mult
            for j in range(n):
                values[2 * n + j * n + (j + 1) % n] += COMB_SHIFT
        if role == "wo_a" and spec.dtype == torch.bfloat16 and all(n % 32 == 0 for n in spec.shape):
            # what the release's fp8 with 32x32 scales widens to
            power = 2.0 ** floor(log2(std / FP8_STD))
            values = (values / power).clamp_(-448, 448).to(torch.float8_e4m3fn).float() * power
        return values.to(spec.dtype)
