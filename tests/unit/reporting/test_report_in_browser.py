"""The report in a real browser: it draws, loads nothing, fits, and works by keyboard and pointer."""

from __future__ import annotations

import json
import time

import pytest
import synthetic_run
from browser import Browser, find_browser

from snip_megatron.reporting.comparison import write_comparison
from snip_megatron.reporting.report import write_report

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome in PATH")

LEFT, HOME, END = ("ArrowLeft", 37), ("Home", 36), ("End", 35)
PLOT_AREA = "(() => { const r = document.querySelector('#map .nsewdrag').getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"  # noqa: E501
WAIT_S = 20.0


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run = synthetic_run.write_run(tmp_path_factory.mktemp("runs") / "whole")
    config = json.loads((run / "config.json").read_text())
    config["facts"]["linear_shapes"] = {name: {"tokens": 512, "n": 128, "k": 128} for name in synthetic_run.LINEARS}
    (run / "config.json").write_text(json.dumps(config))
    return write_report(run)


@pytest.fixture(scope="module")
def comparison(report):
    bf16 = synthetic_run.write_run(report.parent.parent / "bf16", updates=0, faults=False)
    return write_comparison([report.parent, bf16])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def caption(browser: Browser) -> str:
    return browser.evaluate("document.getElementById('map-caption').textContent")


def eventually(browser: Browser, expression: str):
    deadline = time.monotonic() + WAIT_S
    while not (value := browser.evaluate(expression)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def test_it_draws_and_loads_nothing(browser, report):
    browser.requests.clear()
    browser.open(report)
    for figure in ("loss", "map", "share", "saved", "front", "timing"):
        assert browser.evaluate(f"document.querySelectorAll('#{figure} .main-svg').length") > 0
    assert browser.evaluate("document.querySelectorAll('#legend li').length") == 2
    assert all(url.startswith(("file:", "data:", "blob:")) for url in browser.requests)
    assert sum(url.startswith("file:") for url in browser.requests) == 1
    assert browser.complaints == []


def test_slider_by_keyboard(browser, report):
    browser.open(report)
    assert caption(browser).startswith("Map v5, 5 of 5 · in force from step 95")
    browser.evaluate("document.getElementById('slider').focus()")
    browser.key(*LEFT)
    assert caption(browser).startswith("Map v4, 4 of 5")
    browser.key(*HOME)
    assert caption(browser).startswith("Map v1, 1 of 5")
    assert browser.evaluate("document.getElementById('previous').disabled")
    browser.evaluate("document.getElementById('next').click()")
    assert caption(browser).startswith("Map v2, 2 of 5")
    browser.evaluate("document.getElementById('choices').open = true")
    assert eventually(browser, "document.querySelectorAll('#choices-table tbody tr').length") == 72


def test_hover_says_why(browser, report):
    browser.open(report, height=1400)
    x, y, width, height = browser.evaluate(PLOT_AREA)
    for _ in range(2):  # the first move enters the figure
        browser.point(x + 0.4 * width, y + 0.29 * height)
        browser.point(x + 0.41 * width, y + 0.29 * height)
    text = eventually(browser, "document.querySelector('#map .hoverlayer').textContent")
    assert "decoder.layers.2.self_attention.linear_proj" in text
    assert "ΔL" in text
    assert "ΔW" in text
    assert "Q " in text


def test_the_comparison_draws_and_loads_nothing(browser, comparison):
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(comparison)
    drawn = [f for f in ("loss", "distance", "share", "formats", "cost") if browser.evaluate(svgs(f))]
    assert drawn == ["loss", "distance", "share", "formats", "cost"]
    assert all(url.startswith(("file:", "data:", "blob:")) for url in browser.requests)
    assert sum(url.startswith("file:") for url in browser.requests) == 1
    assert browser.complaints == []


def svgs(figure: str) -> str:
    return f"document.querySelectorAll('#{figure} .main-svg').length"


@pytest.mark.parametrize("page", ["report", "comparison"])
def test_every_table_is_reached_and_scrolled_by_keyboard(browser, page, request):
    browser.open(request.getfixturevalue(page), width=390)
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    wanted = browser.evaluate("document.querySelectorAll('.scroll').length")
    assert wanted >= 2
    reached = set()
    for _ in range(80):
        browser.key("Tab", 9)
        if label := browser.evaluate("document.activeElement.matches('.scroll') && document.activeElement.ariaLabel"):
            reached.add(label)
        outlined = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outlined != "none" or browser.evaluate("document.activeElement === document.body")
    assert len(reached) == wanted


@pytest.mark.parametrize("page", ["report", "comparison"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_follows_the_theme(browser, page, request, tmp_path, width, dark):
    browser.open(request.getfixturevalue(page), width=width, dark=dark)
    assert browser.evaluate("document.scrollingElement.scrollWidth") == width
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    text = browser.evaluate("getComputedStyle(document.querySelector('#loss .xtick text')).fill")
    brightness = [sum(int(part) for part in colour[4:-1].split(",")) / 3 for colour in (background, text)]
    assert (brightness[0] < 60 and brightness[1] > 180) if dark else (brightness[0] > 200 and brightness[1] < 90)
    assert browser.screenshot(tmp_path / "page.png").startswith(b"\x89PNG")


def test_theme_changes_while_open(browser, report):
    browser.open(report)
    fill = "getComputedStyle(document.querySelector('#loss .xtick text')).fill"
    before = browser.evaluate(fill)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert eventually(browser, f"{fill} !== '{before}'")
