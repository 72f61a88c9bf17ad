# SPDX-License-Identifier: Apache-2.0
"""Records of comparisons open, whichever version wrote them, and are written as they were."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from masks_record import make_mask_record
from synthetic import make_record, typed

from keymix.errors import UserError
from keymix.records import to_json
from keymix.report.record import CostRow, opened

STORED = sorted((Path(__file__).parents[2] / "docs/results").glob("*/results.json"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_published_records_of_both_formats_open(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    found = to_json(opened(values, where=path.name))
    if "margin" in values:  # of a version with degrees of certainty
        of_today, of_then = found["recipe"], values["recipe"]
        for part in ("augment", "schedule"):  # fields that recipes have got since, as they are off
            since = {
                name: of_today[part].pop(name)
                for name in [*of_today[part]]
                if name not in of_then[part]
            }
            assert not any(any(each) if isinstance(each, list) else each for each in since.values())
        assert {key: found[key] for key in values} == values
        return
    for mixer in found["mixers"]:
        assert mixer.pop("reference") is False  # of versions that had none
    for which in ("last", "best"):
        for row, was in zip(found["outcome"][which], values["outcome"][which], strict=True):
            assert row.pop("degree") is None is row.pop("interval")
            was.pop("verdict")
            kept = {key: row[key] for key in was if key not in ("seeds", "images")}
            assert kept == {key: was[key] for key in kept}
    grown = ["recipe", "data", "outcome"]  # by fields that recipes and data have got since
    if values["format"] == 1:
        grown += ["format", "runs", "attention", "collapse", "measured"]
    assert {key: found[key] for key in values if key not in grown} == {
        key: values[key] for key in values if key not in grown
    }


def test_formats_one_and_two_are_among_them() -> None:
    formats = {json.loads(path.read_text(encoding="utf-8"))["format"] for path in STORED}
    assert formats == {1, 2}


@pytest.mark.parametrize("make", [make_record, make_mask_record])
def test_a_record_is_written_as_it_was_read(make: Callable[[], dict[str, Any]]) -> None:
    once = to_json(typed(make()))
    assert to_json(typed(json.loads(json.dumps(once)))) == once
    absent = {make_record: {"task", "gallery", "test_cases"}, make_mask_record: {"confusions"}}
    assert not absent[make] & once.keys()


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    r"runs\[0\]\.last\.test": lambda r: r["runs"][0]["last"].update(test=5),
    r"outcome\.last\[1\]\.seeds\.low": lambda r: r["outcome"]["last"][1]["seeds"].update(low="x"),
    r"attention\.maps": lambda r: r["attention"].update(maps=5),
    "'baseline'": lambda r: r.pop("baseline"),
}


@pytest.mark.parametrize("key", DAMAGE)
def test_damage_is_named_by_file_and_key(key: str) -> None:
    values = make_record()
    DAMAGE[key](values)
    with pytest.raises(UserError, match=rf"results\.json.*{key}"):
        opened(values, where="'results.json'")


def test_a_cost_that_is_not_finite_is_refused() -> None:
    row = to_json(CostRow.unknown(3, note=""))
    with pytest.raises(UserError, match="latency_ms"):
        CostRow(**row | {"latency_ms": math.inf})


@pytest.mark.slow
def test_a_page_needs_no_torch() -> None:
    code = "import sys, keymix.report.comparison; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
