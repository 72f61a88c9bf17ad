# SPDX-License-Identifier: Apache-2.0
"""The tables on the page of costs are what the command counts."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from documents import DOCS, table
from test_docs_pages import own_mixers

from each import together
from keymix import complexity
from keymix.analysis.mixer_alone import SizedMixer
from keymix.report.tables import Table
from keymix.studies.complexity import measure as studying
from keymix.studies.complexity.result import RatioPoint

PAGE = (DOCS / "analyze.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    """The benchmark that prints the tables."""
    benchmarks = DOCS.parent / "benchmarks"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(benchmarks))
        yield runpy.run_path(str(benchmarks / "paper_costs.py"))


@pytest.fixture(scope="module")
def counted(script: dict[str, Any]) -> dict[str, Table]:
    """The tables of counts, of keymix's own mixers, without the curves, which the page draws not.

    Formulas and orders are counted at all sizes of the figure, as the page says.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studying, "ratio_point", counted_at_the_ends(studying.ratio_point))
        study = complexity(own_mixers(), tokens=())
        return {table.key: table for table in script["tables"](study)}


def counted_at_the_ends(count: Callable[..., RatioPoint]) -> Callable[..., RatioPoint]:
    """Count only at the fewest and the most tokens, off which the table of weights is read."""

    def point(mixer: SizedMixer, tokens: int, dim: int) -> RatioPoint:
        if tokens in (studying.SWEEP[0], studying.SWEEP[-1]):
            return count(mixer, tokens, dim)
        return RatioPoint(mixer=mixer.label, tokens=tokens, dim=dim)

    return point


@pytest.mark.slow
@together
@pytest.mark.parametrize("key", ["formulas", "weights", "key_value", "orders"])
def test_the_page_holds_what_is_counted(key: str, counted: dict[str, Table]) -> None:
    after = PAGE.partition(f"<!-- {key}: python benchmarks/paper_costs.py -->\n\n")[2]
    assert after.startswith(counted[key].markdown() + "\n")


def test_every_mixer_was_measured() -> None:
    after = PAGE.partition("<!-- multiples")[2]
    result = {line.split("|")[1].strip() for line in after.splitlines() if line.startswith("| ")}
    assert result >= set(own_mixers())


def test_memory_of_table_8_is_that_next_to_which_memory_is_printed(script: dict[str, Any]) -> None:
    rows = table(PAGE, "memory: python benchmarks/paper_costs.py --sides 10,20,50,100,150,200 -->")
    assert len(rows) == 6
    for row in rows:
        printed = [float(cell.replace(",", "")) for cell in row[7:]]
        assert printed == pytest.approx(script["TABLE_8"][int(row[0])], rel=6e-3), row[0]
