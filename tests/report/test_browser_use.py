# SPDX-License-Identifier: Apache-2.0
"""What a reader does with the page: sorts, filters, picks maps, compares runs, by keys alone."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from browser import (
    PHONE,
    WIDE,
    complaints,
    find,
    focused,
    look,
    press,
    texts,
    visit,
    wait_until,
)
from scipy.stats import binomtest
from synthetic import ACCURACY, LONG, crowded_record, lose, make_record, packed, render

from keymix.records import from_json
from keymix.report.pictures import FULL, OPACITY
from keymix.report.record import PackedMaps
from keymix.report.sections.attention import unpack

pytestmark = pytest.mark.slow  # all of them together

TAB, ENTER, SPACE = "\ue004", "\ue007", " "
LEFT, UP, RIGHT, DOWN = "\ue012", "\ue013", "\ue014", "\ue015"


def column(driver: Any, table: str, number: int) -> list[str]:
    return texts(driver, f"{table} tbody tr > :nth-child({number})")


def choose(driver: Any, select: str, value: object) -> None:
    find(driver, f'{select} option[value="{value}"]').click()


def test_a_table_sorts_by_number_and_the_third_press_restores_it(driver, pages):
    visit(driver, pages["holes"])
    table = "#runs .sortable"
    listed = column(driver, table, 1)
    head = find(driver, f"{table} thead th:nth-child(4)")
    button = head.find_element("css selector", "button")
    cells = column(driver, table, 4)
    known = [float(v) for v in cells if v != "–"]
    assert len(known) == 14

    button.click()
    assert head.get_attribute("aria-sort") == "descending"
    now = column(driver, table, 4)
    assert [float(v) for v in now[:14]] == sorted(known, reverse=True)
    assert now[14:] == ["–"] * 4
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    now = column(driver, table, 4)
    assert [float(v) for v in now[:14]] == sorted(known)
    assert now[14:] == ["–"] * 4
    button.click()
    assert head.get_attribute("aria-sort") is None
    assert column(driver, table, 1) == listed


UNFOLD = "for (const d of document.querySelectorAll('details')) d.open = true"


def test_numbers_sort_by_size_and_not_by_their_digits(driver, pages):
    visit(driver, pages["plain"])
    costs = make_record()["costs"]
    driver.execute_script(UNFOLD)
    for key, number in (("params", 2), ("macs", 3), ("latency_ms", 5), ("peak_mib", 8)):
        find(driver, f".t-costs thead th:nth-child({number}) button").click()
        shown = [t.split(" ")[0] for t in texts(driver, ".t-costs tbody th bdi")]
        assert shown == sorted(ACCURACY, key=lambda m: costs[m][key])


def test_sorting_works_by_key_and_keeps_the_focus(driver, pages):
    visit(driver, pages["plain"])
    head = find(driver, ".t-decision thead th")
    driver.execute_script("arguments[0].focus()", head.find_element("css selector", "button"))
    press(driver, ENTER)
    assert head.get_attribute("aria-sort") == "ascending"
    names = texts(driver, ".t-decision tbody th bdi")
    assert names == sorted(ACCURACY)
    press(driver, SPACE)
    assert head.get_attribute("aria-sort") == "descending"
    assert focused(driver).text.startswith("mixer")


def test_on_a_phone_a_select_sorts_the_cards(driver, pages):
    visit(driver, pages["plain"], width=PHONE)
    driver.execute_script(UNFOLD)
    assert not find(driver, "thead").is_displayed()
    select = find(driver, ".sort-by:has(+ .scroll .t-costs) select")
    assert select.is_displayed()
    choose(driver, ".sort-by:has(+ .scroll .t-costs) select", "6 descending")
    costs = make_record()["costs"]
    driver.execute_script(UNFOLD)
    names = texts(driver, ".t-costs tbody th bdi")
    assert names == sorted(ACCURACY, key=lambda m: -costs[m]["images_per_s"])
    choose(driver, ".sort-by:has(+ .scroll .t-costs) select", "")
    assert texts(driver, ".t-costs tbody th bdi") == list(ACCURACY)


def test_hundreds_of_classes_come_twenty_at_a_time_and_can_be_found(driver, pages):
    visit(driver, pages["crowded"], width=PHONE)
    classes = crowded_record()["classes"]["names"]
    rows = ".by-class tbody tr > th"
    assert len(texts(driver, rows)) == 20
    assert find(driver, "#class-count").text == "200 classes, 20 shown."
    find(driver, "#class-all").click()
    assert sorted(texts(driver, rows)) == sorted(name.strip() for name in classes)
    find(driver, "#class-all").click()
    assert len(texts(driver, rows)) == 20
    find(driver, "#class-filter").send_keys("CLASS 17")
    wanted = [name.strip() for name in classes if "class 17" in name]
    assert sorted(texts(driver, rows)) == sorted(wanted)
    assert find(driver, "#class-count").text == f"{len(wanted)} found of 200 classes."
    assert not find(driver, "#class-all").is_displayed()


def test_classes_sort_by_each_mixer_s_difference(driver, pages):
    record = crowded_record()
    visit(driver, pages["crowded"])
    runs = {r["mixer"]: np.array(r["class_correct"]) for r in record["runs"] if "correct" in r}
    best = runs[LONG.format(8)] - runs["softmax"]
    number = 3 + list(runs).index(LONG.format(8))  # class, images, softmax, the others
    first = find(driver, ".by-class tbody tr").get_attribute("data-number")
    ranked = [runs[m] - runs["softmax"] for m in runs if m not in ("softmax", "identity")]
    assert int(first) == int(np.abs(ranked).max(0).argmax())
    find(driver, f".by-class thead th:nth-child({number}) button").click()
    top = [
        int(e.get_attribute("data-number"))
        for e in driver.find_elements("css selector", ".by-class tbody tr")
    ]
    assert best[top].tolist() == sorted(best.tolist(), reverse=True)
    choose(driver, ".sort-here select", "original")
    shown = driver.find_elements("css selector", ".by-class tbody tr:not([hidden])")
    assert [int(e.get_attribute("data-number")) for e in shown] == list(range(20))


ALPHA = """
const c = document.querySelector("#map-stage canvas");
const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
return [c.width, c.height, [...d].filter((_, i) => i % 4 === 3)];
"""


@pytest.mark.parametrize(
    ("mixer", "image", "layer", "head"),
    [("static_key", 2, 1, 3), ("key_value", 3, 0, 1)],
)
def test_the_picker_draws_the_map_that_was_asked_for(driver, pages, mixer, image, layer, head):
    visit(driver, pages["plain"])
    stored = make_record()["attention"]["maps"][mixer]
    weights = unpack(from_json(PackedMaps, stored, where="it"), 4, 4)[image, layer, head]
    choose(driver, "#map-mixer", mixer)
    choose(driver, "#map-layer", layer)
    choose(driver, "#map-head", head)
    find(driver, f'input[name=map-image][value="{image}"]').click()
    width, height, alpha = driver.execute_script(ALPHA)
    assert [height, width] == stored["grid"]
    span = weights.max() - weights.min()
    expected = np.round(OPACITY * (weights - weights.min()) / span)
    np.testing.assert_allclose(alpha, expected.ravel(), atol=1)
    assert not texts(driver, "#map-shared")
    driver.execute_script("document.getElementById('map-scale').focus()")
    press(driver, DOWN)
    assert focused(driver).get_property("value") == "shared"
    assert len(texts(driver, "#map-shared")) == 1
    *_, alpha = driver.execute_script(ALPHA)
    expected = np.round(OPACITY * np.clip(weights / (FULL * weights.mean()), 0, 1))
    np.testing.assert_allclose(alpha, expected.ravel(), atol=1)
    assert complaints(driver) == []
    row, place = np.unravel_index(weights.argmax(), weights.shape)
    readout = find(driver, "#map-stage .readout").text
    assert f"in row {row + 1}, column {place + 1};" in readout
    assert f"Strongest patch {weights.max() * 100:.1f}" in readout


def test_beneath_each_map_stands_the_answer_of_its_model(driver, pages):
    visit(driver, pages["plain"])
    find(driver, 'input[name=map-image][value="2"]').click()
    answers = texts(driver, "#map-stage .said")
    asked = [label for label in ACCURACY if label != "identity"]
    expected = [
        f"{'✓right' if k == 1 else '✗wrong'}: predicts {(2 * k) % 10}"
        for k in range(1, len(asked) + 1)
    ]
    assert answers == expected
    visit(driver, pages["holes"])  # of a record without answers
    assert texts(driver, "#map-stage .said") == []


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_the_gallery_has_its_texts_next_to_images_of_a_useful_size(driver, pages, width):
    visit(driver, pages["plain"], width=width)
    cards = driver.find_elements("css selector", ".cards > li")
    assert len(cards) == 8 + 7
    first = cards[1]
    assert first.find_element("css selector", "img").size["width"] >= 100
    words = first.find_element("css selector", ".words")
    assert words.size["width"] >= 150
    camps = texts(driver, "#disagreements .cards > li:nth-child(2) .camp .said")
    assert camps[:5] == ["✓right: 1", "✗wrong: 2", "✗wrong: 3", "✗wrong: 4", "✗wrong: 5"]


def test_all_mixers_stand_side_by_side_and_missing_ones_say_why(driver, pages):
    visit(driver, pages["holes"])
    assert texts(driver, "#map-stage h3") == list(ACCURACY)
    assert len(driver.find_elements("css selector", "#map-stage canvas")) == 4
    why = texts(driver, "#map-stage .why")
    assert why == ["no run finished", "identity mixes no tokens, so it has no attention map"]


def test_the_arrow_keys_step_through_layers_heads_and_images(driver, pages):
    visit(driver, pages["plain"])
    seen = {driver.execute_script("return arguments[0].toDataURL()", find(driver, "canvas"))}
    driver.execute_script("document.getElementById('map-stage').focus()")
    for keys, layer, head in ((LEFT, 2, 0), (DOWN, 2, 1), (DOWN, 2, 2), (UP, 2, 1), (RIGHT, 3, 1)):
        press(driver, keys)
        assert find(driver, "#map-layer").get_property("value") == str(layer)
        assert find(driver, "#map-head").get_property("value") == str(head)
        seen.add(driver.execute_script("return arguments[0].toDataURL()", find(driver, "canvas")))
    press(driver, RIGHT)  # there is no layer further
    assert find(driver, "#map-layer").get_property("value") == "3"
    assert len(seen) == 5  # one of them twice
    driver.execute_script("document.querySelector('input[name=map-image]').focus()")
    press(driver, RIGHT, RIGHT)
    assert find(driver, "input[name=map-image]:checked").get_attribute("value") == "2"
    driver.execute_script("document.getElementById('map-layer').focus()")
    press(driver, UP)
    assert find(driver, "#map-layer").get_property("value") == "2"


def bits(run: dict[str, Any], images: int) -> np.ndarray:
    packed_bits = np.frombuffer(base64.b64decode(run["correct"]), dtype=np.uint8)
    return np.unpackbits(packed_bits)[:images].astype(bool)


@pytest.mark.parametrize(
    ("only_a", "only_b", "images"),
    [(0, 0, 13), (3, 11, 361), (900, 2600, 10_000)],
)
def test_two_runs_compare_as_scipy_says(driver, tmp_path, only_a, only_b, images):
    record = make_record(seeds=2, images=images)
    a, b = (next(r for r in record["runs"] if r["mixer"] == m) for m in ("softmax", "key_value"))
    answers = np.random.default_rng(1).permutation(np.arange(images))
    first, second = np.ones(images, bool), np.ones(images, bool)
    second[answers[:only_a]] = False
    first[answers[only_a : only_a + only_b]] = False
    neither = answers[-2:]
    first[neither] = second[neither] = False
    for run, correct in ((a, first), (b, second)):
        run["correct"] = packed(correct)
    page = tmp_path / "pair.html"
    page.write_text(render(record), encoding="utf-8")
    visit(driver, page)
    choose(driver, "#pair-b", record["runs"].index(b))
    shown = [
        int(e.get_attribute("data-value"))
        for e in driver.find_elements("css selector", "#pair-agreement td:nth-child(2)")
    ]
    assert shown == [int((first & second).sum()), only_a, only_b, 2]
    p = float(find(driver, "#pair-p").get_attribute("value"))
    disputed = only_a + only_b
    expected = binomtest(only_a, disputed).pvalue if disputed else 1.0
    assert p == pytest.approx(expected, rel=1e-9)


def test_two_runs_show_their_accuracies_classes_curves_and_environments(driver, pages):
    record = make_record()
    visit(driver, pages["plain"])
    a, b = 1, len(record["runs"]) - 3  # softmax at seed 1, identity at seed 0
    choose(driver, "#pair-a", a)
    choose(driver, "#pair-b", b)
    first, second = record["runs"][a], record["runs"][b]
    lead = find(driver, "#pair-result .lead").text
    for run in (first, second):
        assert f"{run['last']['test']['top1'] * 100:.1f}" in lead
    both = bits(first, 360) & bits(second, 360)
    assert texts(driver, "#pair-agreement tr[data-kind=both] td")[0] == str(both.sum())
    gaps = np.array(second["class_correct"]) - np.array(first["class_correct"])
    order = np.argsort(-np.abs(gaps), kind="stable")
    wrong = [i for i in order if gaps[i]]
    assert texts(driver, "#pair-classes tbody th") == [str(i) for i in wrong]
    assert (
        texts(driver, "#pair-classes tbody td:last-child")[0] == f"−{-gaps[order[0]] / 36:.1%}"[:-1]
    )
    assert len(driver.find_elements("css selector", "#pair-result svg .curve.run-a")) == 3
    assert len(driver.find_elements("css selector", "#pair-result svg .curve.run-b")) == 3
    environments = find(driver, "#pair-result dl").text
    assert "A 16 cores" in environments
    assert "B 2 cores" in environments
    find(driver, "#pair-swap").click()
    assert find(driver, "#pair-a").get_property("value") == str(b)
    assert "A 2 cores" in find(driver, "#pair-result dl").text


def test_runs_that_did_not_finish_cannot_be_chosen(driver, pages):
    visit(driver, pages["holes"])
    options = driver.find_elements("css selector", "#pair-b option:disabled")
    words = [
        o.get_property("textContent").replace("\u2068", "").replace("\u2069", "") for o in options
    ]
    assert words == [
        "re_attention, seed 2 (failed)",
        *(f"key_value, seed {seed} (not finished)" for seed in range(3)),
    ]
    assert complaints(driver) == []


TITLES_ON_TICKS = """
return [...document.querySelectorAll("svg")].filter((svg) => {
  const title = svg.querySelector(".title[transform]")?.getBoundingClientRect();
  const ticks = [...svg.querySelectorAll('.tick[text-anchor="end"]')];
  return title && ticks.some((tick) => tick.getBoundingClientRect().left < title.right);
}).map((svg) => svg.getAttribute("aria-label"));
"""


def test_one_epoch_and_one_pair_of_runs_draw(driver, tmp_path):
    record = make_record(seeds=1, accuracy={"softmax": 0.9, "static_key": 0.9, "identity": 0.4})
    lose(record, "identity", 0, "missing", "it was not started")
    for i, run in enumerate(record["runs"]):
        run["history"] = run.get("history", [])[:1]
        for entry in run["history"]:
            entry["train_loss"] = 2.3148 + 0.0002 * i  # tick labels of six characters
    page = tmp_path / "short.html"
    page.write_text(render(record), encoding="utf-8")
    visit(driver, page)
    drawn = driver.find_elements("css selector", "#pair-result svg .dot")
    assert len(drawn) == 6
    assert all(dot.rect["width"] > 6 for dot in drawn)
    assert not any("NaN" in dot.get_attribute("cx") for dot in drawn)
    assert driver.execute_script(TITLES_ON_TICKS) == []
    assert complaints(driver) == []


CONTROLS = """
return [...document.querySelectorAll("a[href], button, select, input, summary, [tabindex='0']")]
  .filter((e) => e.checkVisibility() && !e.disabled && !(e.type === "radio" && !e.checked));
"""


def test_the_tab_key_reaches_every_control_in_reading_order(driver, pages):
    visit(driver, pages["crowded"], width=WIDE)
    controls = driver.execute_script(CONTROLS)
    assert len(controls) > 45
    reached = []
    for _ in range(len(controls)):
        press(driver, TAB)
        reached.append(focused(driver))
    assert reached == controls


def test_buttons_and_selects_do_their_work_by_key(driver, pages):
    visit(driver, pages["crowded"])

    def on(selector: str, *keys: str) -> None:
        driver.execute_script("arguments[0].focus()", find(driver, selector))
        press(driver, *keys)

    on("#theme", SPACE)
    assert find(driver, "html").get_attribute("data-theme") == "dark"
    on("#theme", ENTER)
    assert find(driver, "html").get_attribute("data-theme") == "light"
    on("#class-all", ENTER)
    assert len(texts(driver, ".by-class tbody tr")) == 200
    on("#class-filter", "c", "l", "a", "s", "s", SPACE, "7")
    assert len(texts(driver, ".by-class tbody tr")) == 11  # 7 and 70 to 79
    on(".sort-here select", DOWN)
    assert find(driver, ".sort-here select").get_property("value") == "original"
    on("#map-mixer", DOWN)
    assert texts(driver, "#map-stage h3") == ["softmax", "test image"]
    before = find(driver, "#pair-result .lead").text
    on("#pair-a", DOWN)
    changed = find(driver, "#pair-result .lead").text
    assert changed != before
    on("#pair-swap", SPACE)
    assert find(driver, "#pair-result .lead").text not in (before, changed)
    summary = "section:nth-of-type(2) summary"
    on(summary, ENTER)
    assert find(driver, "section:nth-of-type(2) details").get_property("open")


def test_the_navigation_leads_to_every_section_and_marks_where_one_is(driver, pages):
    visit(driver, pages["plain"])
    links = driver.find_elements("css selector", ".contents a")
    assert len(links) > 5
    for link in links:
        name = link.get_attribute("href").partition("#")[2]
        assert driver.execute_script("return document.getElementById(arguments[0])", name)
    driver.execute_script("arguments[0].click()", links[1])
    wait_until(driver, "return document.querySelector('.contents [aria-current]')?.textContent")
    assert texts(driver, ".contents [aria-current]") == [links[1].text]


def test_one_cost_is_drawn_at_a_time_and_all_without_scripts(driver, pages):
    visit(driver, pages["plain"])
    shown = "return [...document.querySelectorAll('#costs figure')].map((f) => f.checkVisibility())"
    assert driver.execute_script(shown).count(True) == 1
    choose(driver, "#cost-axis", "2")
    assert driver.execute_script(shown).index(True) == 2
    look(driver, width=718, media="print")
    assert all(driver.execute_script(shown))


def test_a_chart_is_saved_with_its_colours_and_a_table_is_copied(driver, pages):
    visit(driver, pages["plain"])
    driver.execute_script(
        "window.saved = []; URL.createObjectURL = (blob) => { blob.text().then((text) =>"
        " window.saved.push([blob.type, text])); return 'data:,'; };"
        "HTMLAnchorElement.prototype.click = () => {};"
        "document.execCommand = () => { window.copied = document.activeElement.value;"
        " return true; };"
        "Object.defineProperty(window, 'isSecureContext', { value: false });"
    )
    find(driver, "#costs figure:not(.other) .save").click()
    wait_until(driver, "return window.saved.length")
    kind, text = driver.execute_script("return window.saved[0]")
    assert kind == "image/svg+xml"
    root = ET.fromstring(text)
    assert "softmax" in "".join(root.itertext())
    assert "#1c2026" in text  # the baseline's ink on light paper
    assert "var(" not in text
    find(driver, "button.copy[data-text^='|']").click()
    wait_until(driver, "return window.copied")
    assert "| softmax |" in driver.execute_script("return window.copied")
