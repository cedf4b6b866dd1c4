"""The catalogue is whole, its detectors exist, every row within reach has a mutation, and the pages show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.check import CheckContext, discover
from harness.faults import page
from harness.faults.catalogue import BY_ID, CATALOGUE, FAMILIES, catchable, find
from harness.faults.cli import app
from harness.faults.matrix import Matrix
from harness.faults.mutation import Patch, all_mutations, mutation
from harness.faults.trial import Trial, checks_for
from harness.findings import DETECTORS
from optimized import seams
from reference.errors import InputError

RUNNER = CliRunner()


def test_108_rows_and_at_most_8_out_of_reach() -> None:
    assert len(CATALOGUE) == len(BY_ID) == 108
    assert len(CATALOGUE) - len(catchable()) <= 8
    for fault in CATALOGUE:
        assert fault.family in FAMILIES and set(fault.detectors) <= DETECTORS.keys() and fault.detectors
        assert all((fault.reports, fault.symptom, fault.cause, fault.trigger, fault.seam, fault.change))
        assert fault.status == ("out_of_reach" if fault.out_of_reach else "catchable")


def test_every_row_within_reach_has_a_mutation() -> None:
    assert set(all_mutations()) == {fault.id for fault in catchable()}


def test_every_detector_of_the_catalogue_is_reported_by_a_check() -> None:
    for fault in catchable():
        assert checks_for(fault.detectors), fault.id
    reported = {detector for check in discover().values() for detector in check.detectors}
    assert reported <= DETECTORS.keys()


def test_unknown_and_doubled_ids_are_refused() -> None:
    with pytest.raises(InputError, match="F999"):
        find(["F06", "F999"])
    with pytest.raises(InputError):
        mutation("F06")(lambda patch: None)
    assert [fault.id for fault in find(["g9", "F06"])] == ["G9", "F06"]


def test_a_patch_is_taken_back_after_an_error() -> None:
    before = seams.visible_count
    patch = Patch("F06")
    patch.seam("visible_count", lambda old: lambda position, ratio: -1)
    with pytest.raises(RuntimeError), patch:
        assert seams.visible_count(3, 2) == -1
        raise RuntimeError
    assert seams.visible_count is before


def test_no_mutation_touches_a_check_or_the_reference() -> None:
    folder = Path(page.__file__).parent / "mutations"
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "harness.checks" not in text and "ReferenceEngine" not in text, file.name


def matrix() -> Matrix:
    caught = Trial("F06", "caught", "decode_prefill", "DP", 2, 4, "<b>wrong</b>", 1.0)
    trials = {
        "F06": caught,
        "G9": Trial("G9", "missed", tried=["graphs"]),
        "F127": Trial("F127", "out_of_reach"),
    }
    alarm = {"check": "chunks", "message": "row 3"}
    return Matrix("optimized", "toy", 0, trials, {1: [], 2: [alarm]}, {"F06": {"chunks": "CH"}})


def test_problems_name_what_keeps_the_gate_shut() -> None:
    found = matrix()
    assert found.problems() == ["G9 was not found by any of GR", "false alarm with seed 2: chunks: row 3"]
    found.trials["F06"].control, found.trials["F06"].operations, found.left_out = False, 11, 2
    words = " ".join(found.problems())
    assert "without its comparison" in words and "11 operations" in words and "2 faults" in words


def test_json_and_pages(tmp_path: Path) -> None:
    data_path, matrix_path, catalogue_path = page.write(matrix(), tmp_path)
    data = json.loads(data_path.read_text(encoding="utf-8"))
    rows = {row["id"]: row for row in data["faults"]}
    assert rows["F06"]["detected_by"] == {"chunks": "CH", "decode_prefill": "DP"}
    assert rows["F127"]["status"] == "out_of_reach" and data["totals"]["caught"] == 1
    shown = matrix_path.read_text(encoding="utf-8")
    assert "&lt;b&gt;wrong" in shown and "<b>wrong" not in shown and "fault-catalogue.html#F06" in shown
    catalogue = catalogue_path.read_text(encoding="utf-8")
    assert all(f'id="{fault.id}"' in catalogue for fault in CATALOGUE)
    assert "http" not in shown.replace("http-equiv", "") and "src=" not in shown + catalogue


def test_list_for_a_reader_and_a_program() -> None:
    shown = RUNNER.invoke(app, ["--list"])
    assert shown.exit_code == 0 and "F06" in shown.output and "L12" in shown.output
    one = RUNNER.invoke(app, ["F06", "--list", "--json"])
    (row,) = json.loads(one.output)
    assert row["id"] == "F06" and row["status"] == "catchable"


def test_contexts_of_trials_are_contexts() -> None:
    from harness.faults.trial import context

    ctx = context("optimized", "toy", 0, blind=True)
    assert isinstance(ctx, CheckContext) and ctx.blind and ctx.stop_first
