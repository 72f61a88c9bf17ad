# SPDX-License-Identifier: Apache-2.0
"""The report of a task without a page of its own, whose score is an error without a bound."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from own_task import ERRORS, make_number_record, registered
from synthetic import render, typed
from test_html import read, words

from keymix.report.frames import results_table
from keymix.report.part import Page, page_of
from keymix.report.sections.mixers import columns, decision
from keymix.report.words import say


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return make_number_record()


def test_less_of_an_error_is_better(record: dict[str, Any]) -> None:
    directions = {row["mixer"]: row["direction"] for row in record["outcome"]["last"]}
    assert directions == {
        "softmax": None,
        "static_key": "better",
        "key_value": "worse",
        "identity": "worse",
    }
    row = record["outcome"]["last"][3]
    assert row["seeds"]["difference"] > 1  # no bound cuts it
    assert row["images"]["high"] > 1
    results = typed(record)
    assert say("headline", results, results.outcome.last[3]).startswith("identity: +6.5")
    assert " mm against softmax (" in say("headline", results, results.outcome.last[3])


def test_its_page_has_the_shared_sections_alone(record: dict[str, Any]) -> None:
    page = render(record)
    text = words(page)
    assert read(page).open == []
    for heading in (
        "Every mixer against",
        "All costs",
        "How they learned",
        "Where they look",
        "Runs",
    ):
        assert heading in text
    for gone in ("By class", "Most frequent", "McNemar", "What they find", "ccuracy", "points"):
        assert gone not in text
    assert "Mean absolute error against cost" in text
    assert "Down and to the left is better" in text
    assert "Less is better" in text
    assert "test error, mm" in text
    assert "validation loss" not in page
    assert page_of(typed(record).task_kind).scripts == Page.scripts
    payload = json.loads(read(page).scripts[0])
    assert payload["score"]["better"] == "less"
    assert list(payload["runs"][0]["history"]) == ["train_loss", "val_mae"]
    assert "function contrast(a, b)" in page


def test_no_number_of_an_error_is_in_percent(record: dict[str, Any]) -> None:
    table = render(record).partition("after the last epoch</caption>")[2].partition("</table>")[0]
    assert "%" not in re.sub(r"95\u00a0% interval", "", table)
    row = record["outcome"]["last"][0]["mae"]
    assert f"{row['mean']:.3g} " in words(table)
    heads = [column.head for column in columns(typed(record))]
    assert heads == ["test error, mm", "R²", "validation, mm"]
    assert "difference, mm" in decision(typed(record)).headings()


def test_its_numbers_are_in_the_table_of_results(record: dict[str, Any]) -> None:
    rows = results_table(typed(record)).rows
    assert {row[4] for row in rows} == {"mae", "r2"}
    assert {row[0] for row in rows} == set(ERRORS)
