# SPDX-License-Identifier: Apache-2.0
"""The benchmark of resolutions trains, scores at every size under both policies, and reports."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from keymix.errors import UserError
from keymix.train.runs import evaluate

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "resolutions.py"


@pytest.mark.slow
def test_the_benchmark_scores_every_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = runpy.run_path(str(SCRIPT))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- resolutions -->\nold\n<!-- /resolutions -->\nafter\n")
    words = ["--data", "digits", "--out", str(tmp_path / "out"), "--side", "8", "--depth", "1"]
    words += ["--limit", "60", "--test-images", "40", "--epochs", "1", "--workers", "0"]
    words += ["--mixers", "softmax,kv(pos_dim=4)", "--sizes", "8", "12", "8x12"]
    assert bench["main"]([*words, "--markdown", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| mixer | `resize` | **8** | 12 | 8x12 |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:2] for row in rows] == [
        ["`softmax`", "–"],
        ["`key_value(pos_dim=4)`", "`interpolate`"],
        ["`key_value(pos_dim=4)`", "`pool_values`"],
    ]
    assert rows[1][2] == rows[2][2], "the policies are one on the training grid"
    record = json.loads((tmp_path / "out" / "resolutions.json").read_text())
    assert record["test_images"] == 40
    scores = {(s["mixer"], s["resize"], s["height"], s["width"]): s for s in record["scores"]}
    assert len(scores) == 9
    losses = {
        scores["key_value(pos_dim=4)", r, 12, 12]["loss"] for r in ("interpolate", "pool_values")
    }
    assert len(losses) == 2
    assert page.read_text().startswith("before\n<!-- resolutions -->\n\n| mixer |")
    assert page.read_text().endswith("|\n\n<!-- /resolutions -->\nafter\n")
    # the folder holds plain runs, which `keymix eval` scores alike on its whole test split
    run = tmp_path / "out" / "key_value-pos_dim=4-seed0"
    whole = evaluate(run, image_size=(12, 12), resize="interpolate")
    assert whole["images"] > 40
    with pytest.raises(UserError, match="does not hold <!-- resolutions -->"):
        bench["put"](SCRIPT.parent / "mixers.py", "table")


def test_the_page_has_the_place_for_the_table() -> None:
    text = (ROOT / "docs" / "resolutions.md").read_text(encoding="utf-8")
    marks = runpy.run_path(str(SCRIPT))["MARKS"]
    assert text.index(marks[0]) < text.index(marks[1])
