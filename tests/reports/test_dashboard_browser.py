"""The dashboard in headless Chromium: no error, filters, links, keyboard, phone width, light and dark."""

import shutil
import time

import pytest

from reports.charts import CHARTS
from reports.collect import collect
from reports.dashboard import build
from tests.reports import sample

pytest.importorskip("vl_convert", reason="pip install 'dsv41-testbed[reports]'")

# WCAG contrast ratio of an element's text against the panel behind it
CONTRAST = """
const channel = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
const luminance = colour => {
  const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(x => channel(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const element = document.querySelector(arguments[0]);
let panel = element;
while (getComputedStyle(panel).backgroundColor === "rgba(0, 0, 0, 0)") panel = panel.parentElement;
const pair = [getComputedStyle(element).color, getComputedStyle(panel).backgroundColor].map(luminance);
const [high, low] = pair.sort((x, y) => y - x);
return (high + 0.05) / (low + 0.05);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard")
    data = collect(
        history=sample.runs(folder / "history"),
        findings=sample.finding(folder / "findings"),
        faults=sample.fault_matrix(folder / "faults.json"),
        manifests=[sample.manifest(folder / "golden" / "reference")],
    )
    return build(folder / "index.html", data)


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
    values = [
        float(c.get_attribute("textContent").replace(",", ""))
        for c in cells
        if c.get_attribute("textContent")
    ]
    assert values == sorted(values) and values


def test_fault_filter(browser, page):
    view(browser, page)
    browser.execute_script(
        "const s = document.getElementById('f-faults'); s.value = 'missed'; s.dispatchEvent(new Event('change'))"
    )
    shown = browser.execute_script(
        "const rows = [...document.querySelectorAll('#table-faults tbody tr')];"
        "return rows.filter(r => !r.hidden).map(r => r.cells[0].textContent)"
    )
    assert shown == ["F99"]


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_no_sideways_scrolling(browser, page, width):
    view(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def contrast(browser, selector):
    return browser.execute_script(CONTRAST, selector)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(browser, page, scheme):
    view(browser, page, scheme=scheme)
    for selector in ("#figures td", ".sub", "nav a", ".tag.failed", ".tag.passed", ".flow li.bad"):
        assert contrast(browser, selector) >= 4.5, selector
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 22, 26)") == (scheme == "dark")


def test_theme_button_overrides_the_system(browser, page):
    view(browser, page, scheme="dark")
    button = browser.find_element("id", "theme")
    button.click()
    wait(lambda: drawn(browser) >= 2)
    assert "light" in button.text
    assert (
        browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        == "rgb(251, 251, 250)"
    )
