# SPDX-License-Identifier: Apache-2.0
"""What the documents print of a paper's tables is what the code has of them."""

from __future__ import annotations

from documents import DOCS, table

from keymix.analysis.spikes import TABLE7


def test_firing_rates_of_table_7_are_those_beside_which_rates_are_reported() -> None:
    rows = table((DOCS / "spikes.md").read_text(encoding="utf-8"), "firing-table")
    printed = {row[0]: (row[2], row[4]) for row in rows if row[2] != "–"}
    assert printed == {role: tuple(f"{r:.4f}" for r in rates) for role, rates in TABLE7.items()}
