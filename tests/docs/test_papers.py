# SPDX-License-Identifier: Apache-2.0
"""What docs/papers.md prints next to the papers' figures is counted again, of long tables a part.

tests/models/test_counts_* count our models, tests/analysis how a count is made.
"""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from documents import DOCS, table

from costs import cost, cost_of, params
from placements import PLACEMENTS, WITHOUT_QUERIES

pytestmark = pytest.mark.slow  # all of them together

PAPERS = (DOCS / "papers.md").read_text(encoding="utf-8")


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def code(cell: str) -> str:
    return cell.strip("`")


@pytest.mark.parametrize(
    "row",
    [*table(PAPERS, "count-table"), *table(PAPERS, "small-table")],
    ids=lambda row: code(row[1]),
)
def test_small_models_are_what_count_says(row: list[str]) -> None:
    found = cost(code(row[1]))
    assert (number(row[3]), number(row[5])) == (found.params, found.flops)


def test_placements_are_what_the_models_count() -> None:
    for name, counted in (("placement-table", PLACEMENTS), ("noq-table", WITHOUT_QUERIES)):
        printed = {
            tuple(code(row[1]).split("/")): (number(row[2]), row[3], number(row[4]), row[5])
            for row in table(PAPERS, name)
        }
        assert printed == counted


@pytest.mark.parametrize(
    "row",
    [*table(PAPERS, "macs-table")[::3], *table(PAPERS, "setr-table")[::3]],
    ids=lambda row: code(row[0]),
)
def test_deep_models_are_what_count_says(row: list[str]) -> None:
    found = cost(code(row[0]))
    assert (number(row[3]), number(row[5])) == (found.params, found.macs)


NOTES: dict[str, dict[str, Any]] = {  # what the notes under the table say
    "": {},
    "[1]": {"num_classes": 100},
    "[2]": {"num_classes": 100, "mixer": ["qk_channel", "qk_channel", "spiking_self"]},
    "[3]": {"num_classes": 100, "mixer": ["qk_token", "qk_token", "qk_channel"]},
    "[4]": {"num_classes": 11},
    "[5]": {"stem_pool": "before"},
    "[6]": {
        "mixer": "spike_driven",
        "num_heads": 8,
        "mixer_options": {"talking_heads": True},
    },
}
NOTES["[7]"] = {"depth": 2, "embed_dim": 512, "qkv_bias": False, **NOTES["[6]"]}


@pytest.mark.parametrize("row", table(PAPERS, "spiking-table"), ids=lambda row: row[0])
def test_spiking_models_are_what_is_built(row: list[str]) -> None:
    name, _, note = row[4].partition(" ")
    found = params(code(name), **NOTES[note])
    assert number(row[5]) == found
    printed = float(row[3].removesuffix("M")) * 1e6
    assert found == pytest.approx(printed, rel=0.007)


def test_the_size_of_spikformer_with_the_other_stem_is_that() -> None:
    found = params("spikformer_4_384", stem="peds", num_classes=100)
    assert f"{found:,} parameters" in PAPERS


@pytest.mark.parametrize("row", table(PAPERS, "quoted-table")[::4], ids=lambda row: row[0])
def test_quoted_models_are_what_count_says(row: list[str]) -> None:
    with torch.device("meta"):
        model = timm.create_model(code(row[2]))
    found = cost_of(model)
    times = 2 if "FLOPs" in row[6] else 1
    assert number(row[4]) == found.params
    assert row[6].split("G")[0] == f"{times * found.macs / 1e9:.1f}"


def test_our_parameters_are_near_the_papers() -> None:
    tables = ("count-table", "small-table", "macs-table", "setr-table")
    rows = [row for name in tables for row in table(PAPERS, name) if row[2]]  # the paper prints one
    assert len(rows) > 30
    for _, _, printed, ours, *_ in rows:
        wanted = float(printed.removesuffix("M")) * 1e6
        explained = printed in ("8.15M", "26.8M")  # without its classifier; keys, not logits
        assert number(ours) == pytest.approx(wanted, rel=0.05 if explained else 0.02), printed
