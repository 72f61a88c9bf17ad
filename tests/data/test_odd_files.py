# SPDX-License-Identifier: Apache-2.0
"""Only regular files are read: whatever else is named like one is reported and never waited for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from event_files import write_folder
from odd_files import ODD, pipe
from scan_sets import mask_set, scan_set

from keymix.cli import main
from keymix.data import load
from keymix.data.check import check
from keymix.data.events import read_events
from keymix.errors import UserError
from keymix.train.recipe import read_mapping


def refused(spec: str, name: str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        load(spec, **options)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("side", [16, 120], ids=["in memory", "one by one"])
def test_images_that_are_no_files_are_broken(make_folder, kind: str, side: int) -> None:
    make, expected = ODD[kind]
    root = make_folder({"a": 12, "b": 12}, size=(side, side))
    make(root / "a" / "odd.png")
    (root / "b" / "folder.png").mkdir()
    (finding,) = check(f"folder:{root}").of("stops")
    assert finding.what == "broken images"
    (line,) = finding.where
    assert line.startswith(f"{root}/a/odd.png: ")
    assert expected in line
    assert expected in refused(f"folder:{root}", "odd.png")
    assert load(f"folder:{root}", skip_corrupt=True).record().left_out_count == 1


def test_masks_and_tables_that_are_pipes_are_named(tmp_path: Path) -> None:
    for name in ("masks/p2.png", "images/p2.png", "classes.txt", "groups.csv"):
        root = mask_set(tmp_path / "set", {"": 8})
        (root / name).unlink(missing_ok=True)
        pipe(root / name)
        report = check(str(root))
        assert name in " ".join(" ".join(found.where) for found in report.of("stops")), name
        assert "a named pipe" in refused(f"masks:{root}", name)
        shutil.rmtree(root)


def test_scans_that_are_pipes_are_named(tmp_path: Path) -> None:
    root = scan_set(tmp_path / "uw", {1: 4, 2: 4, 3: 4})
    scan = sorted(root.rglob("slice_*.png"))[1]
    scan.unlink()
    pipe(scan)
    assert "a named pipe" in " ".join(check(f"uwgi:{root}").of("stops")[0].where)
    refused(f"uwgi:{root}", scan.name, test_fraction=0.3, val_fraction=0.3)
    (root / "train.csv").unlink()
    pipe(root / "train.csv")
    refused(f"uwgi:{root}", "train.csv")


def test_parquet_files_and_the_images_they_name_may_be_no_pipes(make_parquet) -> None:
    folder = make_parquet([0, 1] * 10, images=[f"{i}.png" for i in range(20)])
    for i in range(20):
        pipe(folder / f"{i}.png") if i == 3 else (folder / f"{i}.png").write_bytes(b"")
    assert "a named pipe" in " ".join(check(f"parquet:{folder}").of("stops")[0].where)
    file = folder / "train-00000-of-00001.parquet"
    file.unlink()
    pipe(file)
    assert "a named pipe" in refused(f"parquet:{folder}", file.name)


def test_recordings_that_are_pipes_are_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "events", {"a": 6, "b": 6})
    pipe(root / "a" / "odd.npz")
    (finding,) = check(f"events:{root}").of("stops")
    assert "a named pipe" in finding.where[0]
    assert "a named pipe" in refused(f"events:{root}", "odd.npz")
    pipe(tmp_path / "odd.aedat")
    with pytest.raises(UserError, match="a named pipe"):
        read_events(tmp_path / "odd.aedat")


def test_recipes_and_imports_that_are_pipes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("recipe.yaml", "own.py"):
        pipe(tmp_path / name)
    with pytest.raises(UserError, match=r"recipe\.yaml.*a named pipe"):
        read_mapping(tmp_path / "recipe.yaml")
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 2
    assert main(["train", "digits_vit", "--config", str(tmp_path / "recipe.yaml")]) == 2
    assert main(["train", "digits_vit", "--import", str(tmp_path / "own.py")]) == 2
    assert capsys.readouterr().err.count("keymix: error:") == 3
