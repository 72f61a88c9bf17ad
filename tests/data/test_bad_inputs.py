# SPDX-License-Identifier: Apache-2.0
"""Bad data as they are met, through the real command: one line with the culprit, and no folder."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import coco_sets
import huggingface_hub.constants
import pytest
from pictures import picture
from PIL import Image
from scan_sets import mask_set, scan_path, scan_set

from keymix.cli import main
from keymix.compare.question import Question
from keymix.errors import UserError

TINY = ["--epochs", "1", "--data.batch_size", "4", "--schedule.warmup_epochs=0"]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "huggingface/hub")

    def unknown_host(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)


def photos(side: int = 16, **counts: int) -> Path:
    """Images in ``photos/<class>/``; an underscore in a name stands for a slash."""
    for name, count in (counts or {"cat": 12, "dog": 12}).items():
        folder = Path("photos", name.replace("_", "/"))
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            seed = 1000 * sum(map(ord, name)) + i
            picture(seed, (side, side)).save(folder / f"{i:03d}.jpg", quality=95)
    return Path("photos")


def spoilt(name: str, content: bytes | None = None, side: int = 16, **counts: int) -> None:
    """Give a photo other content, or half of its own."""
    file = photos(side, **counts) / name
    own = file.read_bytes()
    file.write_bytes(own[: len(own) // 2] if content is None else content)


def large_and_read_in_validation() -> None:
    splits = {f"{split}_{name}": 4 for split in ("train", "val", "test") for name in ("a", "b")}
    spoilt("val/a/001.jpg", side=120, **splits)


def missing_scan() -> None:
    scan_path(scan_set(Path("gi"), {1: 2, 2: 2, 3: 2}), 1, 0, 1, (6, 9)).unlink()


def flat_box() -> None:
    coco_sets.write(Path("shots"), change=lambda f: f["annotations"][2].update(bbox=[5, 6, 9, 0]))


def half_archive() -> None:
    Path("data").mkdir()
    Path("data", "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b half an archive")


BAD: Mapping[str, tuple[str, Callable[[], object], str]] = {
    # what is given: the spec, how it is made, and words of the line
    "a misspelt spec": ("cifr10", list, "cifar10"),
    "a path without its kind": ("photos", photos, "folder:photos"),
    "nothing there": ("folder:photo", list, "'photo'"),
    "images without class folders": ("folder:photos/cat", photos, "photos/cat"),
    "one class": ("folder:photos", lambda: photos(cat=5), "(cat)"),
    "an empty class": ("folder:photos", lambda: photos(cat=9, dog=9, emu=0), "photos/emu"),
    "one image per class": ("folder:photos", lambda: photos(cat=1, dog=1), "validation"),
    "half a JPEG": ("folder:photos", lambda: spoilt("cat/003.jpg"), "photos/cat/003.jpg"),
    "half a large JPEG": ("folder:photos", large_and_read_in_validation, "photos/val/a/001.jpg"),
    "an empty file": ("folder:photos", lambda: spoilt("cat/003.jpg", b""), "photos/cat/003.jpg"),
    "text": ("folder:photos", lambda: spoilt("cat/003.jpg", b"a cat"), "photos/cat/003.jpg"),
    "a scan that is missing": ("uwgi:gi", missing_scan, "scans/slice_0001_*.png"),
    "a mask of other values": (
        "masks:leaves",
        lambda: Image.new("L", (9, 6), 7).save(mask_set(Path("leaves"), {"": 6}) / "masks/p0.png"),
        "leaves/masks/p0.png",
    ),
    "a box without height": ("coco:shots", flat_box, "annotation 200"),
    "no network": ("cifar10:data", list, "cifar-10-python.tar.gz"),
    "no network, half an archive": ("cifar10:data", half_archive, "data/cifar-10-python.tar.gz"),
    "no network, a set of the Hub": ("hf:uoft-cs/cifar10", list, "uoft-cs/cifar10"),
}
RECIPES = {
    "uwgi": "small_masks_unet",
    "masks": "small_masks_unet",
    "coco": "mask_rcnn_small",
}


@pytest.mark.parametrize("given", BAD)
def test_one_line_names_the_culprit(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec, make, culprit = BAD[given]
    make()
    before = {*Path.cwd().iterdir()}
    recipe = RECIPES.get(spec.partition(":")[0], "digits_vit")
    assert main(["train", recipe, "--data", spec, *TINY, "--out", "run"]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("keymix")]
    assert line.startswith("keymix: error: ")
    assert culprit in line
    assert {*Path.cwd().iterdir()} - before <= {Path.cwd() / "data"}


def test_skip_corrupt_trains_on_what_is_left_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoilt("cat/003.jpg")
    words = ["train", "digits_vit", "--data", "folder:photos", *TINY, "--out", "run"]
    assert main([*words, "--skip-corrupt"]) == 0, capsys.readouterr().err
    record = json.loads(Path("run", "summary.json").read_text())["data"]
    assert record["left_out_count"] == 1
    assert record["left_out"][0]["id"] == "photos/cat/003.jpg"
    assert "runcated" in record["left_out"][0]["reason"]


def test_a_class_without_any_image_left_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for file in (photos() / "dog").iterdir():
        file.write_bytes(b"")
    words = ["train", "digits_vit", "--data", "folder:photos", *TINY, "--skip-corrupt"]
    assert main(words) == 2
    assert "class 'dog'" in capsys.readouterr().err


def test_compare_takes_the_same_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Question] = []

    def instead(question: Question, **_: object) -> None:
        seen.append(question)
        raise UserError("enough")

    monkeypatch.setattr("keymix.compare.run.answer", instead)
    assert main(["compare", "--data", "folder:photos", "--skip-corrupt"]) == 2
    assert seen[0].overrides == {"data.skip_corrupt": True}


def test_skip_corrupt_takes_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    assert main(["train", "digits_vit", "--skip-corrupt=yes"]) == 2
    assert "option --skip-corrupt takes no value" in capsys.readouterr().err
    assert main(["train", "digits_vit", "--skip-corupt"]) == 2
    assert "Did you mean '--skip-corrupt'" in capsys.readouterr().err
