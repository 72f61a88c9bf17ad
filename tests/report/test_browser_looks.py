# SPDX-License-Identifier: Apache-2.0
"""How the page shows itself: offline, silent, within its width, in both colours, on paper."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from browser import PHONE, WIDE, complaints, find, look, requests, texts, visit, wait_until
from synthetic import HOSTILE

from each import together

pytestmark = pytest.mark.slow

LOOKS = [(WIDE, False), (PHONE, True)]

# Effective size of chart text: the font's size times the scale of the drawing.
SMALLEST = """
return Math.min(...[...document.querySelectorAll("svg text")]
  .filter((e) => e.checkVisibility())
  .map((e) => parseFloat(getComputedStyle(e).fontSize) * Math.hypot(e.getScreenCTM().a,
    e.getScreenCTM().b)));
"""
LARGEST = SMALLEST.replace("Math.min", "Math.max")
WIDTHS = "return [document.documentElement.scrollWidth, innerWidth]"


@together
@pytest.mark.parametrize("name", ["plain", "holes", "crowded"])
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_page_is_offline_silent_and_no_wider_than_its_window(driver, pages, name, width, dark):
    visit(driver, pages[name], width=width, dark=dark)
    content, window = driver.execute_script(WIDTHS)
    assert window == width
    assert content <= width
    assert driver.execute_script(SMALLEST) >= 9
    background = find(driver, "body").value_of_css_property("background-color")
    assert background == ("rgba(20, 22, 26, 1)" if dark else "rgba(251, 250, 248, 1)")
    assert requests(driver, pages[name]) == []
    assert complaints(driver) == []


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_page_is_accessible(driver, pages, width, dark):
    script = pytest.importorskip("axe_core_python").__path__[0] + "/axe.min.js"
    visit(driver, pages["plain"], width=width, dark=dark)
    driver.execute_script(Path(script).read_text(encoding="utf-8"))
    driver.set_script_timeout(250)
    # equal charts have equal ids, which WCAG 2.2 does not mind any more
    rules = "{rules: {'duplicate-id': {enabled: false}}}"
    found = driver.execute_async_script(f"axe.run({rules}).then(arguments[0])")
    assert {each["id"]: each["nodes"][0]["html"] for each in found["violations"]} == {}
    assert len(found["passes"]) > 20


def test_nothing_is_wider_with_everything_unfolded(driver, pages):
    """One page, whose window changes its width, as a reader's does."""
    widths = (WIDE, PHONE, 900, 700, 320)
    visit(driver, pages["crowded"])
    for width in widths:
        look(driver, width=width)
        assert driver.execute_script(LARGEST) <= 16  # the page's own text
    find(driver, "#class-all").click()
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    for width in widths:
        look(driver, width=width)
        assert driver.execute_script(WIDTHS) == [width, width]


def test_the_policy_stops_any_other_script(driver, pages):
    visit(driver, pages["plain"])
    driver.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.intruder = 1';"
        "document.body.append(s); document.body.insertAdjacentHTML('beforeend',"
        "`<img src=data:,x onerror='window.intruder = 2'>`)"
    )
    assert driver.execute_script("return window.intruder ?? null") is None
    assert any("Content Security Policy" in message for message in complaints(driver))


def test_hostile_names_stay_text_everywhere(driver, pages):
    from selenium.common.exceptions import NoAlertPresentException

    visit(driver, pages["crowded"])
    find(driver, "#class-all").click()
    find(driver, "#map-mixer option:nth-of-type(12)").click()
    with pytest.raises(NoAlertPresentException):
        _ = driver.switch_to.alert
    assert driver.execute_script("return document.querySelectorAll('script').length") == 2
    assert driver.find_elements("css selector", "[onerror], img[src=x]") == []
    named = texts(driver, ".by-class tbody th")
    assert set(HOSTILE) <= set(named)
    assert f"Class {HOSTILE[0]}, {HOSTILE[1]}" in texts(driver, "#map-stage p")
    assert complaints(driver) == []


def test_the_button_turns_the_colours_whatever_the_reader_prefers(driver, pages):
    body = "return getComputedStyle(document.body).backgroundColor"
    for dark in (False, True):
        visit(driver, pages["plain"], dark=dark)
        before = driver.execute_script(body)
        button = find(driver, "#theme")
        names = [button.text]
        button.click()
        assert driver.execute_script(body) != before
        names.append(button.text)
        button.click()
        assert driver.execute_script(body) == before
        assert names == (["Light", "Dark"] if dark else ["Dark", "Light"])


@pytest.mark.parametrize("name", ["plain", "crowded"])
def test_nothing_is_wider_than_paper(driver, pages, name):
    visit(driver, pages[name], width=718, media="print")
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert driver.execute_script(WIDTHS) == [718, 718]


def test_on_paper_all_is_unfolded_light_and_without_controls(driver, pages):
    visit(driver, pages["plain"], dark=True)
    find(driver, "#theme").click()
    find(driver, "#theme").click()  # dark by the reader's own choice
    look(driver, width=718, dark=True, media="print")
    background = find(driver, "body").value_of_css_property("background-color")
    assert background == "rgba(255, 255, 255, 1)"
    for gone in ("#theme", ".picker", "#pair-a", "#class-filter", ".sort-by"):
        assert not find(driver, gone).is_displayed()
    for there in (".maps.static", "#pair-agreement", "#runs table"):
        assert driver.execute_script(
            "return document.querySelector(arguments[0]).checkVisibility()", there
        )


def test_it_prints_to_pdf_and_is_folded_again(driver, pages):
    visit(driver, pages["crowded"])
    driver.execute_script(
        "window.opened = [];"
        "addEventListener('beforeprint', () => opened.push("
        "document.querySelectorAll('details:not([open])').length))"
    )
    folded = "return document.querySelectorAll('details:not([open])').length"
    before = driver.execute_script(folded)
    made = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert made.startswith(b"%PDF-")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", made)) <= 40
    assert driver.execute_script("return opened") == [0]
    assert before > 0  # the event that ends printing comes a moment later
    wait_until(driver, f"{folded} === {before}")


def test_without_scripts_the_page_is_complete(driver, pages):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        visit(driver, pages["plain"])
        shown = {s: find(driver, s).is_displayed() for s in (".maps.static", ".sortable")}
        height = find(driver, "noscript p").size["height"]
        gone = [find(driver, s).is_displayed() for s in ("#theme", ".picker", "#pair", ".fields")]
        rows = len(driver.find_elements("css selector", ".by-class tbody tr"))
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert all(shown.values())
    assert height > 0
    assert not any(gone)
    assert rows == 10
