# SPDX-License-Identifier: Apache-2.0
"""The tables on the page of costs are what the command counts."""

from __future__ import annotations

import runpy

import pytest
from documents import DOCS
from test_docs_pages import own_mixers

from each import together
from keymix import complexity
from keymix.report.tables import Table
from keymix.studies.complexity import measure as studying

PAGE = (DOCS / "analyze.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def counted() -> dict[str, Table]:
    """The tables of counts, of keymix's own mixers, without the curves, which the page draws not.

    Formulas and orders are counted at all sizes of the figure, as the page says.
    """
    benchmarks = DOCS.parent / "benchmarks"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(benchmarks))
        script = runpy.run_path(str(benchmarks / "paper_costs.py"))
        patch.setattr(studying, "ratio_points", lambda ledger, candidate, sites: [])
        study = complexity(own_mixers(), tokens=())
        return {table.key: table for table in script["tables"](study)}


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
