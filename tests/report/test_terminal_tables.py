# SPDX-License-Identifier: Apache-2.0
"""Tables and sentences fit a terminal, and nothing in them is cut."""

from __future__ import annotations

import re

import pytest

from keymix.report.tables import Cell, Column, Table
from keymix.report.terminal import cell_len, wrapped

NAMES = ("softmax", "conv_static_key", "static_key(activation=relu,per_head=true)/softmax/softmax")
HEADS = {"accuracy %": 0, "interval": 0, "ms": 1, "params": 2, "a further score %": 6}
CELLS = ("97.1 ± 0.8", "−10.0 to −1.3", "0.774", "71.5 k", "12.3")


def table(names: tuple[str, ...] = NAMES) -> Table:
    columns = [Column("mixer", "mixer")]
    columns += [Column(head, head, "count", gives_way=rank) for head, rank in HEADS.items()]
    return Table("", "What it is", columns, [[name, *CELLS] for name in names])


def lines(width: int, names: tuple[str, ...] = NAMES) -> list[str]:
    return table(names).drawn(width).plain.splitlines()


@pytest.mark.parametrize("width", [36, 40, 60, 80, 100, 140])
def test_no_name_and_no_number_is_cut(width: int) -> None:
    found = lines(width)
    assert max(map(cell_len, found)) <= max(width, len(NAMES[2]))
    text = "\n".join(found)
    assert all(name in text for name in NAMES)
    shown = [cell for cell in CELLS if cell in text]
    assert len(shown) >= 2
    for cell in shown:
        assert len(re.findall(rf"(?<!\S){re.escape(cell)}(?!\S)", text)) == len(NAMES)


def test_columns_give_way_by_importance_and_are_named() -> None:
    short = NAMES[:2]
    texts = [" ".join(lines(width, short)) for width in range(100, 38, -1)]
    found = dict.fromkeys(text.partition(" columns: ")[2] for text in texts)
    assert list(found) == [
        "",
        "a further score %",
        "params · a further score %",
        "ms · params · a further score %",
    ]


def test_the_column_of_names_shrinks_before_what_never_gives_way() -> None:
    found = lines(37, NAMES[:2])
    at = found.index("conv_static_key")
    assert found[at + 1].split() == ["97.1", "±", "0.8", "−10.0", "to", "−1.3"]
    assert found[at + 1].startswith(" ")


def test_a_long_name_has_a_line_above_its_row_and_short_ones_do_not() -> None:
    found = lines(80)
    at = found.index(NAMES[2])
    assert found[at + 1].startswith("   ")
    assert "97.1 ± 0.8" in found[at + 1]
    assert any(line.startswith("conv_static_key  ") and "0.774" in line for line in found)


def test_everything_stands_on_one_line_where_there_is_room() -> None:
    found = lines(200)
    assert found[-1].startswith(NAMES[2])
    assert found[-1].endswith("12.3")
    assert "not shown" not in "".join(found)


def test_words_wrap_between_words_and_keep_their_column() -> None:
    says = "a sentence that is longer than what is left of the line for it"
    columns = (Column("rule", "rule"), Column("n", "n", "whole"), Column("what", "what"))
    drawn = Table("", "", columns, [("shapes", 3, says), ("grads", 41, "ok")]).drawn(40)
    found = drawn.plain.splitlines()
    assert max(map(len, found)) <= 40
    column = found[0].index("what")
    assert " ".join(line[column:].strip() for line in found[2:-1]) == says
    assert found[-1] == "grads   41  ok"


def test_wide_characters_count_twice() -> None:
    rows = [["注意", "1.00"], ["attn", "2.00"]]
    columns = (Column("name", "name"), Column("s", "s", "ms"))
    drawn = Table("", "", columns, [[name, Cell(0, cell)] for name, cell in rows]).drawn(40)
    assert len({cell_len(line) for line in drawn.plain.splitlines()}) == 1


def test_a_word_wider_than_the_terminal_stays_whole() -> None:
    assert wrapped("see /a/very/long/path.html for it", 12, hang="  ") == [
        "see",
        "  /a/very/long/path.html",
        "  for it",
    ]
