# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze memory`` prints its table, writes its files, and refuses in one line."""

from __future__ import annotations

import pytest

from keymix.cli import main

SMALL = ("analyze", "memory", "--sides", "2,4-8:2")


def run(*words: str, code: int = 0) -> None:
    assert main([*SMALL, *words]) == code


def test_a_pipe_gets_a_line_a_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    run("--dim", "16")
    out, err = capsys.readouterr()
    header, *rows = (line.split("\t") for line in out.splitlines())
    assert header == ["side", "tokens", "qk_token_mib", "spiking_self_mib", "spiking_self_ratio"]
    assert [row[:2] for row in rows] == [[str(side), str(side * side)] for side in (2, 4, 6, 8)]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])
    assert "sqrt(N) = 8: spiking_self" in err


def test_markdown_has_a_title_and_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "memory", "--sides", "10", "--markdown"]) == 0
    title, _, header, _, row = capsys.readouterr().out.splitlines()[:5]
    assert title == "Peak memory of attention alone, C = 256, 1 head, float32"
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert float(cells["spiking_self, MiB"]) > 0
