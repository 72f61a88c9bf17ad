# SPDX-License-Identifier: Apache-2.0
"""The page of a task without a page of its own in a browser: two runs, by their scores alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PHONE, WIDE, complaints, find, requests, visit
from own_task import make_number_record, registered
from synthetic import render

pytestmark = pytest.mark.slow


def test_two_runs_are_compared_by_an_error_of_which_less_is_better(driver, tmp_path: Path) -> None:
    with registered():
        record = make_number_record()
        path = tmp_path / "numbers.html"
        path.write_text(render(record), encoding="utf-8")
    of = {(run["mixer"], run["seed"]): run["last"]["test"]["mae"] for run in record["runs"]}
    a, b = of["softmax", 0], of["static_key", 0]
    visit(driver, path)
    lead = find(driver, "#pair-result .lead").text
    assert f"{a:.3g} mm" in lead
    assert f"a difference of −{a - b:.3g} mm" in lead
    assert "B is better than A" in lead
    find(driver, "#pair-swap").click()
    assert "B is worse than A" in find(driver, "#pair-result .lead").text
    assert len(driver.find_elements("css selector", "#pair-result svg")) == 2
    assert complaints(driver) == []
    for width in (WIDE, PHONE):
        visit(driver, path, width=width)
        assert driver.execute_script("return document.documentElement.scrollWidth") == width
    assert requests(driver, path) == []
