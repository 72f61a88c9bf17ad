# SPDX-License-Identifier: Apache-2.0
"""How the page of a study of spikes shows itself: as the page of a comparison does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from browser import PHONE, WIDE, complaints, requests, visit
from spikes_record import raster, result, silent, study
from test_browser_complexity import OVERLAPS
from test_browser_looks import SMALLEST, WIDTHS

pytestmark = pytest.mark.slow

LONG = raster(
    start=1518,
    grid=(56, 56),
    attention=torch.arange(3136).expand(4, -1) % 2 == 1,
    keys=torch.arange(100).expand(64, -1) % 4 == 3,
    masked=torch.arange(100).expand(64, -1) % 4 == 3,
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = result(study("qk", drawn=(raster(),)), silent("dead"), study("large", drawn=(LONG,)))
    file = tmp_path_factory.mktemp("page") / "spikes.html"
    file.write_text(found.html(), encoding="utf-8")
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
