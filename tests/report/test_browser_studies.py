# SPDX-License-Identifier: Apache-2.0
"""How the pages of analyses show themselves on a screen, on a phone, on paper and by keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PHONE, complaints, find, requests, visit
from test_browser_looks import SMALLEST, WIDTHS
from test_study_pages import PAGES

ENTER = "\ue007"

pytestmark = pytest.mark.slow


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "page.html"
    file.write_text(PAGES[request.param](), encoding="utf-8")
    return file


def test_all_unfolded_is_offline_silent_and_no_wider_than_the_window(driver, page) -> None:
    width = PHONE
    visit(driver, page, width=width, dark=True)
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert driver.execute_script(WIDTHS) == [width, width]
    assert driver.execute_script(SMALLEST) >= 8
    assert requests(driver, page) == []
    assert complaints(driver) == []


def test_parts_open_by_keyboard_and_on_paper(driver, page) -> None:
    visit(driver, page)
    folded = "return document.querySelectorAll('details.part:not([open])').length"
    before = driver.execute_script(folded)
    driver.execute_script(
        "window.opened = [];"
        "addEventListener('beforeprint', () => opened.push("
        "document.querySelectorAll('details:not([open])').length))"
    )
    driver.execute_cdp_cmd("Page.printToPDF", {})
    assert driver.execute_script("return opened") == [0]
    assert driver.execute_script(folded) == before > 1
    find(driver, "details.part:last-of-type summary").send_keys(ENTER)
    assert driver.execute_script(folded) == before - 1
