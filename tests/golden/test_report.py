"""The reports: JSON that parses, HTML that is one file and says what failed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from golden.report import to_json, write_reports, write_whole
from golden.verify import verify_case
from tests.golden.tools import TIES, changed


@pytest.fixture(scope="module")
def failing() -> list:
    def shrink(x) -> None:
        x[0, 4] *= 0.5

    return [verify_case(changed(TIES, "pre.L3.attn_out", shrink), free=False)]


def test_reports_name_the_failure(failing: list, tmp_path: Path) -> None:
    json_path, html_path = write_reports(failing, tmp_path / "out")
    report = json.loads(json_path.read_text())
    bad = [m for case in report["cases"] for m in case["measures"] if not m["ok"]]
    assert report["ok"] is False and [(m["layer"], m["tensor"]) for m in bad] == [(3, "attn_out")]
    assert bad[0]["limit"]["reason"] and "position 4" in bad[0]["place"]
    html = html_path.read_text()
    assert "L3.attn_out" in html and "a case differs" in html
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)  # nothing is fetched


def test_paths_that_no_case_took_are_listed(failing: list) -> None:
    assert to_json(failing)["missing_paths"] == ["clamps hit"]


def test_a_failed_write_leaves_the_old_report(tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    write_whole(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "\ud800")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
