# SPDX-License-Identifier: Apache-2.0
"""The page is complete in itself, escapes every text, and shows what the record says."""

from __future__ import annotations

import html.parser
import re

import pytest
from synthetic import ACCURACY, make_record

from keymix.errors import UserError
from keymix.report.html import render

VOID = {"meta", "link", "img", "br", "wbr"}


class Reader(html.parser.HTMLParser):
    """Collects tags, addresses and text, and checks that tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


@pytest.fixture(scope="module")
def page() -> str:
    return render(make_record())


def test_tags_nest(page):
    assert read(page).open == []


def test_page_asks_nothing_of_the_network(page):
    reader = read(page)
    assert reader.addresses
    assert all(address.startswith("data:") for address in reader.addresses)
    assert "script" not in reader.tags
    assert "@import" not in page
    assert not re.search(r"url\((?!['\"]?data:)", page)


def test_page_tells_the_verdicts_the_numbers_and_the_record(page):
    record = make_record()
    text = " ".join(" ".join(read(page).text).split())
    for row in record["outcome"]["last"]:
        assert row["headline"] in text
        assert f"{row['top1']['mean'] * 100:.1f}" in text
    for word in (record["command"], record["environment"]["torch"], "0123abcd", record["caution"]):
        assert word in text
    for item in record["method"]:
        assert item["text"].strip() in text


def test_every_text_of_the_record_is_escaped():
    evil = "<script>alert('x')</script>&\"'"
    record = make_record(accuracy={"softmax": 0.95, evil: 0.94, "identity": 0.4})
    for key in ("title", "lead", "caution", "command", "data_line", "curves_note", "created"):
        record[key] = evil
    record["facts"] = record["data"]["classes"] = [evil]
    record["environment"][evil] = evil
    record["recipe"][evil] = evil
    record["runs"][0] |= {"status": "failed", "reason": evil}
    record["attention"]["images"][0] |= {"label": evil, "id": evil}
    record["attention"]["missing"]["identity"] = evil
    record["attention"]["layers"] = [evil, evil]
    record["collapse"]["pairs"] = [evil, "2–3", "3–4"]
    record["method"] = [{"title": evil, "text": evil}]
    for cost in record["costs"].values():
        cost["note"] = evil
    for mixer in record["mixers"]:
        mixer["note"] = evil
    page = render(record)
    assert "<script" not in page
    assert "alert" in page
    assert read(page).open == []


def test_every_mixer_has_its_chart_points_and_maps(page):
    assert page.count("<svg") >= 9
    for label in ACCURACY:
        assert page.count(f">{label}<") >= 4
    mapped = [m for m in ACCURACY if m != "identity"]
    assert page.count('class="heat"') == len(mapped) * 4 * 2


def test_failed_runs_are_told_and_do_not_break_the_page():
    record = make_record()
    for run in record["runs"]:
        if run["mixer"] == "key_value":
            run |= {"status": "failed", "reason": "RuntimeError: out of luck"}
    row = record["outcome"]["last"][4]
    row |= {"seeds": None, "images": None}
    row["top1"] = row["top5"] = row["val_top1"] = {"n": 0, "mean": None, "sd": None}
    page = render(record)
    assert "3 of 18 runs did not finish" in page
    assert "out of luck" in page


def test_a_record_without_maps_costs_or_spread_renders():
    record = make_record(seeds=1)
    record["attention"] = record["collapse"] = None
    for cost in record["costs"].values():
        cost.update(dict.fromkeys(("macs", "latency_ms", "latency_low_ms", "peak_mib")))
    page = render(record)
    assert "Where they look" not in page
    assert 'class="pm"' not in page


def test_a_model_of_two_blocks_tells_its_similarity_in_a_table():
    record = make_record()
    record["collapse"]["pairs"] = ["1–2"]
    record["collapse"]["similarity"] = {m: [0.437] for m in record["collapse"]["similarity"]}
    page = render(record)
    assert "similarity of blocks 1–2" in page
    assert "0.44" in page


def test_another_format_is_refused():
    with pytest.raises(UserError, match="format"):
        render(make_record() | {"format": 99})


def test_rendering_is_deterministic():
    assert render(make_record()) == render(make_record())


def test_five_seeds_show_no_caution():
    record = make_record(5)
    assert record["caution"] == ""
    assert "allow no verdict" not in render(record)
