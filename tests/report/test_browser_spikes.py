# SPDX-License-Identifier: Apache-2.0
"""How the page of a study of spikes shows itself: as the page of a comparison does."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PHONE, WIDE, complaints, requests, visit
from spikes_record import raster, render, spikes_record, study
from test_browser_complexity import OVERLAPS
from test_browser_looks import SMALLEST, WIDTHS

pytestmark = pytest.mark.slow

LONG = {
    **raster(),
    "start": 1518,
    "grid": [56, 56],
    "attention": ["01" * 1568] * 4,
    "keys": ["0001" * 25] * 64,
    "masked": ["0001" * 25] * 64,
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = spikes_record()
    record["studies"].append(study("large", rasters=[LONG]))
    file = tmp_path_factory.mktemp("page") / "spikes.html"
    file.write_text(render(record), encoding="utf-8")
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
