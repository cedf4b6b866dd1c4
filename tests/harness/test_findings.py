"""A finding is a repro: written whole, read back equal, told with its place and the command that runs it again."""

from __future__ import annotations

import json

import pytest
import torch

from harness.findings import Finding, jsonable
from harness.operations import open_, step, to_json


def example() -> Finding:
    return Finding(
        "chunks", "CH", "rows differ", engine="optimized", engine_options={"ring_spare": 4}, config="toy", seed=7,
        operations=to_json([open_("a", 8), step(("a", [1, 2]))]), sequence="a", position=1, layer=2, tap="selection",
        expected=[1, 2], actual=[1, 3], limit=0.5,
    )  # fmt: skip


def test_written_and_read_back(tmp_path):
    finding = example()
    path = finding.write(tmp_path / "deep" / "folder")
    assert Finding.read(path) == finding
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_the_text_has_place_values_operations_and_the_command(tmp_path):
    text = example().text("x.json")
    for part in ("sequence a, position 1, layer 2, tap selection", "[1, 3]", "limit", "2 operations", "ring_spare",
                 "seed 7", "dsv41 replay x.json", "any split"):  # fmt: skip
        assert part in text


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr("harness.findings.os.replace", refuse)
    with pytest.raises(OSError):
        example().write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**example().to_dict(), "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        Finding.read(path)


def test_values_that_json_lacks():
    given = {"a": torch.tensor([1.0, float("nan")]), 2: (float("inf"), None)}
    assert jsonable(given) == {"a": [1.0, "nan"], "2": ["inf", None]}
