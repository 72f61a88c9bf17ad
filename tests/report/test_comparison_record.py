# SPDX-License-Identifier: Apache-2.0
"""Records of comparisons open, and are written as they were read."""

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
from keymix.report.record import FORMAT, CostRow, opened

PUBLISHED = Path(__file__).parents[2] / "docs/results/cifar10-20-epochs/results.json"


def test_a_published_record_is_written_as_it_was_read() -> None:
    values = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert to_json(opened(values, where="it")) == values


@pytest.mark.parametrize("number", [2, 99, None])
def test_a_record_of_another_format_names_both_numbers(number: int | None) -> None:
    with pytest.raises(UserError, match=rf"it has .*{number or 'no format'}.* format {FORMAT}"):
        opened(make_record() | {"format": number}, where="it")


@pytest.mark.parametrize("make", [make_record, make_mask_record])
def test_a_record_is_written_as_it_was_read(make: Callable[[], dict[str, Any]]) -> None:
    once = to_json(typed(make()))
    assert to_json(typed(json.loads(json.dumps(once)))) == once
    absent = {make_record: {"galleries", "test_cases"}, make_mask_record: {"confusions"}}
    assert not absent[make] & once.keys()


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    r"runs\[0\]\.last\.test": lambda r: r["runs"][0]["last"].update(test=5),
    r"outcome\.last\[1\]\.seeds\.low": lambda r: r["outcome"]["last"][1]["seeds"].update(low="x"),
    "'baseline'": lambda r: r.pop("baseline"),
}


@pytest.mark.parametrize("key", DAMAGE)
def test_damage_is_named_by_file_and_key(key: str) -> None:
    values = make_record()
    DAMAGE[key](values)
    with pytest.raises(UserError, match=rf"results\.json.*{key}"):
        opened(values, where="'results.json'")


def test_a_cost_that_is_not_finite_is_refused() -> None:
    row = to_json(CostRow(params=3))
    with pytest.raises(UserError, match="latency_ms"):
        CostRow(**row | {"latency_ms": math.inf})


@pytest.mark.slow
def test_a_page_needs_no_torch() -> None:
    code = "import sys, keymix.report.comparison_page; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
