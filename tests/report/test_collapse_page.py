# SPDX-License-Identifier: Apache-2.0
"""A study of collapse on its page and in its files: complete, escaped, in the right figures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from collapse_record import EVIL, charts, collapse_record, render, study, table_of, typed
from test_html import read, words


def answer_of(*studies: dict, **changes: object) -> str:
    return typed(collapse_record() | {"studies": list(studies)} | changes).answer


def test_the_answer_of_one_model_is_its_headline() -> None:
    many = study("vit", [[1, 2]], 2, images=64)
    assert answer_of(many) == "Headline of vit"
    assert answer_of(many | {"images": 12}) == "Headline of vit, on 12 images only"


def test_the_answer_says_when_there_is_none() -> None:
    vit = study("vit", [[1, 2]], 2, images=64)
    assert answer_of(vit | {"images": 1}).startswith("One image is too few")
    assert answer_of(vit | {"random": True}) == (
        "Random weights: the attention maps of vit say nothing about a trained model"
    )
    none = {"collapsed": None, "headline": "x", "evidence": [], "caveats": []}
    bare = [study(name, [], 3, images=64, verdict=none) for name in ("a", "b")]
    assert answer_of(*bare) == "No two blocks can be compared in a and b"


def test_the_answer_of_several_models_compares_them() -> None:
    vit, deep = (study(name, [[1, 2, 3, 4]], 4, images=64) for name in ("vit", "deepvit"))
    differs = deep | {"verdict": deep["verdict"] | {"collapsed": False}}
    text = "Attention repeats that of the block before in vit in 3 of 4 blocks"
    assert answer_of(differs, vit) == f"{text}, not in deepvit"
    apart = vit | {"verdict": differs["verdict"]}
    assert answer_of(apart, differs) == (
        "No block repeats the attention of the one before in vit and deepvit: similarity at most "
        "0.90"
    )
    assert answer_of(vit, deep | {"random": True}) == "vit: Headline of vit"


@pytest.fixture(scope="module")
def page() -> str:
    return render(collapse_record())


def test_tags_nest_and_nothing_is_fetched(page: str) -> None:
    reader = read(page)
    assert reader.open == []
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    assert not re.search(r"url\((?!['\"]?(data:|#))", page)


def test_the_verdict_of_every_model_comes_first(page: str) -> None:
    text = words(page)
    for part in ("Headline of vit", "Evidence of swin", "Caveat of vit"):
        assert part in text
        assert text.index(part) < text.index("Every pair of blocks")
    assert text.count("Random weights.") == 1


def test_hostile_names_stay_text(page: str) -> None:
    assert EVIL not in page
    assert EVIL in words(page)
    assert len(read(page).scripts) == 2
    for name, svg in charts(collapse_record()).items():
        assert re.fullmatch(r"[\w.-]+", name)
        ET.fromstring(svg)


def test_curves_overlay_models_and_break_where_blocks_cannot_be_compared(page: str) -> None:
    charts = re.findall(r"<svg [^>]*role=.*?</svg>", page, re.DOTALL)
    # nine measures and the depths; pairs twice a model; one Theta
    assert len(charts) == 10 + 6 + 1
    adjacent = next(chart for chart in charts if "(Eq. 7; Fig. 4, 5 and 8a)" in chart)
    drawn = re.findall("<title>([^<]*)", adjacent)  # of a curve, and of its points
    assert [drawn.count(name) / 2 for name in ("vit", "swin")] == [1, 2]
    features = next(chart for chart in charts if "Fig. 4 and 8b" in chart)
    assert features.count("<title>") / 2 == 3


def test_one_model_has_no_chart_of_depths() -> None:
    record = collapse_record()
    record["studies"] = record["studies"][:1]
    assert "by the depth of the model" not in render(record)
    assert "by the depth of the model" in render(collapse_record())


def test_a_model_without_maps_has_a_page() -> None:
    record = collapse_record()
    record["studies"] = [study("pooled", [], 3)]
    page = render(record)
    assert "Every two blocks" not in words(page)
    assert len(re.findall(r"<svg [^>]*role=", page)) == 2  # tokens alone
    assert {"collapse-features.svg", "collapse-rank.svg"} == set(charts(record))


def test_the_table_holds_what_was_read_of_each_block(page: str) -> None:
    vit = table_of(collapse_record()["studies"][0]).cells()
    assert vit[0][:5] == ["1", "–", "–", "–", "75.0"]
    assert vit[1] == [
        *("2", "95.5", "0.900", "-0.300", "75.0", "0.250", "0.200", "38.0", "0.812", "12.5", "50"),
        "blocks.1.attn",
    ]
    swin = table_of(collapse_record()["studies"][2]).cells()
    assert swin[4][1:6] == ["–"] * 5


def test_the_rank_is_a_share_of_the_most_that_it_can_be() -> None:
    drawn = charts(collapse_record())["collapse-rank.svg"]
    assert "min(N, C): 48 in vit, 48 in" in drawn
    assert {">0<", ">100<"} <= set(re.findall(r">\d+<", drawn))
