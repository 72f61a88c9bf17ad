# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison of masks in a browser: looks, and two runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PHONE, WIDE, complaints, find, look, requests, texts, visit
from masks_record import make_mask_record, shares
from synthetic import render

pytestmark = pytest.mark.slow

WIDTHS = "return [document.documentElement.scrollWidth, innerWidth]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("masks") / "masks.html"
    path.write_text(render(make_mask_record()), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (PHONE, True)])
def test_it_is_offline_silent_and_no_wider_than_its_window(driver, page, width, dark):
    visit(driver, page, width=width, dark=dark)
    assert driver.execute_script(WIDTHS) == [width, width]
    assert requests(driver, page) == []
    assert complaints(driver) == []
    look(driver, width=718, media="print")
    driver.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert driver.execute_script(WIDTHS) == [718, 718]


def test_predictions_lie_on_their_images(driver, page):
    for width, columns in ((WIDE, 5), (PHONE, 2)):
        visit(driver, page, width=width)
        boxes = driver.execute_script(
            "return [...document.querySelectorAll('#masks .scenes .cell')].map((cell) => {"
            "const [a, b] = [cell, cell.querySelector('img') ?? cell].map((e) =>"
            " e.getBoundingClientRect());"
            "return [a.left, a.width - b.width, a.height - b.height, a.width / a.height,"
            " getComputedStyle(cell).backgroundImage.startsWith('url(\"data:image/')]})"
        )
        assert len(boxes) == 6 * 5
        assert len({round(box[0]) for box in boxes}) == columns
        for _, wider, higher, shape, image in boxes:
            assert wider == pytest.approx(0, abs=0.1)
            assert higher == pytest.approx(0, abs=0.1)
            assert shape == pytest.approx(1, abs=0.02)
            assert image


def test_two_runs_are_compared_image_by_image(driver, page):
    record = make_mask_record()
    of = {(run["mixer"], run["seed"]): run for run in record["runs"]}
    visit(driver, page)
    a, b = of["softmax", 0], of["key_value", 0]
    first, second = shares(a["shares"]), shares(b["shares"])
    lead = find(driver, "#pair-result .lead").text
    assert f"{a['last']['test']['jaccard'] * 100:.1f}" in lead
    better, worse = int((second > first).sum()), int((second < first).sum())
    assert f"better on {better} of 120, worse on {worse} and equally on" in lead
    most = abs(second - first).argsort()[::-1][0]
    row = texts(driver, "#pair-images tbody tr:first-child > *")
    assert row[0] == f"slice_{most:04d}"
    assert row[1:3] == [f"{first[most] * 100:.1f}", f"{second[most] * 100:.1f}"]
    assert len(texts(driver, "#pair-classes tbody tr")) == 3
    assert len(driver.find_elements("css selector", "#pair-result svg")) == 3
    find(driver, "#pair-swap").click()
    swapped = texts(driver, "#pair-images tbody tr:first-child > *")
    assert swapped[1:3] == row[2:0:-1]
    assert complaints(driver) == []


def test_attention_names_the_slice_and_no_class(driver, page):
    visit(driver, page)
    find(driver, "#map-mixer option:nth-of-type(2)").click()
    assert "Name case0_day20_slice_0070, row 0" in texts(driver, "#map-stage p")
    assert "class" not in find(driver, "#attention .plain .cell").get_attribute("aria-label")


SHOWN = (
    "const seen = (e) => getComputedStyle(e).display !== 'none';"
    "return [...new Set([...document.querySelectorAll('#masks .layer, #masks ul.legend')]"
    ".filter(seen).map((e) => [...e.classList].find((name) => name.startsWith('of-'))))]"
)


def test_masks_outlines_and_errors_take_turns_and_masks_are_printed(driver, page):
    visit(driver, page)
    assert driver.execute_script(SHOWN) == ["of-masks"]
    for layer in ("outlines", "errors"):
        find(driver, f"#masks [value={layer}]").click()
        assert driver.execute_script(SHOWN) == [f"of-{layer}"]
    look(driver, media="print")
    assert driver.execute_script(SHOWN) == ["of-masks"]
    assert not find(driver, "#masks .slider").is_displayed()


def test_a_divider_moves_between_two_mixers_over_one_picture(driver, page):
    visit(driver, page)
    shown = (
        "const [a, b] = document.querySelectorAll('#masks .picture .cell');"
        "return [a.ariaLabel, b.ariaLabel, getComputedStyle(b).clipPath,"
        " a.getBoundingClientRect().width, b.getBoundingClientRect().width]"
    )
    left, right, clip, *widths = driver.execute_script(shown)
    assert left.startswith("case0_day20_slice_0060, softmax: ")
    assert right.startswith("case0_day20_slice_0060, key_value")
    assert clip == "inset(0px 0px 0px 50%)"
    assert widths[0] == pytest.approx(widths[1], abs=0.1)
    assert widths[0] > 300
    slider = find(driver, "#masks .slider input")
    slider.send_keys("\ue012" * 10)  # arrow to the left
    assert driver.execute_script(shown)[2] == "inset(0px 0px 0px 40%)"
    box = slider.rect
    drag = "const s = arguments[0]; s.value = 80; s.dispatchEvent(new Event('input'))"
    driver.execute_script(drag, slider)
    assert driver.execute_script(shown)[2] == "inset(0px 0px 0px 80%)"
    assert box["width"] == pytest.approx(widths[0], abs=0.5)
    for i, (option, expected) in enumerate((("case35", "case35"), ("identity", "identity"))):
        select = driver.find_elements("css selector", "#masks .slider select")[i]
        next(o for o in select.find_elements("css selector", "option") if option in o.text).click()
        assert expected in driver.execute_script(shown)[0]
    assert complaints(driver) == []
