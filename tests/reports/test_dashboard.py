"""The dashboard: what it collects, what it withholds, and how the page behaves in a real browser."""

import json
import re
import shutil
import time

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
    table = fault_table([{"id": "A", "detected_by": ["x"]}, {"id": "B", "out_of_reach": "needs a race"}, {"id": "C"}])
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
    row = {"label": "r", "run": 1, "series": "s", "shape": "x", "engine": "e", "peer": "p", "size": "1", "form": "packed"}
    numbers = {"median_us": 2, "low_us": 1, "high_us": 3, "floor_us": 1, "ratio": 2, "factor": 2, "order": 1}
    spec["datasets"] = {"rows": [row | numbers | {"component": "c", "capacity": 1024, "bytes": 9, "comparable": True}]}
    assert "<svg" in vl_convert.vegalite_to_svg(spec) and spec["description"].count("?") == 1 or name == "heat"


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium", reason="pip install 'dsv41-testbed[browser]'")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium with chromedriver (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    assert selenium
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver))
    yield driver
    driver.quit()


def wait(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the page did not get there in time")


def drawn(browser):
    return int(browser.execute_script("return document.documentElement.dataset.drawn ?? 0"))


def view(browser, page, width=1200, scheme="light"):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get("about:blank")
    browser.get(page.as_uri())
    wait(lambda: drawn(browser) >= 1)


def test_page_opens_without_an_error(browser, page):
    view(browser, page)
    assert browser.get_log("browser") == []
    charts = browser.find_elements("css selector", ".chart svg")
    assert len(charts) == len(CHARTS)
    assert browser.execute_script("return document.documentElement.dataset.error ?? ''") == ""


def test_filters_narrow_tables_charts_and_the_address(browser, page):
    view(browser, page)
    rows = lambda: len(browser.find_elements("css selector", "#table-figures tbody tr"))  # noqa: E731
    assert rows() == 51
    before = drawn(browser)
    browser.execute_script(
        "const s = document.getElementById('f-batch'); s.value = '8'; s.dispatchEvent(new Event('change'))"
    )
    wait(lambda: drawn(browser) > before)
    assert rows() == 15 and "batch=8" in browser.current_url
    assert "15 of 51" in browser.find_element("id", "count").text
    browser.get(browser.current_url)  # the address alone brings the same view back
    browser.refresh()
    wait(lambda: drawn(browser) >= 1)
    assert rows() == 15
    browser.find_element("css selector", "#filters button[type=reset]").click()
    wait(lambda: rows() == 51)


def test_links_lead_to_sections_and_findings(browser, page):
    view(browser, page)
    links = [a.get_attribute("href").split("#")[1] for a in browser.find_elements("css selector", "nav a")]
    assert len(links) == 13
    assert all(browser.find_elements("id", target) for target in links)
    browser.execute_script("document.querySelector('.finding').open = false")
    browser.execute_script("location.hash = 'finding-1'")
    wait(lambda: browser.execute_script("return document.getElementById('finding-1').open"))
    marked = browser.find_element("css selector", ".flow [aria-current]")
    assert marked.text == "sparse_o"


def test_keyboard_reaches_everything(browser, page):
    from selenium.webdriver.common.keys import Keys

    view(browser, page)
    body = browser.find_element("tag name", "body")
    body.send_keys(Keys.TAB)
    assert "Skip" in browser.switch_to.active_element.text
    button = browser.find_element("css selector", "#table-figures thead th:nth-child(8) button")
    button.send_keys(Keys.ENTER)
    head = browser.find_element("css selector", "#table-figures thead th:nth-child(8)")
    assert head.get_attribute("aria-sort") == "ascending"
    assert browser.execute_script("return document.activeElement.tagName") == "BUTTON"
    cells = browser.find_elements("css selector", "#table-figures tbody td:nth-child(8)")
    values = [float(c.get_attribute("textContent").replace(",", "")) for c in cells if c.get_attribute("textContent")]
    assert values == sorted(values) and values


def test_fault_filter(browser, page):
    view(browser, page)
    browser.execute_script(
        "const s = document.getElementById('f-faults'); s.value = 'missed'; s.dispatchEvent(new Event('change'))"
    )
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#table-faults tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].textContent)"
    )
    assert shown == ["F99"]


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_no_sideways_scrolling(browser, page, width):
    view(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def contrast(browser, selector):
    """WCAG contrast ratio of an element's text against the panel behind it."""
    return browser.execute_script(
        """
        const lum = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255).map(x => x <=
        0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
                           return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
        const e = document.querySelector(arguments[0]);
        let p = e; while (getComputedStyle(p).backgroundColor === 'rgba(0, 0, 0, 0)') p = p.parentElement;
        const [a, b] = [lum(getComputedStyle(e).color), lum(getComputedStyle(p).backgroundColor)].sort((x,
        y) => y - x); return (a + 0.05) / (b + 0.05); """, selector,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(browser, page, scheme):
    view(browser, page, scheme=scheme)
    for selector in ("#figures td", ".sub", "nav a", ".tag.failed", ".tag.passed", ".flow li.bad", ".card
    .note"):
        assert contrast(browser, selector) >= 4.5, selector
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 22, 26)") == (scheme == "dark")


def test_theme_button_overrides_the_system(browser, page):
    view(browser, page, scheme="dark")
    button = browser.find_element("id", "theme")
    button.click()
    wait(lambda: drawn(browser) >= 2)
    assert "light" in button.text
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(251,
    251, 250)"
