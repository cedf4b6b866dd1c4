"""The dashboard: what it collects, what it withholds, and how the page behaves in a real browser."""

import json
import re

import pytest

from reports.charts import CHARTS
from reports.collect import collect, peer_rows
from reports.dashboard import build, embed, fault_table, headline, render
from tests.reports import sample

vl_convert = pytest.importorskip("vl_convert", reason="pip install 'dsv41-testbed[reports]'")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard")
    return collect(
        history=sample.runs(folder / "history"),
        findings=sample.finding(folder / "findings"),
        faults=sample.fault_matrix(folder / "faults.json"),
        manifests=[sample.manifest(folder / "golden" / "reference")],
    )


@pytest.fixture(scope="module")
def page(data, tmp_path_factory):
    return build(tmp_path_factory.mktemp("page") / "index.html", data)


def test_a_time_whose_check_failed_is_not_printed(data, page):
    row = next(r for r in data["records"] if not r["passed"])
    assert row["median_us"] is None and row["ratio"] is None and row["gbps"] is None
    assert row["check"]
    assert "54.32" not in page.read_text(encoding="utf-8")  # the time of that record


def test_peers_are_compared_within_a_run_and_shape(data):
    newest = [p for p in data["peers"] if p["run"] == 2 and p["batch"] == 1]
    assert {p["peer"] for p in newest} == {"torch_eager (graph)", "torch_compile (compile)"}
    eager = next(p for p in newest if p["peer"].startswith("torch_eager"))
    assert eager["factor"] == pytest.approx((900 + 66.7 * 4) / (66.7 * 1.35), rel=0.01)
    assert not eager["comparable"] and "bf16" in eager["note"]
    lone = [r | {"run": 9} for r in data["records"] if r["engine"].startswith("peer.")]
    assert peer_rows(lone) == []  # a peer without ours in the same run compares with nothing


def test_headline_is_the_newest_run_and_the_best_mode(data):
    rows = headline(data["records"])
    assert [r["batch"] for r in rows] == [1, 8, 64]
    assert all(r["ratio"] == pytest.approx(1.35, rel=0.01) and r["run"] == 2 for r in rows)


def test_fault_table():
    table = fault_table(
        [{"id": "A", "detected_by": ["x"]}, {"id": "B", "out_of_reach": "needs a race"}, {"id": "C"}]
    )
    assert [(r["id"], r["caught"], r["status"]) for r in table["rows"]] == [
        ("A", True, "missed"),
        ("B", False, "out of reach"),
        ("C", False, "missed"),
    ]
    assert table["checks"] == ["x"] and fault_table(None)["rows"] == []


def test_embedded_json_cannot_close_its_element():
    text = embed({"a": "</script><!--", "b": float("nan"), "c": float("inf")})
    assert "<" not in text and json.loads(text) == {"a": "</script><!--", "b": None, "c": None}


def test_page_is_self_contained_and_escapes(page):
    text = page.read_text(encoding="utf-8")
    assert "<b>not markup</b>" not in text and "&lt;b&gt;not markup" in text
    assert not re.search(r"<(script|img|iframe|link)[^>]+(src|href)=[\"']?(https?:)?//", text)
    assert "default-src 'none'" in text and "connect-src" not in text


def test_empty_sources_give_a_page_that_says_so(tmp_path):
    text = render(collect(history=tmp_path / "none", state_config=None))
    assert "No benchmark run is recorded" in text and "No finding is on record" in text


@pytest.mark.parametrize("name", sorted(CHARTS))
def test_charts_compile(name):
    """Vega-Lite takes each specification; an unknown property would be an error here."""
    spec = CHARTS[name]()
    spec["width"], spec["height"] = 300, 200
    words = ("label", "series", "shape", "engine", "peer", "size", "form", "component")
    numbers = {
        "median_us": 2,
        "low_us": 1,
        "high_us": 3,
        "floor_us": 1,
        "ratio": 2,
        "factor": 2,
        "order": 1,
        "run": 1,
    }
    spec["datasets"] = {"rows": [dict.fromkeys(words, "x") | numbers | {"capacity": 1024, "bytes": 9}]}
    assert "<svg" in vl_convert.vegalite_to_svg(spec)
    assert "?" in spec["description"]
