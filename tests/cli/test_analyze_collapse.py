# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze collapse``: words, files, JSON, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from written_run import written_run

from keymix.cli import analyze, console
from keymix.errors import UserError
from keymix.studies.collapse.measure import collapse
from keymix.studies.inputs import load_images, load_models

NAME = "vit_nano_p2_12"
DIGITS = ["--images", "digits", "--limit", "3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_run(tmp_path_factory.mktemp("runs") / "deep", mixer="re_attention", depth=3)


def test_json_is_the_python_record_of_each_model(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run), NAME, *DIGITS, "--threshold", "0.6", "--nearest", "1", "--json"]
    words += ["--batch-size", "2", "--layers", "0-1,blocks.2.*"]
    assert analyze.main(["collapse", *words]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    mine, named = record["studies"]
    assert (mine["label"], mine["random"], named["random"]) == ("deep", False, True)
    assert f"{NAME} has random weights" in said.err
    assert mine["origin"] == "test images of digits"
    (one,) = load_models([str(run)])
    images = torch.cat(list(load_images(one, ["digits"], limit=3).batches(8)))
    found = collapse(one.model, images, threshold=0.6, nearest=1).to_dict()
    assert mine["images"] == 3
    assert mine["collapsed"] == found["collapsed"]
    assert [pair["mean"] for pair in mine["pairs"]] == pytest.approx(
        [pair["mean"] for pair in found["pairs"]], rel=1e-5
    )
    assert [layer["path"] for layer in named["layers"]] == [
        f"blocks.{i}.attn.mixer" for i in range(3)
    ]


def test_a_run_is_read_on_its_own_test_images(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze.main(["collapse", str(run), "--limit", "4"]) == 0
    text = capsys.readouterr()
    rows = [line.split("\t") for line in text.out.splitlines()]
    assert rows[0][:3] == ["model", "block", "before"]
    assert [(row[0], row[1], row[-1]) for row in rows[1:]] == [
        ("deep", str(i + 1), f"blocks.{i}.attn.mixer") for i in range(3)
    ]
    assert all(len(row) == len(rows[0]) for row in rows)
    assert text.err.splitlines()[-1].endswith(", on 4 images only")


def test_a_terminal_gets_the_verdict_in_words(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(console.out), "is_terminal", True)
    assert analyze.main(["collapse", str(run), NAME, *DIGITS]) == 0
    out = capsys.readouterr().out
    assert "Effective rank" in out
    assert "Read on 3 images only" in out
    assert out.count("Random weights") == 1


def test_a_folder_gets_the_page_the_record_and_the_charts(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [str(run), *DIGITS, "--out", str(out)]
    assert analyze.main(["collapse", *words]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"collapse.html", "collapse.json", "collapse-adjacent.svg"} <= names
    assert {"collapse-theta-deep.svg", "collapse-pairs-deep.svg"} <= names
    record = json.loads((out / "collapse.json").read_text())
    assert record["studies"][0]["sentences"][0] in (out / "collapse.html").read_text()
    with pytest.raises(UserError, match="add --overwrite"):
        analyze.main(["collapse", *words])
    assert analyze.main(["collapse", NAME, *DIGITS, "--out", str(out), "--overwrite"]) == 0
    assert "collapse-theta-deep.svg" not in {path.name for path in out.iterdir()}


def test_folders_that_hold_other_things_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("")
    for out in (tmp_path, tmp_path / "thing"):
        with pytest.raises(UserError, match=r"--out|is not empty"):
            analyze.main(["collapse", NAME, *DIGITS, "--out", str(out)])
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]
