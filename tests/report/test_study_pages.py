# SPDX-License-Identifier: Apache-2.0
"""What the pages of all analyses have in common: the answer first, two charts, the rest folded."""

from __future__ import annotations

import re
from html import unescape

import collapse_record
import cost_record
import pytest
import spikes_record
from test_html import read
from test_memory_page import memory_record

PAGES = {
    "collapse": lambda: collapse_record.three_models().html(),
    "complexity": lambda: cost_record.render(cost_record.cost_record()),
    "spikes": lambda: spikes_record.spikes_record().html(),
    "memory": lambda: memory_record({"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 6.0]}).html(),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_answer_two_charts_and_folded_parts(name: str) -> None:
    page = PAGES[name]()
    heading = unescape(re.findall(r"<h1>(.*?)</h1>", page)[0])
    title = unescape(re.findall(r"<title>(.*?)</title>", page)[0])
    assert heading == title
    assert not heading.endswith((".", "?"))
    first, *folded = page.partition("</header>")[2].split('<details class="part">')
    assert 1 <= first.count('role="img"') <= 2
    assert "<table" not in first
    assert folded
    assert all(part.startswith("<summary><h2>") for part in folded)
    assert "<details open" not in page
    assert page.count("<dt>machine</dt>") == 1
    assert "<dt>machine</dt>" in folded[-1]
    assert page.count("keymix analyze " + name) >= 1
    assert read(page).open == []
    for part in folded:
        assert len(re.sub(r"<[^>]+>|\s", "", part.partition("</summary>")[2])) > 20
