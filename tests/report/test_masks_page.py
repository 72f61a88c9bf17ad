# SPDX-License-Identifier: Apache-2.0
"""A comparison of masks on the page: its scores, its classes, its pictures, its words."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import xml.etree.ElementTree as ET
from statistics import mean
from typing import Any

import numpy as np
import pytest
from masks_record import LEVELS, ORGANS, make_mask_record, shares
from PIL import Image
from synthetic import classes_of, render, typed
from test_html import EVIL, read, words

from keymix.analysis.mask_pictures import PALETTE, colours_of, rim
from keymix.report.charts import looks
from keymix.report.pictures import hex_colour, layer_uri, outlines_uri
from keymix.report.tables import plain_value
from keymix.tasks.segmentation.gallery import errors

pytestmark = pytest.mark.usefixtures("undrawn")

LOOKS = looks(list(LEVELS), baseline="softmax", controls=["identity"])


@pytest.fixture(scope="module")
def page() -> str:
    return render(make_mask_record())


def payload_of(page: str) -> dict[str, Any]:
    return json.loads(read(page).scripts[0])


def table(page: str, caption: str) -> list[dict[str, str]]:
    """Read a table's rows by the names that its cells have on a narrow screen."""
    body = page.partition(f"{caption}</caption>")[2].partition("<tbody>")[2]
    body = body.partition("</tbody>")[0]
    rows = []
    for row in re.findall(r"<tr[^>]*>.*?</tr>", body, re.DOTALL):
        cells = re.findall(r'<td data-label="([^"]*)"[^>]*>(.*?)</td>', row, re.DOTALL)
        cells_by_label = {label: words(cell) for label, cell in cells}
        rows.append({"": words(re.findall(r"<th.*?</th>", row, re.DOTALL)[0])} | cells_by_label)
    return rows


def test_it_shows_overlap_and_no_accuracy(page):
    text = words(page)
    assert read(page).open == []
    record = make_mask_record()
    for row in record["outcome"]["last"][1:]:
        assert f"{row['mixer']}: " in text
    assert "120 test images of 24 cases." in text
    assert "over seeds and test cases" in text
    for gone in ("ccuracy", "frequent confusions", "McNemar", "top-5"):
        assert gone not in text


def test_the_table_has_every_score_in_its_unit(page):
    rows = table(page, "Scores after the last epoch")
    outcome = make_mask_record()["outcome"]["last"]
    assert [row[""].split()[0] for row in rows] == [row["mixer"] for row in outcome]
    for row, expected in zip(rows, outcome, strict=True):
        for label, key in (("test mean IoU, %", "jaccard"), ("Dice, %", "dice")):
            assert row[label].startswith(f"{expected[key]['mean'] * 100:.1f} ± ")
        weighted = expected["weighted_jaccard"]["mean"]
        assert row["weighted IoU, %"].startswith(f"{weighted * 100:.1f} ")
        distance = expected["hd95_mm"]
        assert row["HD95, mm"] == f"{distance['mean']:.1f} ± {distance['sd']:.1f}"
        assert row["validation, %"] == f"{expected['val_jaccard']['mean'] * 100:.1f}"


def test_pixels_are_no_millimetres():
    record = make_mask_record() | {"distance_unit": "px"}
    for row in record["outcome"]["last"]:
        row["hd95_px"] = row.pop("hd95_mm")
    page = render(record)
    assert "HD95, px" in page
    assert ", mm" not in words(page)


def test_calibration_is_drawn_of_runs_that_have_it(page):
    assert 'aria-label="share of right pixels by probability"' in page
    record = make_mask_record()
    for run in record["runs"]:
        del run["reliability"]
    assert "share of right pixels" not in render(record)


def test_a_class_is_shown_for_each_mixer_as_the_mean_over_seeds(page):
    record = make_mask_record()
    rows = table(page, "IoU by class and mixer")
    assert len(rows) == len(ORGANS) * len(LEVELS)
    for row in rows:
        c, mixer = ORGANS.index(row[""]), row["mixer"].split()[0]
        runs = [run["classes"]["score"][c] for run in record["runs"] if run["mixer"] == mixer]
        assert row["IoU, %"] == f"{mean(runs) * 100:.1f}"
        assert row["HD95, mm"] == f"{13.5 + c:.1f}"
        assert row["missed or invented, images"] == f"{2 * (c + 1):.1f}"
        assert row["test images with it"] == str(record["classes"]["test_images"][c])


def test_a_matrix_has_a_row_for_each_class_and_a_column_for_each_mixer(page):
    rows = table(page, "IoU by class")
    assert {row[""] for row in rows} == {*ORGANS}
    assert all(len(row) == 2 + len(LEVELS) for row in rows)


def test_a_class_s_difference_is_of_the_seeds_that_both_finished():
    record = make_mask_record()
    of = {(r["mixer"], r["seed"]): r["classes"]["score"] for r in record["runs"]}
    record["runs"] = [r for r in record["runs"] if (r["mixer"], r["seed"]) != ("key_value", 1)]
    of["softmax", 2][0] = None  # it was nowhere
    found = classes_of(typed(record), LOOKS)
    assert found.figures is not None
    (row,) = (r for r in found.figures.rows if r[:2] == [ORGANS[0], "key_value"])
    expected = of["key_value", 0][0] - of["softmax", 0][0]
    assert row[4] == pytest.approx(expected)


def test_many_classes_are_folded_and_the_largest_difference_comes_first():
    organs = [f"part {i}" for i in range(30)]
    record = make_mask_record(1, organs=organs)
    page = render(record)
    assert "The figures of all 30 classes" in page
    found = classes_of(typed(record), LOOKS)
    assert found.figures is not None
    rows = found.figures.rows
    sizes = [
        max(abs(plain_value(row[4]) or 0) for row in rows[i : i + 3])  # not the control
        for i in range(0, len(rows), 4)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert read(page).open == []


def test_pictures_have_the_truth_and_every_prediction_with_words(page):
    stored = make_mask_record()["galleries"]["masks"]
    said = [html.unescape(each) for each in re.findall(r'role="img" aria-label="([^"]*)"', page)]
    scenes = [(scene["id"], panel) for scene in stored["scenes"] for panel in scene["panels"]]
    expected = [
        f"{name}, {', '.join(panel.get('mixers', {})) or 'truth'}: {panel['text']}"
        for name, panel in scenes
    ]
    assert [each for each in said if each in expected] == expected
    assert len(expected) == 6 * (1 + len(LEVELS))
    for name, legend in stored["legends"].items():
        assert page.count(f'<img class="layer of-{name}"') == len(expected)
        (shown,) = re.findall(rf'<ul class="legend of-{name}">(.*?)</ul>', page, re.DOTALL)
        for each, colour in legend.items():
            assert f'style="color: {colour}"></span><bdi>{each}</bdi>' in shown
    assert "the worst, median and best by their IoU, the mean over mixers and seeds" in words(page)
    assert "and one with nothing in it" in words(page)
    for scene in stored["scenes"]:
        assert f'<span class="tag">{scene["why"]}</span>' in html.unescape(page)
    assert len(page) < 1_500_000


def test_the_dice_of_each_size_is_shown_by_mixer(page):
    sizes = make_mask_record()["sizes"]
    rows = table(page, "Dice coefficient by size")
    assert [row[""].split()[0] for row in rows] == list(LEVELS)
    heads = [
        f"{low:,} to {high:,} pixels ({number:,}), %"
        for (low, high), number in zip(sizes["pixels"], sizes["structures"], strict=True)
    ]
    assert len(heads) == 3
    for row, mixer in zip(rows, LEVELS, strict=True):
        assert [row[head] for head in heads] == [f"{100 * d:.1f}" for d in sizes["dice"][mixer]]


def test_the_script_gets_every_image_s_overlap(page):
    record, payload = make_mask_record(), payload_of(page)
    assert payload["names"][:2] == ["slice_0000", "slice_0001"]
    for run, stored in zip(record["runs"], payload["runs"], strict=True):
        assert stored["score"] == run["last"]["test"]["jaccard"]
        assert stored["classes"] == run["classes"]
        assert shares(stored["shares"]).shape == (120,)
        assert list(stored["history"]) == ["train_loss", "val_loss", "val_jaccard"]


def test_every_text_is_escaped():
    levels = {"softmax": 0.9, EVIL: 0.8, "identity": 0.4}
    record = make_mask_record(levels=levels, organs=(EVIL, "two", "three"))
    record["galleries"]["masks"]["scenes"][0]["id"] = EVIL
    record["galleries"]["masks"]["names"] = (EVIL,)
    reader = read(page := render(record))
    assert reader.open == []
    assert page.count("<script") == 2
    assert json.loads(reader.scripts[0])["names"][0] == EVIL


def test_runs_that_failed_leave_a_page():
    record = make_mask_record()
    for run in record["runs"]:
        if run["mixer"] == "key_value":
            kept = {key: run[key] for key in ("mixer", "seed", "folder")}
            run.clear()
            run.update(kept | {"status": "failed", "reason": "RuntimeError: out of luck"})
    nothing = {"n": 0, "mean": None, "sd": None}
    keys = (
        "jaccard",
        "weighted_jaccard",
        "dice",
        "hd95_mm",
        "surface_dice",
        "calibration_error",
        "val_jaccard",
    )
    for row in record["outcome"]["last"]:
        if row["mixer"] == "key_value":
            row.update(dict.fromkeys(keys, nothing) | {"seeds": None, "images": None})
    text = words(render(record))
    assert "3 of 12 runs failed" in text
    assert "Not drawn, since no run finished: key_value" in text


def pixels(uri: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_a_layer_fills_each_class_and_draws_rims_of_prediction_and_truth():
    planes = np.zeros((2, 8, 8), dtype=bool)
    planes[0, 1:6, 1:6] = True
    true = np.zeros_like(planes)
    true[1, 3:8, 3:8] = True
    drawn = pixels(layer_uri(planes, colours_of(2), outlines=true, most=8))
    first = PALETTE[0]
    assert tuple(drawn[1, 1]) == (*first, 255)  # rim
    assert tuple(drawn[2, 2]) == (*first, 120)  # inside
    assert tuple(drawn[3, 3]) == (255, 255, 255, 255)  # rim of the truth above the fill
    assert tuple(drawn[7, 7]) == (255, 255, 255, 255)  # where the picture ends
    assert drawn[6, 6, 3] == 0  # what is true and not found stays empty
    assert drawn[0, 0, 3] == 0


def test_outlines_are_those_of_both_masks_and_the_truth_s_are_dashed():
    found = np.zeros((2, 8, 9), dtype=bool)
    found[0, 2:5, 1:7] = True
    true = np.zeros_like(found)
    true[1, 0:3, 0:3] = True
    true[1, 1, 1] = False  # a hole
    uri = outlines_uri(found, colours_of(2), true)
    kind, _, content = uri.partition(",")
    assert kind == "data:image/svg+xml;base64"
    drawn = ET.fromstring(base64.b64decode(content))
    assert drawn.attrib["viewBox"] == "0 0 9 8"
    halo, line, dashed = drawn
    assert line.attrib["stroke"] == hex_colour(PALETTE[0])
    assert "stroke-dasharray" not in line.attrib
    (outline,) = corners(line)
    assert outline.min(axis=0).tolist() == [1, 2]
    assert outline.max(axis=0).tolist() == [7, 5]
    assert halo.attrib["d"] == dashed.attrib["d"]
    assert (dashed.attrib["stroke"], "stroke-dasharray" in dashed.attrib) == ("#fff", True)
    sizes = sorted(np.ptp(each, axis=0).tolist() for each in corners(dashed))
    assert sizes == [[1, 1], [3, 3]]


def corners(path: ET.Element) -> list[np.ndarray]:
    """Read the corners of each line of a path, x and y."""
    lines = path.attrib["d"].removeprefix("M").removesuffix("Z").split("ZM")
    return [np.array(line.split(), dtype=float).reshape(-1, 2) for line in lines]


def test_errors_are_right_too_much_missed_or_of_another_class():
    rng = np.random.default_rng(0)
    found, true = rng.random((2, 3, 20, 20)) < 0.3
    drawn = errors(found, true)
    for y in range(20):
        for x in range(20):
            said, wanted = ({*np.flatnonzero(each[:, y, x])} for each in (found, true))
            expected = [
                bool(wanted) and said == wanted,
                bool(said - wanted) and not wanted - said,
                bool(wanted - said) and not said - wanted,
                bool(said - wanted) and bool(wanted - said),
            ]
            assert drawn[:, y, x].tolist() == expected


def test_a_rim_is_what_has_a_neighbour_outside():
    mask = np.ones((4, 5), dtype=bool)
    mask[0, 0] = False
    expected = np.array([[0, 1, 1, 1, 1], [1, 0, 0, 0, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]])
    assert (rim(mask) == expected.astype(bool)).all()


def test_colours_differ_beyond_the_palette():
    colours = colours_of(20)
    assert colours[:7] == list(PALETTE)
    assert len(set(colours)) == 20
