# SPDX-License-Identifier: Apache-2.0
"""Tables and sentences fit a terminal, and nothing in them is cut."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from keymix.cli.console import wrapped
from keymix.report.tables import Cell, Column, Table

NAMES = ("softmax", "conv_static_key", "static_key(activation=relu,per_head=true)/softmax/softmax")
HEADS = {"accuracy %": 0, "interval": 0, "ms": 1, "params": 2, "a further score %": 6}
CELLS = ("97.1 ± 0.8", "−10.0 to −1.3", "0.774", "71.5 k", "12.3")


def lines(width: int, names: tuple[str, ...] = NAMES) -> list[str]:
    columns = [Column("mixer", "mixer")]
    columns += [Column(head, head, "count", gives_way=rank) for head, rank in HEADS.items()]
    table = Table("", "What it is", columns, [[name, *CELLS] for name in names])
    return table.text(width).splitlines()


@pytest.mark.parametrize("width", [36, 40, 60, 80, 100, 140])
def test_no_name_and_no_number_is_cut(width: int) -> None:
    found = lines(width)
    assert max(map(cell_len, found)) <= width
    rows = found[found.index(next(line for line in found if "─" in line)) + 1 :]
    assert all(name in "".join(row[:57].split("  ")[0] for row in rows) for name in NAMES)
    shown = [cell for cell in CELLS if cell in "\n".join(found)]
    assert len(shown) >= 1
    for cell in shown:
        assert len(re.findall(rf"(?<!\S){re.escape(cell)}(?!\S)", "\n".join(rows))) == len(NAMES)


def test_columns_give_way_by_importance_and_are_named() -> None:
    texts = [" ".join(lines(width, NAMES[:2])) for width in range(100, 44, -1)]
    found = dict.fromkeys(text.partition(" columns: ")[2] for text in texts)
    assert list(found) == [
        "",
        "a further score %",
        "params · a further score %",
        "ms · params · a further score %",
    ]


def test_words_wrap_between_words_and_keep_their_column() -> None:
    says = "a sentence that is longer than what is left of the line for it"
    columns = (Column("rule", "rule"), Column("n", "n", "whole"), Column("what", "what"))
    table = Table("", "", columns, [("shapes", 3, says), ("grads", 41, "ok")])
    found = table.text(40).splitlines()
    assert max(map(len, found)) <= 40
    column = found[0].index("what")
    assert " ".join(line[column:].strip() for line in found[2:-1]) == says
    assert found[-1] == "grads   41  ok"


def test_wide_characters_count_twice() -> None:
    rows = [["注意", "1.00"], ["attn", "2.00"]]
    columns = (Column("name", "name"), Column("s", "s", "ms"))
    table = Table("", "", columns, [[name, Cell(0, cell)] for name, cell in rows])
    assert len({cell_len(line) for line in table.text(40).splitlines()}) == 1


def test_a_word_wider_than_the_terminal_stays_whole() -> None:
    assert wrapped("see /a/very/long/path.html for it", 12, hang="  ") == [
        "see",
        "  /a/very/long/path.html",
        "  for it",
    ]
