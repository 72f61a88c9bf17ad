# SPDX-License-Identifier: Apache-2.0
"""Only regular files are read: a pipe that is named like one is reported and never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from event_files import write_folder
from scan_sets import mask_set, scan_set

from keymix.cli import main
from keymix.data import load
from keymix.data.check import check
from keymix.data.events import read_events
from keymix.errors import UserError
from keymix.train.recipe import read_mapping


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def refused(spec: str, path: Path, **options: object) -> None:
    report = check(spec)
    assert path.name in " ".join(" ".join(found.where) for found in report.of("stops"))
    with pytest.raises(UserError, match="not a regular file") as caught:
        load(spec, **options)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", [16, 120], ids=["in memory", "one by one"])
def test_images_that_are_no_files_are_broken(make_folder, side: int) -> None:
    root = make_folder({"a": 12, "b": 12}, size=(side, side))
    (root / "b" / "folder.png").mkdir()
    refused(f"folder:{root}", pipe(root / "a" / "odd.png"))
    (root / "a" / "gone.png").symlink_to("nowhere")
    assert load(f"folder:{root}", skip_corrupt=True).record().left_out_count == 2


@pytest.mark.parametrize("name", ["masks/p2.png", "images/p2.png", "classes.txt", "groups.csv"])
def test_masks_and_tables_that_are_pipes_are_named(tmp_path: Path, name: str) -> None:
    root = mask_set(tmp_path / "set", {"": 8})
    refused(f"masks:{root}", pipe(root / name))


def test_scans_that_are_pipes_are_named(tmp_path: Path) -> None:
    root = scan_set(tmp_path / "uw", {1: 4, 2: 4, 3: 4})
    shares = {"test_fraction": 0.3, "val_fraction": 0.3}
    refused(f"uwgi:{root}", pipe(sorted(root.rglob("slice_*.png"))[1]), **shares)


def test_parquet_files_and_the_images_they_name_may_be_no_pipes(make_parquet) -> None:
    folder = make_parquet([0, 1] * 10, images=[f"{i}.png" for i in range(20)])
    pipe(folder / "3.png")
    assert "not a regular file" in " ".join(check(f"parquet:{folder}").of("stops")[0].where)
    refused(f"parquet:{folder}", pipe(folder / "train-00000-of-00001.parquet"))


def test_recordings_that_are_pipes_are_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "events", {"a": 6, "b": 6})
    refused(f"events:{root}", pipe(root / "a" / "odd.npz"))
    with pytest.raises(UserError, match="not a regular file"):
        read_events(pipe(tmp_path / "odd.aedat"))


@pytest.mark.parametrize(
    "words", [["train", "{}"], ["train", "digits_vit", "--config", "{}"]], ids=["recipe", "config"]
)
def test_recipes_that_are_pipes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = pipe(tmp_path / "recipe.yaml")
    with pytest.raises(UserError, match=r"recipe\.yaml.*not a regular file"):
        read_mapping(path)
    assert main([word.format(path) for word in words]) == 2
    assert main(["train", "digits_vit", "--import", str(pipe(tmp_path / "own.py"))]) == 2
    assert capsys.readouterr().err.count("keymix: error:") == 2
