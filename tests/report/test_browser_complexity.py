# SPDX-License-Identifier: Apache-2.0
"""How the page of a study of cost shows itself: as the page of a comparison does."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PHONE, WIDE, complaints, find, requests, texts, visit
from cost_record import MIXERS, cost_record, render
from test_browser_looks import SMALLEST, WIDTHS

pytestmark = pytest.mark.slow

# Pairs of names in one chart whose boxes touch
OVERLAPS = """
const touching = [];
for (const chart of document.querySelectorAll("svg")) {
  const names = [...chart.querySelectorAll("text")].map((e) => [e, e.getBoundingClientRect()]);
  for (const [a, p] of names) for (const [b, q] of names) {
    if (a === b || a.compareDocumentPosition(b) & 2) continue;
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 1 && high > 4) touching.push(`${a.textContent} | ${b.textContent}`);
  }
}
return touching;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "complexity.html"
    file.write_text(render(cost_record()), encoding="utf-8")
    return file


@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (PHONE, True)])
def test_it_is_offline_silent_and_no_wider_than_its_window(driver, page, width, dark) -> None:
    visit(driver, page, width=width, dark=dark)
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    content, window = driver.execute_script(WIDTHS)
    assert (content, window) == (width, width)
    assert driver.execute_script(SMALLEST) >= 9
    assert driver.execute_script(OVERLAPS) == []
    assert requests(driver, page) == []
    assert complaints(driver) == []


def test_names_end_inside_their_chart(driver, page) -> None:
    for width in (WIDE, 700, PHONE, 320):
        visit(driver, page, width=width)
        assert driver.execute_script(WIDTHS) == [width, width]
        outside = driver.execute_script(
            "return [...document.querySelectorAll('svg text')].filter((e) => {"
            "const box = e.getBoundingClientRect();"
            "const room = e.closest('svg').getBoundingClientRect();"
            "return box.right > room.right + 2 || box.left < room.left - 2;"
            "}).map((e) => e.textContent)"
        )
        assert outside == []


def test_tables_sort(driver, page) -> None:
    visit(driver, page)
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    table = "details.part:nth-of-type(3) .scroll"  # all that was measured
    assert len(texts(driver, f"{table} tbody th")) == 3 * len(MIXERS)
    find(driver, f"{table} thead th:nth-of-type(5) button").click()
    first = texts(driver, f"{table} tbody th")[:3]
    assert [name.partition("control")[0] for name in first] == ["identity"] * 3
