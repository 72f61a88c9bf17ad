# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze memory`` prints its table, writes its files, and refuses in one line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

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


def test_files_are_written_and_replaced_only_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "memory"
    assert main(["analyze", "memory", "--sides", "10", "--out", str(out), "--order", "linear"]) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        *("memory-peak.svg", "memory-rows.csv", "memory.html", "memory.json")
    ]
    record = json.loads((out / "memory.json").read_text())
    assert record["complete"]
    assert record["order"] == "linear"
    assert record["command"].startswith("keymix analyze memory --sides 10")
    with (out / "memory-rows.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["mib"]) for row in rows] == [row["mib"] for row in record["rows"]]
    page = (out / "memory.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count('<svg role="img"') == 1
    assert "in the order “linear”" in page
    capsys.readouterr()
    run("--out", str(out), code=2)
    assert "add --overwrite" in capsys.readouterr().err
    run("--dim", "8", "--out", str(out), "--overwrite", "--json")
    assert json.loads(capsys.readouterr().out)["dim"] == 8


def test_markdown_has_a_title_and_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "memory", "--sides", "10", "--markdown"]) == 0
    title, _, header, _, row = capsys.readouterr().out.splitlines()[:5]
    assert title == "Peak memory of attention alone, C = 256, 1 head, float32"
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert float(cells["spiking_self, MiB"]) > 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--sides", "none"), "--sides: 'none'"),
        (("--sides", "0,2"), "--sides: '0,2'"),
        (("--sides", "1-100000000"), "give numbers from 1 with commas"),
        (("--sides", "4-8:0"), "--sides: '4-8:0'"),
        (("--sides", "8-4"), "--sides: '8-4'"),
        (("--mixers", "pooling"), "'pooling' has no attention of its own"),
        (("--json", "--markdown"), "exclude each other"),
        (("--device", "nonsense"), "nonsense"),
    ],
)
def test_mistakes_end_in_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    run(*words, code=2)
    err = capsys.readouterr().err
    assert why in err
    assert len(err.splitlines()) == 1
