"""The run at released widths: rehearsed at toy widths here, for real on a GPU."""

from __future__ import annotations

import pytest
import torch

from reports.record import FIELDS, read_run
from tests.benchmarks import h200


def run(tmp_path, *arguments):
    h200.main(["--out", str(tmp_path / "run.json"), *arguments])
    return read_run(tmp_path / "run.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal is for a machine without a GPU")
def test_rehearsal(tmp_path):
    threads = torch.get_num_threads()
    try:
        found = run(tmp_path, "--batches", "1", "3", "--prefill", "32", "--note", "a rehearsal")
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    assert [r.name for r in found.records if not r.passed] == []
    assert {(r.info["component"], r.info["engine"], r.info["batch"]) for r in found.records} >= {
        ("layer.reuse", "optimized", 1),
        ("layer.reuse", "peer.torch_eager", 3),
        ("layer.index_source", "optimized", 3),
        ("op.experts", "optimized", 1),
        ("prefill.reuse", "optimized", 1),
    }
    for record in found.records:
        assert set(FIELDS) <= set(record.info)
        assert record.info["bytes"] > 0 and record.info["ratio"] > 0 and record.info["correctness"]["check"]
    assert found.extra["note"] == "a rehearsal"
    peer = next(r for r in found.records if r.info["engine"] == "peer.torch_eager")
    assert peer.info["format"] == "bf16" and not peer.info["comparable"] and peer.info["note"]


def test_a_wrong_layer_is_not_printed(tmp_path, monkeypatch):
    """An engine whose experts forget the route weight: its figures are there, without a time."""
    from optimized import ops

    right = ops.TORCH_OPS["route"]

    def wrong(chosen, weights, *rest, **constants):
        right(chosen, weights, *rest, **constants)
        weights.fill_(1.0)

    monkeypatch.setitem(ops.TORCH_OPS, "route", wrong)
    try:
        found = run(tmp_path, "--batches", "1", "--peers")
    finally:
        torch.set_grad_enabled(True)
    assert found.records and not any(r.passed for r in found.records)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    found = run(tmp_path, "--batches", "1", "--context", "1024", "--peers", "eager")
    assert [r.name for r in found.records if not r.passed] == []
    assert {r.info["engine"] for r in found.records} == {"optimized", "peer.torch_eager"}
