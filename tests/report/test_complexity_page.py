# SPDX-License-Identifier: Apache-2.0
"""A study of cost on its page and in its tables: complete, escaped, numbers in place."""

from __future__ import annotations

import csv
import io
import re

import pytest
from cost_record import CONTROLS, EVIL, MIXERS, SWEEP, TOKENS, cost_record, render, typed
from test_html import read, words

from keymix.analysis.timing import WORDS
from keymix.report.tables import Table


@pytest.fixture(scope="module")
def page() -> str:
    return render(cost_record())


def by_key(record: dict) -> dict[str, Table]:
    return typed(record).tables


def test_tags_nest_and_nothing_is_fetched(page: str) -> None:
    reader = read(page)
    assert reader.open == []
    assert all(address.startswith(("data:", "#")) for address in reader.addresses)
    assert not re.search(r"url\((?!['\"]?(data:|#))", page)


def test_the_page_holds_every_mixer_in_every_table(page: str) -> None:
    parts = [part.partition("</details>")[0] for part in page.split('<details class="part">')[1:]]
    everywhere = [p for p in parts if "<table" in p and "Could not be built" not in p]
    assert len(everywhere) == 5
    for part in everywhere:
        cells = {" ".join(cell.split()) for cell in read(part.replace("<wbr>", "")).text}
        left_out = CONTROLS if "Fig. 4" in part else ()
        assert cells >= set(MIXERS) - set(left_out)


def test_hostile_names_stay_text(page: str) -> None:
    assert EVIL not in page
    assert EVIL in words(page)
    assert len(read(page).scripts) == 2


def test_what_was_not_measured_is_named_with_the_reason(page: str) -> None:
    assert f"{EVIL} (784 tokens)" in words(page)
    assert f"would need {EVIL}" in words(page)
    early = cost_record() | {"complete": False}
    assert "Stopped early." in words(render(early))
    assert "Stopped early." not in words(page)


def test_a_study_without_measurements_has_no_charts_of_them() -> None:
    page = render(cost_record() | {"scaling": []})
    assert "Latency" not in words(page)
    assert page.count('role="img"') == 3


def test_charts_name_every_curve_but_those_of_controls_far_below(page: str) -> None:
    charts = re.findall(r'<svg role="img".*?</svg>', page, re.DOTALL)
    assert len(charts) == 6
    latency, ratio = charts[1], charts[2]
    assert "Multiply-adds per parameter against tokens N" in ratio
    assert len(set(re.findall("<title>([^<]*)", latency))) == len(MIXERS) - 1
    assert "identity" not in latency
    assert len(set(re.findall("<title>([^<]*)", ratio))) == len(MIXERS) - len(CONTROLS)


def answer_of(*found: tuple[str, int], **more: object) -> str:
    """The answer of mixers and their multiply-adds at 196 tokens."""
    record = cost_record() | {"scaling": []}
    domain = more.pop("domain", "dense")
    record["mixers"] = [
        {"label": m, "name": m, "domain": domain, "control": m in CONTROLS, "reason": None}
        for m, _ in found
    ]
    record["setting"] = record["setting"] | {"at": 196}
    blank = cost_record()["by_tokens"][0]
    record["by_tokens"] = [blank | {"mixer": m, "tokens": 196, "macs": n} for m, n in found]
    if "verdict" in more:
        measured = cost_record()["scaling"][0] | {"tokens": 196, "latency_verdict": more["verdict"]}
        record["scaling"] = [
            measured | {"mixer": m, "macs": n, "latency_ratio": 0.8} for m, n in found
        ]
    return typed(record).answer


def test_the_answer_compares_with_softmax() -> None:
    pair = ("softmax", 1000), ("static_key", 890)
    text = "static_key needs 11 % fewer multiply-adds than softmax at 196 tokens"
    assert answer_of(*pair) == text
    assert answer_of(*pair, verdict="different") == f"{text}, and takes 20 % less time"
    for verdict in ("busy", "not distinguishable", "too few rounds"):
        assert answer_of(*pair, verdict=verdict) == f"{text}; time: {WORDS[verdict]}"
    assert answer_of(("softmax", 1000), ("a", 1000)).startswith("a needs as many multiply-adds")
    assert "12 % more" in answer_of(("softmax", 1000), ("a", 1120))


def test_the_answer_of_several_mixers_leaves_controls_out() -> None:
    found = answer_of(("softmax", 1000), ("a", 900), ("b", 800), ("pooling", 1))
    text = "20 % fewer multiply-adds than softmax at 196 tokens, the fewest of 3 mixers"
    assert found == f"b needs {text}"
    assert answer_of(("softmax", 1000), ("a", 800), ("b", 800)) == f"a and b need {text}"
    worse = answer_of(("softmax", 1000), ("a", 1100), ("b", 1200))
    assert worse.startswith("a needs 10 % more multiply-adds than softmax")


def test_the_answer_without_softmax_names_least_and_most() -> None:
    assert answer_of(("a", 2000)) == "a needs 2,000 multiply-adds at 196 tokens"
    assert "b the most, 3,000" in answer_of(("a", 2000), ("b", 3000), domain="spiking")
    assert answer_of(("pooling", 10)) == "No mixer could be counted"


def test_tables_hold_values_for_people_and_for_files() -> None:
    made = by_key(cost_record())
    scaling = made["scaling"]
    assert len(scaling.rows) == len(MIXERS) * len(TOKENS)
    first = dict(zip(scaling.headings(), scaling.cells()[0], strict=True))
    assert (first["tokens"], first["grid"], first["latency, ms"]) == ("49", "7x7", "0.490")
    assert first["quartiles"] == "0.441–0.539"
    lost = [row for row in scaling.cells() if row[0] == EVIL][-1]
    assert lost[4:] == ["–"] * 6


def test_the_pivot_has_a_column_a_size_and_leaves_out_mixers_without_ratio() -> None:
    made = by_key(cost_record())["ratio_by_tokens"]
    assert made.headings() == ["mixer", *(f"N = {n}" for n in SWEEP)]
    assert [row[0] for row in made.rows] == [m for m in MIXERS if m not in CONTROLS]
    assert not made.saved


def test_it_says_over_how_many_steps_spiking_mixers_are_counted() -> None:
    record = cost_record()
    assert not typed(record).notes
    record["mixers"][2]["domain"] = "spiking"
    made = by_key(record)
    assert any("T = 4 time steps" in note for note in typed(record).notes)
    assert "T = 4 time steps" in words(render(record))
    for key in ("ratios", "scaling"):
        rows = csv.DictReader(io.StringIO(made[key].csv()))
        steps = {row["mixer"].lstrip("'"): row["time_steps"] for row in rows}
        assert steps["key_value"] == "4"
        assert {n for mixer, n in steps.items() if mixer != "key_value"} == {"1"}


def test_csv_has_all_that_was_measured_and_is_safe() -> None:
    record = cost_record()
    for row in record["scaling"]:
        row["mixer"] = row["mixer"].replace("conv_static_key", "=1+1")
    rows = list(csv.DictReader(io.StringIO(by_key(record)["scaling"].csv())))
    assert rows[0]["mixer"] == "'=1+1"
    assert float(rows[0]["latency_q3_ms"]) == pytest.approx(0.49 * 1.1)
    assert {"params", "activation_bytes", "peak_note", "reason"} <= set(rows[0])
    assert "quartiles" not in rows[0]
    ratios = by_key(record)["ratios"]
    assert not ratios.shown
    assert len(ratios.rows) == 2 * len(MIXERS) * len(SWEEP)


def test_markdown_is_a_table() -> None:
    record = cost_record()
    record["weights"][0]["mixer"] = "a|b"
    lines = by_key(record)["weights"].markdown().splitlines()
    assert lines[1].startswith("| --- | --- | --- | --: |")
    assert lines[2].startswith("| a\\|b | no | 3x3 | 2 | 256 |")
    assert len(lines) == 2 + len(MIXERS)


def test_multiples_of_softmax_have_a_column_a_size() -> None:
    table = by_key(cost_record())["multiples"]
    wanted = [f"{what}, N = {n}" for what in ("latency", "memory") for n in TOKENS]
    assert table.headings() == ["mixer", *wanted]
    softmax = next(row for row in table.cells() if row[0] == "softmax")
    assert softmax[1:] == ["1.00"] * 6
    lost = next(row for row in table.cells() if row[0] == EVIL)
    assert lost[3] == lost[6] == "–"
    assert "(2.94, 11.8, 47.0 ms; 14.7, 58.8, 235 MiB)" in table.title
