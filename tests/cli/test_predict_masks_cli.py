# SPDX-License-Identifier: Apache-2.0
"""``keymix predict`` with a run on masks: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import keymix
from keymix.cli import main
from keymix.tasks.segmentation.answers import ANSWERS
from keymix.tasks.segmentation.predict_masks import MaskPrediction
from made_masks import ORGANS, write_uwgi
from written_masks_run import written_masks_run


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uwgi(tmp_path_factory.mktemp("uwgi"), cases=4, slices=2, side=20)


@pytest.fixture(scope="module")
def masks_run(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return str(written_masks_run(folder, f"uwgi:{scans}", test_fraction=0.3).folder)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where predictions/ goes


def table_of(text: str) -> list[list[str]]:
    """Split what a pipe gets into cells."""
    return [line.split("\t") for line in text.splitlines()]


def test_a_summary_is_printed_and_a_line_per_image_where_asked(
    masks_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", masks_run, "--per-image"]) == 0
    said = capsys.readouterr()
    head, *rows = table_of(said.out)
    assert head == ["image", *(f"{organ} %" for organ in ORGANS)]
    shares = np.array([[float(cell) for cell in row[1:]] for row in rows])
    for (name, *_), own in zip(rows, shares, strict=True):
        mask = np.asarray(Image.open(tmp_path / "predictions" / "masks" / f"{name}.png"))
        true = [100 * (mask == 1 + k).mean() for k in range(len(ORGANS))]
        assert own == pytest.approx(true, abs=0.005)
    assert main(["predict", masks_run, "--overwrite"]) == 0
    said = capsys.readouterr()
    head, *classes = table_of(said.out)
    assert head == ["class", "images with it", "mean share %"]
    for (organ, images, mean), name, own in zip(classes, ORGANS, shares.T, strict=True):
        assert organ == name
        assert images == f"{(own > 0).sum()} of {len(rows)}"
        assert float(mean) == pytest.approx(own.mean(), abs=0.01)
    assert f"masks of {len(rows)} images" in said.err
    assert "predictions" in said.err


def test_a_class_is_counted_in_the_images_where_it_was_found() -> None:
    found = [
        MaskPrediction(path="a", size=(2, 5), pixels={"bowel": 5, "stomach": 0}),
        MaskPrediction(path="b", size=(2, 2), pixels={"bowel": 0, "stomach": 0}),
    ]
    rows = ANSWERS.summary(found, "image").rows
    assert rows == [["bowel", "1 of 2", "25.00"], ["stomach", "0 of 2", "0.00"]]


def test_the_own_test_split_as_csv_has_pixels_and_areas(
    masks_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", masks_run, "--format", "csv"]) == 0
    said = capsys.readouterr()
    head, *rows = csv.reader(io.StringIO(said.out))
    assert head == ["id", "class", "pixels", "area_mm2"]
    names = list(dict.fromkeys(row[0] for row in rows))
    assert [row[:2] for row in rows] == [[name, organ] for name in names for organ in ORGANS]
    for name, organ, pixels, area in rows:
        mask = np.asarray(Image.open(tmp_path / "predictions" / "masks" / f"{name}.png"))
        assert int(pixels) == (mask == 1 + ORGANS.index(organ)).sum()
        assert float(area) == pytest.approx(2.25 * int(pixels), abs=0.05)
    assert f"masks of {len(names)} images" in said.err
    assert "predictions.csv" in said.err
    stored = json.loads((tmp_path / "predictions" / "predictions.json").read_text())
    assert (stored["split"], stored["weights"]) == ("test", "last")


def test_a_split_of_data_and_its_files_are_the_same(
    masks_run: str, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", masks_run, "--data", f"uwgi:{scans}", "--split", "val", "--out", "split"]
    assert main([*words, "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored
    files = [each["path"] for each in stored]
    assert main(["predict", masks_run, *files, "--format", "json", "--out", "files"]) == 0
    assert json.loads(capsys.readouterr().out) == stored
    one, other = (tmp_path / name / "predictions.csv" for name in ("split", "files"))
    assert one.read_bytes() == other.read_bytes()
    assert json.loads((tmp_path / "split" / "predictions.json").read_text())["split"] == "val"


def test_csv_is_a_line_an_organ(
    masks_run: str, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20)).save(tmp_path / "lone.png")
    named = next(scans.rglob("slice_0001_*.png"))
    assert main(["predict", masks_run, str(named), "lone.png", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == ["id", "class", "pixels", "area_mm2"]
    assert [row["class"] for row in rows] == [*ORGANS, *ORGANS]
    for row in rows:
        known = row["id"] != "lone"
        assert row["area_mm2"] == (str(2.25 * int(row["pixels"])) if known else "")


def test_windows_at_the_images_own_size(
    masks_run: str, scans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--window", "16", "--flips", "horizontal"]
    assert main(["eval", masks_run, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["image_size"], found["overlap"], found["flips"]) == ([16, 16], 0.5, "horizontal")
    again = keymix.evaluate(masks_run, image_size=16, overlap=0.5, flips="horizontal")
    assert found["jaccard"] == again["jaccard"]
    assert main(["eval", masks_run, *words, "--overlap", "0.25"]) == 0
    said = capsys.readouterr()
    head, row = (line.split("\t") for line in said.out.splitlines()[:2])
    assert row[head.index("window")] == "16x16"
    assert "warning" not in said.err
    assert main(["predict", masks_run, *words, "--out", "out"]) == 0
    assert json.loads(Path("out/predictions.json").read_text())["overlap"] == 0.5


def test_a_window_larger_than_all_images_is_a_line(
    masks_run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", masks_run, "--window", "32", "--out", "out"]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warned == [
        "keymix: warning: images that are smaller than a window of 32x32 pixels are padded with "
        "black"
    ]


def test_an_overlap_is_a_share(masks_run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", masks_run, "--overlap", "1"]) == 2
    assert "overlap=1.0: give a share of a window" in capsys.readouterr().err
