# SPDX-License-Identifier: Apache-2.0
"""What the documents print of a paper's tables is what the code has of them."""

from __future__ import annotations

import pytest
from documents import DOCS, table

from keymix.studies.memory.growth import TABLE_8


def test_memory_of_table_8_is_that_beside_which_memory_is_reported() -> None:
    rows = table((DOCS / "analyze.md").read_text(encoding="utf-8"), "memory -->")
    assert len(rows) >= 6
    for row in rows:
        lines = [float(row[at].replace(",", "")) for at in (5, 6, 9)]
        assert lines == pytest.approx(TABLE_8[int(row[0])], rel=6e-3), row[0]
