# SPDX-License-Identifier: Apache-2.0
"""A study of spikes on its page, in tables and in files: complete, escaped, in the right cells."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from spikes_record import (
    EVIL,
    ROLES,
    firing,
    operation,
    raster,
    result,
    spikes_record,
    study,
)
from test_html import read, words

from keymix.analysis.energy import Bounds
from keymix.report import formats
from keymix.report.tables import Table
from keymix.studies.spikes.result import Spikes, energy_by_part


@pytest.fixture(scope="module")
def page() -> str:
    return spikes_record().html()


def test_tags_nest_and_nothing_is_fetched(page: str) -> None:
    reader = read(page)
    assert reader.open == []
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    assert not re.search(r"url\((?!['\"]?(data:|#))", page)


def test_hostile_names_stay_text(page: str) -> None:
    assert EVIL not in page
    assert EVIL in words(page)
    assert len(read(page).scripts) == 2
    for name, text in spikes_record().files().items():
        assert re.fullmatch(r"[\w.-]+", name)
        if name.endswith(".svg"):
            ET.fromstring(text)


def test_the_page_has_every_figure_and_what_the_numbers_assume(page: str) -> None:
    text = words(page)
    found = spikes_record()
    assert {"energy", "step", "block-q", "raster-qk-1", "image-qk-1"} <= set(found.figures)
    for chart in found.figures.values():
        assert chart.caption in text
    for table in found.tables.values():
        assert (table.title in text) == table.shown
    assert text.count("Random weights") == 1
    for part in ("4.6 pJ", "0.9 pJ", "memory access", "last epoch of runs/qk", "95.0 %"):
        assert part in text


def test_images_that_could_not_be_read_are_on_the_page() -> None:
    found = study("qk")
    found.of = replace(found.of, left_out={"a.png": "a.png is broken"})
    assert "a.png" in words(result(found).html())


def rates(*studies: Spikes) -> Table:
    return result(*studies).tables["rates"]


def test_rates_are_by_stage() -> None:
    table = rates(study("qk"))
    assert table.headings() == ["mixer", "spikes", "stage 1", "stage 2"]
    cells = table.cells()
    assert [row[:2] for row in cells] == [["qk_token", role] for role in ROLES]
    assert cells[2] == ["qk_token", "A_t", "0.0300", "0.0600"]
    assert rates(study("a"), study("b")).headings()[0] == "model"


def test_mixers_have_rows_of_their_own() -> None:
    firings = (
        firing("V", 2, 0.5, mixer="spiking_self"),
        firing("Q", 3, 0.25),
        firing("MLP layer 1", 3, 0.1),
    )
    assert rates(study("qk", firings=firings)).cells() == [
        ["spiking_self", "V", "0.5000", "–"],
        ["qk_token", "Q", "–", "0.2500"],
        ["qk_token", "MLP layer 1", "–", "0.1000"],
    ]


def test_tables_of_files_hold_every_number() -> None:
    made = spikes_record().files()
    names = {name for name in made if name.endswith(".csv")}
    assert names == {
        f"spikes-{k}.csv" for k in ("total", "rates", "steps", "neurons", "operations")
    }

    def rows(name: str) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(str(made[f"spikes-{name}.csv"]))))

    fc1 = next(row for row in rows("operations") if row["path"].endswith("fc1"))
    assert [float(fc1[f"share_{i}"]) for i in range(4)] == [0.5, 0.2, 0.1, 0.1]
    assert float(fc1["share_4_or_more"]) == pytest.approx(0.1)
    assert (fc1["input"], fc1["sops"], fc1["energy_high_pj"]) == (
        "above 1",
        "1000000.0",
        "2300000.0",
    )
    assert [row["step"] for row in rows("steps")] == ["1", "2"] * (15 + 1)
    assert {row["block"] for row in rows("neurons")} == {"", "1", "2"}
    total, other = rows("total")
    assert (total["model"], float(total["ann_ratio"]), total["silent"]) == (
        "qk",
        pytest.approx(27.6 / 3.62),
        "0.25",
    )
    assert other["ann_ratio"] == ""
    shown = [key for key, table in spikes_record().tables.items() if table.shown]
    assert shown == ["total", "rates", "operations"]


def test_energy_is_added_up_by_part() -> None:
    found = energy_by_part(study("qk"))
    assert list(found) == ["stem", "stage 1, embedding", "stage 1, blocks"]
    assert found["stage 1, blocks"] == pytest.approx(Bounds(1.35e6, 1.8e6, 3.2e6))
    more = (
        operation("stages.2.blocks.1.mlp.fc2", "linear", "real"),
        operation("head", "linear", "real"),
    )
    assert list(energy_by_part(study("qk", operations=more))) == ["stage 3, blocks", "head"]


def test_a_raster_is_drawn_of_tokens_and_over_the_image_step_by_step() -> None:
    found = result(study("qk", drawn=(raster(),))).figures
    for name, images, texts in (
        ("raster-qk-1", 0, {"A_t", "K", "X'", "1", "3", "4", "token"}),
        ("image-qk-1", 2, {"step 1: 0 %", "step 2: 50 %"}),
    ):
        assert set(re.findall("<text [^>]*>([^<]*)", found[name].svg)) == texts
        assert found[name].svg.count("<image ") == images
        assert "block 1, head 1 of 2, step 2 of 2" in found[name].caption


def test_energies_have_units() -> None:
    values = (None, 0.0, 3.204, 3204.0, 41.5e6, 1.234e9, 9.99e11)
    assert [formats.energy(v) for v in values] == [
        "–",
        "0.00 pJ",
        "3.20 pJ",
        "3.20 nJ",
        "41.5 µJ",
        "1.23 mJ",
        "999 mJ",
    ]


def answer_of(*studies: Spikes) -> str:
    return result(*studies).answer


def of_energy(label: str, acs: float, kind: str = "binary") -> Spikes:
    """Return a study of one layer with 27.6 µJ without spikes."""
    one = operation("head", "linear", kind, ann=6e6, acs=acs / 0.9, acs_low=acs / 0.9)
    return study(label, operations=(one,))


def test_the_answer_compares_with_the_network_without_spikes() -> None:
    assert answer_of(of_energy("a", 2.7e6)) == (
        "a takes 2.70 µJ per image, 10 times less than the same network without spikes (27.6 µJ)"
    )
    assert answer_of(study("a", images=1)).endswith(", on one image")
    assert "2.0 times more than the same" in answer_of(of_energy("a", 55.2e6))
    assert "as much as the same" in answer_of(of_energy("a", 2e7, "counts"))


def test_the_answer_of_several_models_names_least_and_most() -> None:
    assert answer_of(of_energy("b", 9e6), of_energy("a", 2.7e6)) == (
        "a takes the least energy per image, 2.70 µJ, and b the most, 9.00 µJ"
    )
    assert "take about the same energy" in answer_of(study("a"), study("c"))
    assert answer_of(study("a"), study("c", random=True)).startswith("a takes 3.62 µJ")
