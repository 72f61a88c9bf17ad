# SPDX-License-Identifier: Apache-2.0
"""Broken images are an error, or left out and named; the others stay in their splits."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import encoded

from keymix.cli import main
from keymix.data import ImageData, Loader, load
from keymix.errors import UserError


def truncate(file: Path | str, keep: float = 0.6) -> None:
    file = Path(file)
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])


def ids(data: ImageData) -> dict[str, list[str]]:
    return {split.name: [split.ids(i) for i in range(len(split))] for split in data.splits}


@pytest.mark.parametrize("side", [16, 136])
def test_broken_images_leave_their_split_and_move_nothing_else(make_folder, side: int) -> None:
    root = make_folder({"a": 20, "b": 20}, (side, side))
    whole = load(f"folder:{root}")
    assert (whole.train.images is None) == (side > 128)
    before = ids(whole)
    victims = {name: before[name][1] for name in before}
    for victim in victims.values():
        truncate(victim)
    left = load(f"folder:{root}", skip_corrupt=True)
    for name, names in ids(left).items():
        assert names == [each for each in before[name] if each != victims[name]]
    record = left.record()
    assert {each.id for each in record.left_out} == set(victims.values())
    assert record.left_out_count == 3
    assert all("truncated" in each.reason for each in record.left_out)
    assert "broken images left out: 1 of train, 1 of val, 1 of test" in record.notes
    assert record.fingerprint != whole.record().fingerprint
    loader = Loader(left.train, left, batch_size=8, train=False)
    assert sum(len(batch.targets) for batch in loader) == len(left.train)


@pytest.mark.parametrize("side", [16, 136], ids=["in memory", "one by one"])
def test_images_that_are_no_files_are_broken(make_folder, side: int) -> None:
    root = make_folder({"a": 12, "b": 12}, (side, side))
    (root / "b" / "folder.png").mkdir()
    (root / "a" / "gone.png").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"gone\.png"):
        load(f"folder:{root}")
    assert load(f"folder:{root}", skip_corrupt=True).record().left_out_count == 1


def test_the_fingerprint_knows_which_image_was_left_out(make_folder) -> None:
    root = make_folder({"a": 9, "b": 9})
    files = [Path(file) for file in ids(load(f"folder:{root}"))["train"][:2]]
    for file in files:
        file.write_bytes(encoded(7))  # alike, so that what is left is the same either way
    seen = []
    for file in files:
        file.write_bytes(b"broken")
        seen.append(load(f"folder:{root}", skip_corrupt=True).record().fingerprint)
        file.write_bytes(encoded(7))
    assert seen[0] != seen[1]


def test_rows_of_parquet_files_are_left_out(make_parquet) -> None:
    images = [{"bytes": encoded(i), "path": None} for i in range(20)]
    images[3] = {"bytes": b"no image", "path": None}
    images[8] = {"bytes": None, "path": None}
    spec = f"parquet:{make_parquet([0, 1] * 10, images=images)}"
    with pytest.raises(UserError, match=r"parquet row 3: not an image\. .*skip_corrupt true"):
        load(spec)
    record = load(spec, skip_corrupt=True).record()
    assert sorted(each.reason for each in record.left_out) == [
        "it is empty",
        "not an image",
    ]
    assert sum(record.sizes.values()) == 18


def test_at_most_fifty_are_named(make_folder) -> None:
    root = make_folder({"a": 80, "b": 80})
    for i in range(60):
        (root / "a" / f"{i:03d}.png").write_bytes(b"")
    record = load(f"folder:{root}", skip_corrupt=True).record()
    assert (len(record.left_out), record.left_out_count) == (50, 60)


def test_a_class_without_training_images_is_an_error(make_folder) -> None:
    root = make_folder({"a": 9, "b": 9})
    for file in (root / "b").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match=r"class 'b' has no training images left, all are broken"):
        load(f"folder:{root}", skip_corrupt=True)


def test_an_empty_split_is_an_error(make_folder) -> None:
    root = make_folder({"train/a": 9, "train/b": 9, "test/a": 2})
    for file in (root / "test" / "a").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(UserError, match=r"all images of test are broken: .*000\.png: not an image"):
        load(f"folder:{root}", skip_corrupt=True)


def test_commands_say_what_was_left_out(
    make_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_folder({"cat": 8, "dog": 8})
    broken = sorted((root / "cat").iterdir())[3]
    broken.write_bytes(b"")
    words = ["--data", f"folder:{root}", "--epochs", "1", "--skip-corrupt"]
    words += ["--model", "vit_micro_p4_32", "--data.image_size", "32"]
    assert main(["train", "small_images_vit", *words, "--out", str(tmp_path / "run")]) == 0
    expected = f"1 broken image is left out of data folder:{root} ({broken}: it is empty)"
    assert expected in " ".join(capsys.readouterr().err.split())
