# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze complexity``: tables, files, refusals, and what Ctrl-C leaves."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from keymix.analysis.memory import Peak
from keymix.cli import analyze, console, main
from keymix.studies.complexity import measure as studying
from keymix.studies.study import get_study

SMALL = ("--dim", "12", "--heads", "3", "--at", "4", "--repeats", "1")
FILES = ["ratios", "scaling", "weights"]


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes, and no fresh process."""
    monkeypatch.setattr(studying, "SWEEP", (4, 9))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4,))

    def peaks(builds, size, *, batch_size):
        one = Peak(inference_mib=1.5, training_mib=2.5, note="not measured in this test")
        return dict.fromkeys(builds, one)

    monkeypatch.setattr(studying, "peak_memory", peaks)


def run(*words: str, code: int = 0) -> None:
    assert main(["analyze", "complexity", *SMALL, *words]) == code


def lines(text: str) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        key, *cells = line.split("\t")
        found.setdefault(key, []).append(cells)
    return found


@pytest.mark.slow
def test_a_pipe_gets_every_table_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["softmax", "conv_static_key", "qk_token"]
    run("--tokens", "4,6", "--mixers", ",".join(names))
    out, err = capsys.readouterr()
    found = lines(out)
    assert list(found) == [
        "multiples",
        "scaling",
        "ratio_by_tokens",
        "ratio_by_dim",
        "weights",
    ]
    for header, *rows in found.values():
        assert all(len(row) == len(header) for row in rows)
    header, *rows = found["scaling"]
    assert [(row[1], row[0]) for row in rows] == [(n, m) for n in ("4", "6") for m in names]
    latency = header.index("latency_ms")
    assert all(float(row[latency]) > 0 for row in rows)
    assert [row[0] for row in found["weights"][1:]] == names
    cska = next(row for row in found["scaling"] if row[0] == "conv_static_key")
    assert cska[header.index("macs")] == str(4 * (10 * 4 * 12 + 3 * 144))
    assert "4 tokens: latency" in err
    assert "6 tokens: peak memory" in err


def test_json_is_the_whole_record(capsys: pytest.CaptureFixture[str]) -> None:
    run("--tokens", "6", "--mixers", "mhsa,ska(activation=relu)", "--json", "--batch-size", "2")
    record = json.loads(capsys.readouterr().out)
    assert [entry["label"] for entry in record["mixers"]] == [
        "softmax",
        "static_key(activation=relu)",
    ]
    assert record["setting"]["tokens"] == [6]
    assert record["setting"]["batch_size"] == 2
    assert record["complete"]
    assert record["scaling"][0]["grid"] == [2, 3]
    assert record["command"].startswith("keymix analyze complexity --dim 12")
    assert {"machine", "packages", "threads"} <= set(record["environment"])


@pytest.mark.slow
def test_files_are_written_and_replaced_only_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "cost"
    run("--tokens", "4", "--mixers", "mhsa,ska,random", "--out", str(out))
    mixers = ["softmax", "static_key", "random"]
    assert {p.name for p in out.iterdir() if p.suffix != ".svg"} == {
        *("complexity.html", "complexity.json"),
        *(f"complexity-{key}.csv" for key in FILES),
    }
    assert {"complexity-macs.svg", "complexity-by-dim.svg"} <= {p.name for p in out.iterdir()}
    record = json.loads((out / "complexity.json").read_text())
    with (out / "complexity-scaling.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["mixer"] for row in rows] == mixers
    assert [float(row["latency_ms"]) for row in rows] == [
        row["latency_ms"] for row in record["scaling"]
    ]
    page = (out / "complexity.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    for name in mixers:
        assert f'<th scope="row" data-value="{name}">' in page
    capsys.readouterr()

    run("--tokens", "none", "--out", str(out), code=2)
    assert "add --overwrite" in capsys.readouterr().err
    (out / "mine.txt").write_text("mine")
    run("--tokens", "none", "--mixers", "ska", "--out", str(out), "--overwrite")
    assert not (out / "complexity-scaling.csv").exists()  # of the study before
    assert (out / "mine.txt").read_text() == "mine"
    assert json.loads((out / "complexity.json").read_text())["scaling"] == []


def test_markdown_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    run("--tokens", "none", "--mixers", "mhsa", "--markdown")
    text = capsys.readouterr().out
    assert "SKA Table 7, read off the operations\n\n| mixer | weights shared over" in text
    assert "| softmax | no | – | 2 | 0 |" in text
    assert all(len(part.splitlines()) > 2 for part in text.split("\n\n")[1::2])


def test_a_terminal_gets_drawn_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console.out, "_force_terminal", True)
    monkeypatch.setattr(console.err, "_force_terminal", True)
    monkeypatch.setattr(console.out, "width", 200)
    run("--tokens", "4", "--mixers", "mhsa,random")
    out = capsys.readouterr().out
    assert "SKA Table 7, read off the operations" in out
    assert "Latency of one image and peak memory" in out
    assert "────" in out
    assert "\t" not in out


def test_ctrl_c_keeps_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = studying.measure_interleaved

    def stop_at_six(models: Any, size: Any, **how: Any) -> Any:
        if size[0] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return measured(models, size, **how)

    monkeypatch.setattr(studying, "measure_interleaved", stop_at_six)
    out = tmp_path / "cost"
    run("--tokens", "4,6,9", "--mixers", "mhsa,ska", "--out", str(out), code=130)
    record = json.loads((out / "complexity.json").read_text())
    assert {row["tokens"] for row in record["scaling"]} == {4}
    assert not record["complete"]
    assert "Stopped early." in (out / "complexity.html").read_text()
    text = capsys.readouterr().err.splitlines()[-1]
    assert text == (
        f"keymix: stopped by SIGINT: {str(out)!r} has what was measured; the same "
        "command with --overwrite does all"
    )


def test_ctrl_c_before_anything_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        studying, "_counted", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or None
    )
    run("--tokens", "4", "--out", str(tmp_path / "cost"), code=143)
    assert "nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "cost").exists()


def test_a_folder_that_cannot_be_made_is_reported_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(studying, "_counted", lambda *_: pytest.fail("work was begun"))
    run("--tokens", "4", "--out", str(tmp_path / "file" / "cost"), code=2)
    assert "cannot write" in capsys.readouterr().err


def test_numbers_of_tokens_may_have_an_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    run("--tokens", "none", "--mixers", "mhsa", "--at", "1e4", "--json")
    assert json.loads(capsys.readouterr().out)["setting"]["at"] == 10_000


def test_a_mixer_of_ones_own_enters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "picky.py"
    file.write_text(
        "from keymix import TokenMixer, Traits, UserError, register_mixer\n"
        "@register_mixer('picky_for_analyze')\n"
        "class Picky(TokenMixer):\n"
        "    traits = Traits(maskable=False, permutation='positional')\n"
        "    def __init__(self, site):\n"
        "        if site.grid != (2, 2):\n"
        "            raise UserError('wants four tokens')\n"
        "        super().__init__(site)\n"
        "    def forward(self, x, grid=None, bias=None):\n"
        "        return x.flip(-2)\n"
    )
    run("--tokens", "4,6", "--import", str(file), "--mixers", "picky_for_analyze")
    found = lines(capsys.readouterr().out)
    four, six = found["scaling"][1:]
    assert float(four[4]) > 0
    assert six[4] == ""
    assert ["picky_for_analyze", "6 tokens", "wants four tokens"] in found["missing"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["complexity", "--mixers", "sofmax"], "Did you mean 'softmax'"),
        (["complexity", "--tokens", "4,x"], "--tokens: '4,x': give numbers"),
        (["complexity", "--tokens", "0"], "--tokens: '0': give numbers from 1"),
        (["complexity", "--tokens", ","], "--tokens: ','"),
        (["complexity", "--dim", "ten"], "argument --dim: 'ten' is no whole number"),
        (["complexity", "--at", "1.5"], "argument --at: '1.5' is no whole number"),
        (["complexity", "--dim", "10", "--heads", "3"], "dim=10 does not divide"),
        (["complexity", "--repeats", "-1"], "repeats=-1"),
        (["complexity", "--json", "--markdown"], "exclude each other"),
        (["complexity", "--device", "teapot"], "device 'teapot'"),
        (["complexity", "--frobnicate"], "unknown option '--frobnicate'"),
        (["complexity", "words"], "unexpected 'words'"),
        (["complexity", "--out", "file"], "--out 'file' is a file"),
        (["complexity", "--out", "full"], "is not empty"),
        (["complexity", "--out", "full", "--overwrite"], "is not empty"),
        (["complexty"], "unknown analysis 'complexty'. Did you mean 'complexity'?"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full", "mine.txt").write_text("mine")
    assert main(["analyze", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("keymix: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "full", "mine.txt"]


def test_a_disk_that_refuses_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    run("--tokens", "none", "--mixers", "ska", "--out", str(tmp_path / "file" / "cost"), code=2)
    assert "cannot write" in capsys.readouterr().err


def test_help_reports_every_option_and_analysis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--help"]) == 0
    text = capsys.readouterr().out
    study = get_study("complexity")
    for action in analyze.parser(study)._actions:
        if action.dest != "help":
            assert action.option_strings[-1] in text
    assert study.summary in text
