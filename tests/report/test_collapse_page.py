# SPDX-License-Identifier: Apache-2.0
"""What a study of collapse finds in made-up similarities, its answer, its page and its files."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations

import pytest
from collapse_record import EVIL, layer, study, three_models, together
from test_html import read, words

from keymix.analysis.study_record import numbers


def all_of(blocks: range, share: float) -> dict[tuple[int, int], float]:
    return dict.fromkeys(combinations(blocks, 2), share)


def vit(shares: dict[tuple[int, int], float], count: int, **changes):
    """A model of one group."""
    return study([list(range(1, count + 1))], count, shares, **changes)


# ---- what is found --------------------------------------------------------------------------


def test_blocks_that_share_a_map_are_a_stretch_with_its_numbers() -> None:
    found = vit(all_of(range(4, 9), 0.95) | {(5, 8): 0.85}, 8)
    (stretch,) = found.stretches
    assert (stretch.kind, stretch.blocks) == ("same", (4, 5, 6, 7, 8))
    assert (stretch.least, stretch.mean) == (0.85, pytest.approx(0.94))
    assert (stretch.cosine, stretch.centred) == (pytest.approx(0.9), 0.75)
    assert stretch.entropy == 0.8125
    assert found.similar_blocks == found.repeating == (5, 6, 7, 8)
    assert found.collapsed is True
    assert found.data["similar_blocks"] == {
        "blocks": [5, 6, 7, 8],
        "count": 4,
        "of": 8,
        "share": 0.5,
    }


def test_the_rule_names_the_last_unique_block_and_the_option() -> None:
    found = vit(all_of(range(4, 9), 0.95) | {(4, 7): 0.6}, 8)
    (unique,) = found.unique_blocks
    assert (unique.block, unique.sharing, unique.least) == (4, (5, 6, 7, 8), 0.6)
    assert found.shared_from == 4
    assert any("--model.options.shared_from 4" in line for line in found.sentences["vit"])


def test_shares_of_just_the_thresholds_do_not_exceed_them() -> None:
    assert vit({(1, 2): 0.9}, 2).unique_blocks[0].block == 2
    assert vit({(1, 2): 0.9001}, 2).unique_blocks[0].block == 1
    assert vit({(1, 2): 0.8}, 2).similar_blocks == ()
    assert vit({(1, 2): 0.8}, 2).stretches == ()


def test_a_last_block_that_is_unique_shares_nothing() -> None:
    found = vit(all_of(range(2, 6), 0.99), 6)
    assert (found.shared_from, found.unique_blocks[0].block) == (None, 6)
    assert found.stretches[0].blocks == (2, 3, 4, 5)


@pytest.mark.parametrize(("centred", "kind"), [(0.75, "drifting"), (0.1, "spread")])
def test_maps_that_drift_are_compared_with_their_neighbours(centred: float, kind: str) -> None:
    shares = all_of(range(2, 6), 0.3) | {(i, i + 1): 0.9 for i in range(2, 5)}
    found = vit(shares, 6)
    pairs = [
        replace(pair, centred=centred if pair.similar_fraction == 0.9 else -1.0)
        for pair in found.pairs
    ]
    (stretch,) = replace(found, pairs=tuple(pairs)).stretches
    assert (stretch.kind, stretch.least) == (kind, 0.3)
    assert stretch.centred == pytest.approx(centred)


@pytest.mark.parametrize(("centred", "shared"), [(0.4999, False), (0.5, True), (math.nan, True)])
def test_a_map_is_shared_from_half_a_centred_cosine_or_where_nothing_is_left(
    centred: float, shared: bool
) -> None:
    found = vit(all_of(range(1, 4), 1.0), 3, centred=centred)
    assert found.collapsed is shared
    assert found.stretches[0].kind == ("same" if shared else "spread")
    assert any("shared_from" in line for line in found.sentences["vit"]) is shared
    assert (found.stretches[0].centred is None) is math.isnan(centred)


def test_nearly_even_maps_are_of_a_kind_of_their_own() -> None:
    layers = tuple(layer(i, entropy_normalised=0.99) for i in range(1, 5))
    found = vit(all_of(range(1, 5), 1.0), 4, layers=layers)
    assert found.stretches[0].kind == "even"
    assert "evenly" in found.answer


def test_stretches_of_two_kinds_are_told_apart() -> None:
    found = vit(all_of(range(1, 4), 1.0) | all_of(range(4, 6), 1.0), 5)
    pairs = [
        replace(pair, centred=0.25 if pair.first == "blocks.3.attn" else 0.75)
        for pair in found.pairs
    ]
    found = replace(found, pairs=tuple(pairs))
    assert [each.kind for each in found.stretches] == ["same", "spread"]
    assert found.repeating == (2, 3)


def test_a_remedy_that_blocks_have_is_not_advised() -> None:
    layers = [layer(i, remedy="Re-attention" if i > 1 else "") for i in range(1, 4)]
    found = vit(all_of(range(1, 4), 0.99), 3, layers=tuple(layers))
    assert any("though they have Re-attention" in line for line in found.sentences["vit"])
    layers[2] = layer(3)
    partly = replace(found, layers=tuple(layers))
    assert any("Re-attention or one map" in line for line in partly.sentences["vit"])


def test_sinks_are_reported_from_three_tenths_on() -> None:
    layers = tuple(layer(i, sink=0.45 if i == 2 else 0.3) for i in (1, 2, 3))
    found = vit({}, 3, layers=layers)
    assert [each.block for each in found.sinks] == [2]
    (line,) = (each for each in found.sentences["vit"] if "sinks" in each)
    assert "block 2" in line
    assert "45 %" in line
    assert vit({}, 3).sinks == ()


def test_few_images_are_said() -> None:
    assert "3 images" in vit({}, 3, images=3).sentences["vit"][-1]
    assert not any("images only" in line for line in vit({}, 3).sentences["vit"])


@pytest.mark.parametrize(
    ("found", "expected"),
    [([3], "block 3"), ([1, 2, 3, 7], "blocks 1–3, 7"), ([2, 9, 4], "blocks 2, 4, 9")],
)
def test_numbers_are_reported_in_spans(found: list[int], expected: str) -> None:
    assert numbers("block", found) == expected


# ---- the answer -----------------------------------------------------------------------------


def test_the_answer_of_one_model_has_its_blocks_and_similarity() -> None:
    found = vit(all_of(range(4, 9), 0.95), 8)
    text = "Blocks 4–8 compute nearly the same attention: similarity 0.90"
    assert found.answer == text
    assert replace(found, images=12).answer == f"{text}, on 12 images only"
    assert vit({}, 5, cosine=-0.004).answer.endswith("similarity at most 0.00")


def test_the_answer_says_when_there_is_none() -> None:
    assert vit({}, 2, images=1).answer.startswith("One image is too few")
    assert vit({}, 2, random=True).answer.startswith("Random weights: ")
    bare = [study([], 3, label=label) for label in ("a", "b")]
    assert together(*bare).answer == "No two blocks can be compared in a and b"
    assert (bare[0].collapsed, vit({}, 1).collapsed) == (None, None)


def test_the_answer_of_several_models_compares_them() -> None:
    one = study([[1, 2, 3, 4]], 4)
    apart = study([[1, 2, 3, 4]], 4, label="deep", centred=0.1)
    assert together(one, apart).answer == (
        "Blocks that repeat the attention of the one before: 3 of 4 in vit, none of 4 in deep"
    )
    assert together(one, replace(apart, of=replace(apart.of, random=True))).answer == (
        f"vit: {one.answer}"
    )


# ---- page and files -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> str:
    return three_models().html()


def test_tags_nest_and_nothing_is_fetched(page: str) -> None:
    reader = read(page)
    assert reader.open == []
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    assert not re.search(r"url\((?!['\"]?(data:|#))", page)


def test_every_model_has_its_sentences_and_the_untrained_one_a_warning(page: str) -> None:
    text = words(page)
    for lines in three_models().sentences.values():
        assert lines[0] in text
    assert text.count("not trained") == 1


def test_hostile_names_stay_text(page: str) -> None:
    assert EVIL not in page
    assert EVIL in words(page)
    assert len(read(page).scripts) == 2
    for name, content in three_models().files().items():
        assert re.fullmatch(r"[\w.-]+", name)
        if name.endswith(".svg"):
            ET.fromstring(str(content))


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
    assert "depth" in three_models().figures
    assert "depth" not in together(study([[1, 2]], 2)).figures


def test_a_model_without_maps_has_a_page() -> None:
    found = together(study([], 3))
    assert {*found.figures} == {"features", "rank"}
    assert len(re.findall(r"<svg [^>]*role=", found.html())) == 2


def test_the_table_holds_what_was_read_of_each_block() -> None:
    table = three_models().tables["blocks"]
    assert table.cells()[0][:6] == ["vit", "1", "–", "–", "–", "75.0"]
    assert table.cells()[1] == [
        *("vit", "2", "95.5", "0.90", "−0.30", "75.0", "0.25", "0.20", "38.0", "79.2", "0.81"),
        *("12.5", "50.0"),
    ]
    assert table.plain()[2][-1] == "blocks.1.attn"
    assert table.cells()[-1][2:7] == ["–"] * 5
    alone = study([[1, 2]], 2).tables["blocks"]
    assert "model" not in alone.headings()
    assert alone.cells()[1][-1] == "blocks.1.attn"
