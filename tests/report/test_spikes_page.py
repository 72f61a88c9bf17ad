# SPDX-License-Identifier: Apache-2.0
"""A study of spikes on its page, in tables and in files: complete, escaped, in the right cells."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET

import pytest
from spikes_record import (
    EVIL,
    ROLES,
    render,
    spikes_record,
    study,
    typed,
    typed_raster,
    typed_study,
)
from test_html import read, words

from keymix.analysis.spikes_record import Part, part_of, parts
from keymix.report import formats
from keymix.studies.spikes.charts import of_tokens, on_image
from keymix.studies.spikes.tables import headline, rates_of


@pytest.fixture(scope="module")
def page() -> str:
    return render(spikes_record())


def test_tags_nest_and_nothing_is_fetched(page: str) -> None:
    reader = read(page)
    assert reader.open == []
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    assert not re.search(r"url\((?!['\"]?(data:|#))", page)


def test_hostile_names_stay_text(page: str) -> None:
    assert EVIL not in page
    assert EVIL in words(page)
    assert len(read(page).scripts) == 2
    for name, text in typed(spikes_record()).files().items():
        assert re.fullmatch(r"[\w.-]+", name)
        if name.endswith(".svg"):
            ET.fromstring(text)


def test_the_headline_is_first_with_its_notes(page: str) -> None:
    text = words(page)
    for part in ("0.1250 spikes per neuron and step", "Note on qk.", "Random weights."):
        assert text.index(part) < text.index("Firing rates")
    assert text.count("Random weights.") == 1
    for part in ("4.6 pJ, an addition (AC) 0.9 pJ", "Memory access is not counted", "In qk stem"):
        assert part in text


def test_the_headline_has_bounds_and_the_ann_counterpart_unless_there_is_no_ratio() -> None:
    text = headline(typed_study(study("qk")))
    assert "2.70 µJ (between 1.70 µJ and 4.10 µJ)" in text
    assert text.endswith("27.6 µJ: 10.2 times as much.")
    even = study("qk", energy={"low": 2.0, "middle": 2.0, "high": 2.0})
    assert "between" not in headline(typed_study(even))
    dead = {**study("qk")["ann"], "ratio": None}
    assert "times as much" not in headline(typed_study(study("qk", ann=dead)))


def test_rates_are_by_stage_next_to_the_papers() -> None:
    table = rates_of(typed_study(study("qk")), several=False)
    assert table.headings() == [
        "spikes",
        "stage 1, qk_token",
        "paper, stage 1",
        "stage 2, qk_token",
        "paper, stage 2",
    ]
    assert [row[0] for row in table.rows] == list(ROLES)
    assert table.cells()[2] == ["A_t", "0.0300", "0.1200", "0.0600", "0.2200"]


def test_other_mixers_and_stages_have_no_figures_of_the_paper() -> None:
    entries = [
        {"mixer": "spiking_self", "stage": 2, "rates": {"V": 0.5}},
        {"mixer": "qk_token", "stage": 3, "rates": {"Q": 0.25, "MLP layer 1": 0.1}},
    ]
    table = rates_of(typed_study(study("qk", table=entries)), several=True)
    assert table.headings() == ["spikes", "stage 2, spiking_self", "stage 3, qk_token"]
    assert table.cells() == [
        ["V", "0.5000", "–"],
        ["Q", "–", "0.2500"],
        ["MLP layer 1", "–", "0.1000"],
    ]
    assert table.title.startswith("qk: firing rates")


def test_the_papers_network_is_named_with_its_figures() -> None:
    record, note = spikes_record(), "QKFormer HST-10-768, trained"
    assert note in render(record)
    entries = [{"mixer": "spiking_self", "stage": 1, "rates": {"V": 0.5}}]
    assert note not in render({**record, "studies": [study("qk", table=entries)]})


def test_tables_of_files_hold_every_number() -> None:
    made = typed(spikes_record()).files()
    names = {name for name in made if name.endswith(".csv")}
    assert names == {
        f"spikes-{k}.csv" for k in ("total", "rates", "steps", "neurons", "operations")
    }
    rows = list(csv.DictReader(io.StringIO(made["spikes-operations.csv"])))
    fc1 = next(row for row in rows if row["path"].endswith("fc1"))
    assert [float(fc1[f"share_{i}"]) for i in range(4)] == [0.5, 0.2, 0.1, 0.1]
    assert float(fc1["share_4_or_more"]) == pytest.approx(0.1)
    assert (fc1["input"], fc1["sops"], fc1["energy_high_pj"]) == (
        "above 1",
        "1000000.0",
        "2300000.0",
    )
    steps = list(csv.DictReader(io.StringIO(made["spikes-steps.csv"])))
    assert len(steps) == 2 * (15 + 1)
    (total, _) = csv.DictReader(io.StringIO(made["spikes-total.csv"]))
    assert (total["model"], total["ann_ratio"], total["silent"]) == ("qk", "10.22", "0.25")
    assert [key for key, table in typed(spikes_record()).tables.items() if table.shown] == [
        "total",
        "rates_by_stage-qk",
    ]


def test_energy_is_added_up_by_part() -> None:
    found = {part.name: part for part in parts(typed_study(study("qk")))}
    assert list(found) == ["stem", "embedding 1", "blocks 1"]
    assert found["blocks 1"] == Part("blocks 1", low=8e5, middle=1.8e6, high=3.2e6)
    assert part_of("stages.2.blocks.1.mlp.fc2") == "blocks 3"
    assert part_of("head") == "head"


def test_a_raster_is_drawn_of_tokens_and_over_the_image_step_by_step() -> None:
    found = typed_raster()
    photo = spikes_record()["studies"][0]["photo"]
    for chart, images, texts in (
        (of_tokens(found), 0, {"A_t", "K", "X'", "1", "3", "4", "token"}),
        (on_image(found, photo), 2, {"step 1: 0 %", "step 2: 50 %"}),
        (on_image(found, None), 0, {"step 1: 0 %", "step 2: 50 %"}),
    ):
        assert set(re.findall("<text [^>]*>([^<]*)", chart.svg)) == texts
        assert chart.svg.count("<image ") == images
        assert "block 1, head 1 of 2, step 2 of 2" in chart.caption


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


def answer_of(*studies: dict) -> str:
    return typed(spikes_record() | {"studies": list(studies)}).answer


def bounds(low: float, middle: float, high: float) -> dict:
    return {"low": low, "middle": middle, "high": high}


def test_the_answer_compares_with_the_network_without_spikes() -> None:
    assert answer_of(study("a")) == (
        "a takes 2.70 µJ per image, 10 times less than the same network without spikes"
    )
    assert answer_of(study("a", images=1)).endswith(", on one image")
    dear = answer_of(study("a", energy=bounds(5.4e7, 5.52e7, 6e7)))
    assert "2.0 times more than the same" in dear
    assert "within what is certain" in answer_of(study("a", energy=bounds(1e7, 2e7, 3e7)))


def test_the_answer_says_when_the_energy_means_nothing() -> None:
    assert answer_of(study("a", random=True)).startswith("Random weights: spikes and energy of a")
    hardly = study("a", ann={"macs": 6e6, "energy": 2.76e7, "ratio": None})
    assert answer_of(hardly).startswith("a hardly fires: the energy says nothing")
    assert answer_of(study("a", varies=False)).startswith("a answers all images alike: ")
    assert answer_of(study("a", at_chance=True)).startswith("a is no better than chance: ")


def test_the_answer_of_several_models_names_least_and_most() -> None:
    dear = study("b", energy=bounds(8e6, 9e6, 9e6))
    assert answer_of(dear, study("a")) == (
        "a takes the least energy per image, 2.70 µJ, and b the most, 9.00 µJ"
    )
    assert "take about the same energy" in answer_of(study("a"), study("c"))
    assert answer_of(study("a"), study("c", random=True)).startswith("a takes 2.70 µJ")
