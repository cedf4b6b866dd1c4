"""Every kernel in Triton's interpreter against its plain-torch op, on launches of toy steps. Run by
../test_interpreter.py."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start of the process", allow_module_level=True)

import torch
import triton
import triton.language as tl

from optimized.kernels import TRITON_OPS
from optimized.kernels.experts import _plan as plan
from optimized.kernels.indexer import append_rows
from optimized.ops import TORCH_OPS
from reference.config import V41Config
from reference.random_weights import RandomWeights
from tests.optimized.kernels.samples import Sample, collect, copied, differences

KERNELS = sorted(name for name, op in TRITON_OPS.items() if op is not TORCH_OPS[name])


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    torch.set_num_threads(1)
    config = V41Config.toy()
    # an opening, a step of two sequences that opens a group and closes one, then one past the window
    return collect(config, RandomWeights(config, 7), "cpu", [[(0, 5)], [(0, 1), (1, 2)], [(0, 9)]], most=3)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_the_torch_op(name: str, samples: dict[str, list[Sample]]) -> None:
    assert samples.get(name), f"no launch of {name} in these steps"
    for sample in samples[name]:
        got = copied(sample.before)
        TRITON_OPS[name](*got, scratch={}, **sample.constants)
        assert differences(name, got, sample) == []


def test_a_wrong_kernel_is_seen(samples: dict[str, list[Sample]]) -> None:
    sample = samples["moe_combine"][0]
    got = copied(sample.before)
    TRITON_OPS["moe_combine"](*got, scratch={}, **sample.constants)
    got[0][0, 0] += 1.0
    assert differences("moe_combine", got, sample) != []


@triton.jit
def addresses(out, page_table, slot, per_page):
    j = tl.arange(0, 16)
    row = append_rows(page_table, tl.load(slot), j, j < 16, 1, per_page)
    tl.store(out + j, row * 288)


def test_addresses_beyond_32_bits() -> None:
    """A page table entry is 32 bits wide, the byte address of its rows is not: 288 bytes a row, page 125,000,000."""
    out = torch.zeros(16, dtype=torch.int64)
    pages = torch.full((1,), 125_000_000, dtype=torch.int32)
    addresses[(1,)](out, pages, torch.zeros(1, dtype=torch.int64), 16)
    assert out.tolist() == [(125_000_000 * 16 + j) * 288 for j in range(16)]
    assert out[0] > 2**32


@pytest.mark.parametrize(("rows", "experts"), [(5, 4), (8, 3), (9, 4), (16, 4), (40, 6), (40, 300)])
def test_every_slot_lies_in_one_tile_of_its_expert(rows: int, experts: int) -> None:
    """Crowded experts, more rows than a tile holds, and experts that nobody chose."""
    top_k, generator = 3, torch.Generator().manual_seed(rows)
    idx = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(rows)])
    idx[rows // 3 :] = idx[0]  # most rows choose alike
    size, planned, tiles, (count, expert, members) = plan(idx, experts, {})
    assert planned
    found = [int(members[t * size + m]) for t in range(tiles) for m in range(int(count[t]))]
    assert sorted(found) == list(range(rows * top_k))
    assert all(
        int(idx.view(-1)[members[t * size + m]]) == int(expert[t])
        for t in range(tiles)
        for m in range(int(count[t]))
    )
