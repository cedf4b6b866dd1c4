"""`pytest --dsv41-engine` in somebody's own repository: checks are items, findings failures, declined is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
from reference.engine import ReferenceEngine

def right(config, weights, **options):
    return ReferenceEngine(config, weights, **options)

def stale(config, weights, **options):
    return ReferenceEngine(config, weights, release_stale_index_k=True, **options)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one test and an engine of its own."""
    (tmp_path / "their_engine.py").write_text(ENGINE)
    (tmp_path / "test_their_own.py").write_text("def test_their_own():\n    pass\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], ElementTree.Element]:
    path = f"{ROOT}{os.pathsep}{folder}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plain = [sys.executable, "-m", "pytest", "-q", "-p", "harness.pytest_plugin", "--junitxml", "report.xml"]
    done = subprocess.run(
        [*plain, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done, ElementTree.parse(folder / "report.xml").getroot()


def test_without_the_option_nothing_happens(repository):
    done, report = run(repository)
    assert done.returncode == 0 and len(report.findall(".//testcase")) == 1


def test_a_right_engine_passes_beside_their_own_tests(repository):
    done, report = run(
        repository, "--dsv41-engine", "their_engine:right", "--dsv41-checks", "interleave,graphs"
    )
    assert done.returncode == 0, done.stdout
    names = {case.get("name") for case in report.findall(".//testcase")}
    assert names == {"test_their_own", "interleave", "graphs"}
    assert "declined: graphs" in report.find(".//skipped").get("message")


def test_a_finding_is_a_failure_with_its_repro_command_and_file(repository):
    done, report = run(repository, "--dsv41-engine", "their_engine:stale", "--dsv41-checks", "decode_prefill")
    assert done.returncode == 1
    failures = report.findall(".//failure")
    assert len(failures) == 1
    assert "layer 2, tap index_score" in failures[0].text and "dsv41 replay" in failures[0].text
    assert len(list((repository / "dsv41-findings").iterdir())) == 1
    assert "Traceback" not in done.stdout, "the finding speaks, not our stack"


def test_a_wrong_name_is_a_usage_error(repository):
    done, _ = run(repository, "--dsv41-engine", "their_engine:absent")
    assert done.returncode not in (0, 1) and "their_engine" in done.stdout + done.stderr
