"""Every op computes a row in an order that depends on that row alone: any part of a step gives the same bits.

A step of 13 rows of four sequences is recorded and run launch by launch; each launch runs again on single
rows and on parts of the rows, cut out of a copy of its buffers.  No dimension of the toy stack is 13, so
what has 13 rows is a row buffer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optimized.launch import Launch
from optimized.ops import TORCH_OPS
from optimized.ops.product import row_products
from optimized.step import Rows
from tests.optimized.step_tools import cut_rows, new_model, recorded_step, run

ROWS = 13
PARTS = [slice(t, t + 1) for t in range(ROWS)] + [slice(0, 2), slice(3, 8), slice(5, 13), slice(0, 12)]
# arguments that hold the whole step's rows, which other rows of it address
WHOLE = {"sparse_attention": (3,), "compress": (2,)}
# integer arithmetic on the table itself
TABLE_OPS = {"plan_rows", "engram_hash"}


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dtype is not torch.bool else t


def cut_args(launch: Launch, part: slice, args: list[Any]) -> list[Any]:
    whole = WHOLE.get(launch.name, ())
    if launch.name == "compress" and launch.constants["ratio"] == 1:
        whole = ()
    out = []
    for i, a in enumerate(args):
        if isinstance(a, Rows):
            out.append(cut_rows(a, part))
        elif isinstance(a, Tensor) and a.shape[:1] == (ROWS,) and i not in whole:
            out.append(a[part].clone())
        else:
            out.append(clone(a))
    return out


def check_launch(launch: Launch) -> int:
    """Run a launch, then its parts; the number of comparisons."""
    before = [clone(a) for a in launch.args]
    launch.op(*launch.args, **launch.constants)
    if launch.name in TABLE_OPS:
        return 0
    compared = 0
    for part in PARTS:
        args = cut_args(launch, part, before)
        launch.op(*args, **launch.constants)
        for old, new, full in zip(before, args, launch.args, strict=True):
            if not isinstance(new, Tensor):
                continue
            if (
                old.shape == new.shape
            ):  # state, or read only: rows that the part wrote must hold what the step wrote
                written = (bits(old) != bits(new)).reshape(len(new), -1).any(1)
                written[dump_rows(launch, len(new))] = False
                assert torch.equal(bits(new[written]), bits(full[written])), (
                    f"{launch.name} {part}: state row differs"
                )
            else:
                assert torch.equal(bits(new), bits(full[part])), f"{launch.name} {part}: row differs"
            compared += 1
    return compared


def dump_rows(launch: Launch, size: int) -> slice:
    """Rows of the dump slot or page at the end of a flat state buffer."""
    rows = next((a for a in launch.args if isinstance(a, Rows)), None)
    if rows is None or size < rows.page_tokens:
        return slice(size, size)
    units = {"commit_window": rows.ring_size, "commit_ngram": rows.ngram_size}
    if launch.name == "commit_pending":
        return slice(size - rows.ratios[launch.constants["ratio"]].pending_size, size)
    if launch.name in ("compress", "index_key"):
        return slice(size - rows.ratios[launch.constants["ratio"]].rows_a_page, size)
    return slice(size - units.get(launch.name, 0), size)


def test_every_op_gives_a_row_the_same_bits_in_any_part_of_a_step() -> None:
    model = new_model()
    for slot, length in ((0, 11), (1, 24), (2, 37)):
        model.step([run(slot, 0, length)])
    launches = recorded_step(model, [run(0, 11, 6), run(3, 0, 3), run(1, 24, 1), run(2, 37, 3)])
    seen: dict[str, int] = {}
    for launch in launches:
        seen[launch.name] = seen.get(launch.name, 0) + check_launch(launch)
    assert set(seen) == set(TORCH_OPS) - {"copy_tap"}
    assert all(count > 0 for name, count in seen.items() if name not in TABLE_OPS)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "k, n", [(128, 24), (512, 24), (64, 128), (32, 128), (128, 8), (128, 256), (192, 640), (5120, 64)]
)
def test_a_product_keeps_its_bits_for_any_number_of_rows(k: int, n: int, threads: int) -> None:
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(k + n)
    x, dense = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((66, k), (1, k, n)))
    alone = torch.cat([row_products(x[i : i + 1], dense, n) for i in range(66)])
    for count in (*range(2, 18), 31, 33, 64, 66):
        for first in {0, 1, 66 - count}:
            if first + count <= 66:
                got = row_products(x[first : first + count], dense, n)
                assert torch.equal(got, alone[first : first + count]), f"{count} rows from {first}"
    torch.set_num_threads(1)
