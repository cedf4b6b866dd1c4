"""Every kernel at released widths against its plain-torch op on the same device, and sums that don't
follow the tile of rows."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from optimized import tables
from optimized.kernels import TRITON_OPS, product
from optimized.ops import TORCH_OPS
from optimized.weights import Weight
from tests.gpu.device_weights import DeviceWeights
from tests.optimized.kernels.launches import flash_slice
from tests.optimized.kernels.samples import Sample, collect, copied, differences

pytestmark = pytest.mark.gpu
KERNELS = sorted(name for name, op in TRITON_OPS.items() if op is not TORCH_OPS[name])


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    config = flash_slice((1, 2, 20, 24), experts=8, vocab=2048, rows=1000)
    steps = [[(0, 150)], [(0, 1), (1, 3)], [(0, 7), (1, 2)]]
    return collect(config, DeviceWeights(config, 5, "cuda"), "cuda", steps, most=4, capacity=256)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_the_torch_op(name: str, samples: dict[str, list[Sample]]) -> None:
    for sample in samples[name]:
        got = copied(sample.before)
        TRITON_OPS[name](*got, scratch={}, **sample.constants)
        assert differences(name, got, sample) == []


@pytest.mark.parametrize(
    ("kind", "n", "k"), [("fp8", 1792, 5120), ("bf16", 384, 5120), ("fp8", 5120, 8192), ("fp32", 64, 5120)]
)
def test_a_row_has_the_bits_of_its_own_product(kind: str, n: int, k: int) -> None:
    """Rows 1, 8, 64, 130 and 600 take other tiles, and parts that meet or don't."""
    codes = torch.randn(n, k, device="cuda")
    scale = None
    if kind == "fp8":
        codes = codes.mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.randint(110, 114, (n // 32, k // 32), dtype=torch.uint8, device="cuda")
    elif kind == "bf16":
        codes = codes.bfloat16()
    w = Weight(kind, codes, scale, None, (n, k))
    x = torch.randn(600, k, device="cuda", dtype=torch.bfloat16)
    whole = torch.empty(600, n, device="cuda")
    product.linear(whole, x, x, None, w)
    for rows in (1, 8, 64, 130):
        part = torch.full((rows, n), torch.nan, device="cuda")
        product.linear(part, x[:rows].contiguous(), x[:rows].contiguous(), None, w)
        assert torch.equal(part, whole[:rows]), rows
    assert tables.MEETING_ROWS in range(64, 130)


@pytest.mark.parametrize("rows", [8, 9, 16, 40, 600])
def test_a_row_in_a_crowd_has_the_bits_of_the_row_alone(rows: int) -> None:
    """More rows choose an expert than its tile holds: once wrong, in a step of 16 rows of which nine chose alike."""
    hidden, inner, bank, top_k = 256, 128, 4, 2
    codes = torch.randint(0, 256, (bank, 2 * inner, hidden // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(116, 122, (bank, 2 * inner, hidden // 32), dtype=torch.uint8, device="cuda")
    w13 = Weight("fp4", codes, scale, None, (2 * inner, hidden))
    shared_codes = torch.randn(2 * inner, hidden, device="cuda").bfloat16()
    shared = Weight("bf16", shared_codes, None, None, (2 * inner, hidden))
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    idx = torch.stack([torch.randperm(bank, device="cuda")[:top_k] for _ in range(rows)])
    idx[rows // 3 :] = idx[0]
    gates = torch.rand(rows, top_k, device="cuda")

    def up(part: slice) -> torch.Tensor:
        n = len(x[part])
        h = torch.full((n, top_k + 1, inner), torch.nan, device="cuda", dtype=torch.bfloat16)
        hs = torch.empty(n, top_k + 1, inner // 32, dtype=torch.uint8, device="cuda")
        args = (
            x[part].contiguous(),
            x[part].contiguous(),
            hs,
            idx[part].contiguous(),
            gates[part].contiguous(),
        )
        TRITON_OPS["expert_up"](h, torch.empty_like(h), hs, *args, w13, shared, limit=10.0)
        return h

    whole = up(slice(0, rows))
    for t in range(rows):
        assert torch.equal(up(slice(t, t + 1))[0], whole[t]), t
