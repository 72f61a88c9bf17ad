# SPDX-License-Identifier: Apache-2.0
"""The page's sections: looked up in their folder, and the figures behind them."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup
from synthetic import (
    ACCURACY,
    LONG,
    classes_of,
    lose,
    made_up_maps,
    make_record,
    packed_maps,
    pictured,
    render,
    typed,
)

from keymix.records import from_json
from keymix.report import charts, page, part, sections
from keymix.report.charts import looks, short_labels
from keymix.report.formats import percent, points
from keymix.report.page import as_element_text
from keymix.report.part import ClassScores, Page, Section
from keymix.report.record import PackedMaps
from keymix.report.sections import attention, learning, runs
from keymix.report.sections.classes import ClassesView, classes_view

pytestmark = pytest.mark.usefixtures("undrawn")

LOOKS = looks(list(ACCURACY), baseline="softmax", controls=["identity"])


ADDED = """
from keymix.report.part import Section
from keymix.report.tables import Column, Table

PLACE = 25

def sections(shown):
    table = Table("words", "Words", (Column("mixer", "m", "name"),), [["softmax"]])
    yield Section(heading="A section more", tables=[table], notes=[(["softmax"], "a <note>")])
"""


def test_a_file_in_the_folder_is_a_section_in_its_place(tmp_path, monkeypatch):
    (tmp_path / "added.py").write_text(ADDED)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, f"{sections.__name__}.added", None)
    monkeypatch.delitem(sys.modules, f"{sections.__name__}.added")
    text = render(make_record())
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings[1:3] == ["Accuracy against cost", "A section more"]
    assert '<a href="#a-section-more">A section more</a>' in text
    assert text.count('id="a-section-more"') == 1
    assert "<bdi>softmax</bdi>: a &lt;note&gt;" in text


class OwnPage(Page):
    """A task's page with a section that needs no template."""

    def sections(self, record, looks):
        return (Section(heading="Of the task", legend=list(looks)[:1], charts=["<svg></svg>"]),)


def test_a_task_s_section_without_a_template_stands_among_the_others(monkeypatch):
    monkeypatch.setattr(part, "page_of", lambda task: OwnPage())
    text = render(make_record())
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings.index("Of the task") == headings.index("How they learned") + 1
    section = text.partition("<h2>Of the task</h2>")[2].partition("</section>")[0]
    assert '<ul class="legend">' in section
    assert "&lt;svg&gt;" in section  # text of a record is escaped, markup of a chart is not


def rows_of(found: ClassesView) -> list[dict[str, Any]]:
    """Return the rows of the table of classes by the keys of its columns."""
    keys = [column.key for column in found.table.columns]
    return [dict(zip(keys, row, strict=True)) for row in found.table.rows]


def test_a_class_s_difference_is_of_the_seeds_that_both_finished():
    record = make_record()
    lose(record, "static_key", 1, "failed", "RuntimeError")
    found = classes_of(typed(record), LOOKS)
    right = {(r["mixer"], r["seed"]): r.get("class_correct") for r in record["runs"]}
    for c, row in zip(found.order, rows_of(found), strict=True):
        base = [right["softmax", s][c] / 36 for s in range(3)]
        kept = [right["static_key", s][c] / 36 for s in (0, 2)]
        assert row["softmax"] == pytest.approx(np.mean(base))
        difference = np.mean(kept) - np.mean([base[0], base[2]])
        assert row["static_key"].value == pytest.approx(difference)
        assert (
            Markup(row["static_key"].text).striptags()
            == f"{points(difference)} {percent(np.mean(kept))}"
        )


def unpacked(record: dict[str, Any], mixer: str) -> Any:
    stored = from_json(PackedMaps, record["attention"]["maps"][mixer], where="it")
    return attention.unpack(stored, 4, 4)


def test_the_largest_difference_comes_first_and_no_control_decides_it():
    found = classes_of(typed(make_record()), LOOKS)
    sizes = [
        max(abs(row[m].value) for m in LOOKS if m not in ("softmax", "identity"))
        for row in rows_of(found)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 0.3


def test_a_class_without_test_images_has_no_accuracy():
    record = make_record()
    record["classes"]["names"].append("empty")
    record["classes"]["test_images"].append(0)
    for run in record["runs"]:
        run["class_correct"].append(0)
    found = classes_of(typed(record), LOOKS)
    row = next(row for row in rows_of(found) if row.pop("class") == "empty")
    assert row.pop("test images") == 0
    assert row.pop("softmax") is None
    assert {cell.value for cell in row.values()} == {None}
    assert {Markup(cell.text).striptags() for cell in row.values()} == {"– –"}


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("classes", [5, 300])
def test_the_chart_has_the_classes_with_the_largest_differences(classes: int):
    rng = np.random.default_rng(0)
    scores = {m: {0: list(rng.random(classes))} for m in ("softmax", "static_key", "key_value")}
    names = [f"c{i}" for i in range(classes)]
    given = ClassScores(score="accuracy", names=names, scores=scores, counts={})
    found = classes_view(given, LOOKS, "softmax")
    assert found.chart is not None
    hints = re.findall(r"<title>(\w+), (c\d+)", found.chart)
    largest = [names[c] for c in found.order[:20]]
    assert {*hints} == {(m, c) for m in ("static_key", "key_value") for c in largest}
    assert len(largest) == min(classes, 20)


def test_packed_maps_come_back_within_a_level():
    weights = made_up_maps(np.random.default_rng(3), heads=5)
    stored = packed_maps(weights)
    back = attention.unpack(from_json(PackedMaps, stored, where="it"), *weights.shape[:2])
    assert back.shape == weights.shape
    np.testing.assert_allclose(back, weights, atol=stored["scale"] / 65535)


def sheet_of(record: dict[str, Any]) -> attention.Sheet:
    opened = typed(record)
    stored = pictured(record).attention
    assert stored is not None
    return attention.sheet(opened, stored)


def test_the_sheet_holds_a_middle_and_the_last_layer():
    assert list(sheet_of(make_record()).layers) == ["Block 2 of 4", "Block 4 of 4"]
    assert re.findall(r">head (\d)<", render(make_record())) == ["1", "2", "3"]


@pytest.mark.parametrize("layers", [[], ["Block 1 of 2", "Block 2 of 2"]])
def test_where_no_mixer_has_a_map_the_section_is_left_out(layers):
    record = make_record()
    record["attention"] |= {"maps": {}, "layers": layers, "missing": {"softmax": "no map"}}
    page = render(record)
    assert "Where they look" not in page
    assert "It holds no picture of the data." in page


def test_under_each_map_stands_what_its_model_answered_and_how_strong_it_is():
    record = make_record()
    answers = [{"text": str(i), "right": i != 2} for i in range(4)]
    record["attention"]["said"] = {"softmax": answers}
    found = sheet_of(record).layers["Block 4 of 4"]
    assert [cell.said.right for cell in found["softmax"] if cell.said] == [True, True, False, True]
    assert [cell.said for cell in found["key_value"]] == [None] * 4
    maps = unpacked(record, "softmax")[:, 3, 0]
    ratios = (maps.max((1, 2)) / maps.mean((1, 2))).tolist()
    shown = [re.search(r"[\d.]+", cell.figures) for cell in found["softmax"]]
    assert [float(each[0]) for each in shown if each] == pytest.approx(ratios, abs=0.01)
    static = render(record).partition('class="maps static"')[2].partition("</section>")[0]
    assert static.count("predicts") == 4 * 2
    assert static.count("✓") == 3 * 2
    assert static.count("wrong: ") == 2


def test_masks_of_tokens_are_shown_as_what_they_are():
    record = make_record()
    record["attention"]["maps"]["key_value"]["kind"] = "mask"
    found = sheet_of(record)
    assert found.masking == ["key_value"]
    assert "key_value" not in found.attending
    assert found.layers["Block 4 of 4"]["key_value"][0].figures.endswith("% pass")
    assert "tokens that pass of key_value" in render(record)


def test_without_pictures_of_the_data_attention_is_left_out_and_numbers_stay():
    record = make_record() | {"images": False, "attention": None}
    page = render(record)
    assert "data:image/" not in page
    assert "It holds no picture of the data: they are left out." in page
    assert "Where they look" not in page
    assert "they could not be read" not in page
    assert "<svg" in page.partition("Do deep layers repeat themselves?")[2]


def test_the_page_says_of_how_many_images_it_has_pictures():
    assert "It holds pictures of 4 test images." in render(make_record())
    record = make_record()
    record["attention"]["images"][3] = dict(record["attention"]["images"][0])
    assert "It holds pictures of 3 test images." in render(record)


def test_long_names_keep_in_charts_what_sets_them_apart():
    labels = ["softmax", *(LONG.format(i) for i in range(3)), "pooling(" + "x" * 80 + ")"]
    short = short_labels(labels)
    assert short["softmax"] == "softmax"
    assert short[LONG.format(2)] == "static_key(…,pos_dim=2,…)"
    assert len(set(short.values())) == len(labels)
    assert all(len(name) < 30 for name in short.values())


def test_mixers_a_stage_keep_the_stages_that_set_them_apart():
    placed = {
        "sep_conv/sep_conv/softmax/softmax": "…/sep_conv/softmax/…",
        "sep_conv/conv_static_key/softmax/softmax": "…/conv_static_key/softmax/…",
        "sep_conv/sep_conv/static_key/softmax": "…/sep_conv/static_key/…",
    }
    assert short_labels([*placed, "softmax"]) == {**placed, "softmax": "softmax"}
    alone = short_labels(["sep_conv/" * 6 + "softmax"])
    assert all(name.endswith("softmax") and len(name) == 27 for name in alone.values())


def test_json_in_the_page_cannot_end_its_element():
    value = {"</script>": ["<!--", "a & b", "\u2028"]}
    text = str(as_element_text(value))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_what_differs_between_environments_is_found():
    record = typed(make_record())
    assert record.differing == ["packages", "machine"]
    assert {seeds for _, seeds in runs.who(record, 1)} == {"seed 1"}


def test_labels_break_within_and_remarks_stay_whole() -> None:
    broken = page.breakable("key_value(head_dim=43) loses here (−1.0 points) <b>")
    assert broken == (
        "key_<wbr>value(<wbr>head_<wbr>dim=<wbr>43) loses here (−1.0 points) &lt;b&gt;"
    )
    assert page.breakable("over the 10,000 test images") == "over the 10,000 test images"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("run `keymix data check`, or <b>", "run <code>keymix data check</code>, or &lt;b&gt;"),
        ("`a<b` and `c`", "<code>a&lt;b</code> and <code>c</code>"),
        ("a lone ` is no quotation", "a lone ` is no quotation"),
    ],
)
def test_quoted_commands_are_set_as_code(text: str, shown: str) -> None:
    assert page.with_code(text) == shown


def test_curves_are_of_the_epochs_that_every_run_has(monkeypatch):
    drawn: list[charts.Line] = []
    monkeypatch.setattr(charts, "curves", lambda ax, lines, **more: drawn.extend(lines))
    record = make_record()
    mixer = record["baseline"]
    own = [run for run in record["runs"] if run["mixer"] == mixer]
    own[0]["history"] = [entry for entry in own[0]["history"] if entry["epoch"] != 2]
    for chart in learning.curves(typed(record), {mixer: LOOKS[mixer]}):
        chart.draw(None)
    wanted = [float(entry["epoch"]) for entry in own[0]["history"]]
    assert [line.xs for line in drawn] == [wanted] * 3
    at = [i for i, entry in enumerate(own[1]["history"]) if entry["epoch"] != 2]
    losses = [[run["history"][i]["val_loss"] for i in range(len(at))] for run in own[:1]]
    losses += [[run["history"][i]["val_loss"] for i in at] for run in own[1:]]
    assert drawn[1].ys == pytest.approx(np.mean(losses, axis=0).tolist())


def test_who_learns_fastest_and_who_ends_highest_are_two_answers() -> None:
    record = make_record()
    record["recipe"]["schedule"] = {"epochs": 12}
    slow, fast = "softmax", "static_key"
    for run in record["runs"]:
        for line in run.get("history") or ():
            early, late = {slow: (0.1, 0.9), fast: (0.8, 0.8)}.get(run["mixer"], (0.05, 0.05))
            line["val_top1"] = early if line["epoch"] <= 4 else late
    early, late, table = learning.leads(typed(record))
    assert (early, late) == (fast, slow)
    assert table is not None
    rows = {row[0]: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows[slow] == ["10.0", "10.0", "90.0"]
    assert rows[fast] == ["80.0", "80.0", "80.0"]
    for run in record["runs"]:
        for line in run.get("history") or ():
            line["val_top1"] = 0.5
    assert learning.leads(typed(record))[:2] == ("all equal", "all equal")
    record["recipe"]["schedule"] = {"epochs": 9}
    assert learning.leads(typed(record)) == ("", "", None)
