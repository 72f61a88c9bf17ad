# SPDX-License-Identifier: Apache-2.0
"""Frames of sequences are found by names and looks together, and ordinary photos are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from film import film, save_frames
from pictures import picture
from PIL import Image
from sklearn.datasets import load_digits

from keymix.data import load
from keymix.data.check import check, quick_check
from keymix.data.findings import IN_SEQUENCES
from keymix.data.sequences import find_sequences, small

TWO = [f"Seq05VD_f{30 * i:05d}" for i in range(171)] + [
    f"0001TP_{8550 + 30 * i}" for i in range(62)
]
Pixels = Sequence[np.ndarray]


@pytest.fixture(scope="module")
def frames() -> Pixels:
    return [*film(171, 0), *film(62, 1)]


def found(names: Sequence[str], images: Pixels, parts: Sequence[str] = ()) -> dict[str, int]:
    return find_sequences(
        names, list(parts) or ["train"] * len(names), lambda i: small(Image.fromarray(images[i]))
    )


def shuffled(count: int) -> list[int]:
    return [int(k) for k in np.random.default_rng(0).permutation(count)]


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (TWO, {"Seq05VD_f#": 171, "0001TP_#": 62}),
        ([f"{'a' if i < 171 else 'b'}_{i}" for i in range(233)], {"a_#": 171, "b_#": 62}),
        ([str(i) for i in range(233)], {"#": 233}),
        (
            [f"{i:06d}_{'left' if i < 171 else 'up'}" for i in range(233)],
            {"#_left": 171, "#_up": 62},
        ),
        ([f"run/{i // 5}h{i % 5}m" for i in range(233)], {"run/#h#m": 233}),
    ],
)
def test_two_sequences_are_found_whatever_their_frames_are_called(
    frames: Pixels, names: list[str], rows: dict[str, int]
) -> None:
    of_names = found(names, frames)
    assert of_names == rows


def test_frames_are_found_in_any_order_and_over_several_splits(frames: Pixels) -> None:
    order = shuffled(233)
    parts = [("train", "val", "test")[k % 3] for k in order]
    of_names = found([TWO[k] for k in order], [frames[k] for k in order], parts)
    assert sum(of_names.values()) == 233
    twice = found(TWO[:60] * 2, [*frames[:60], *film(60, 5)], ["train"] * 60 + ["test"] * 60)
    assert twice == {"test/Seq05VD_f#": 60, "train/Seq05VD_f#": 60}


def test_many_short_films_are_found_and_numbered_photos_in_short_rows_are_not() -> None:
    names = [f"clip{k}_{i}" for k in range(30) for i in range(12)]
    short = found(names, [frame for k in range(30) for frame in film(12, 100 + k)])
    assert sum(short.values()) == 360
    photos = [np.asarray(picture(3000 + i, (32, 32))) for i in range(360)]
    assert not found(names, photos)
    digits = load_digits()
    by_hand = [i for k in range(10) for i in np.flatnonzero(digits.target == k)[:36]]
    assert not found(names, [(digits.images[i] * 15).astype(np.uint8) for i in by_hand])


def test_a_camera_that_stands_still_is_found() -> None:
    rng = np.random.default_rng(0)
    scene = np.asarray(picture(4, (64, 64)).convert("L"), dtype=float)

    def frame() -> np.ndarray:
        seen = scene + rng.normal(0, 2, scene.shape)
        y, x = rng.integers(0, 50, 2)
        seen[y : y + 10, x : x + 6] = 20  # what passes by is elsewhere in each
        return seen.clip(0, 255).astype(np.uint8)

    assert found([f"cam_{i}" for i in range(40)], [frame() for _ in range(40)])


def test_names_alone_and_looks_alone_say_nothing(frames: Pixels) -> None:
    order = shuffled(233)
    assert not found([f"f{k:04d}" for k in order], frames)  # numbered at random
    letters = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(233)]
    assert not found(letters, frames)
    photos = [np.asarray(picture(1000 + i, (32, 32))) for i in range(120)]
    assert not found([f"IMG_{i:04d}" for i in range(120)], photos)
    assert not found([f"{i}" for i in range(30)], [photos[0]] * 30)  # copies, reported as such
    assert not found([f"{i}" for i in range(30)], [photos[0] * 0] * 30)


def test_digits_of_one_hand_after_another_are_no_frames() -> None:
    digits = load_digits()
    images = [(each * 255 / 16).astype(np.uint8) for each in digits.images]
    for name in ("{k}/{i:05d}", "{i:05d}", "{k}_{i:05d}"):
        names = [name.format(k=k, i=i) for i, k in enumerate(digits.target)]
        assert not found(names, images), name


def test_a_clip_among_photos_is_named_and_they_are_not(frames: Pixels) -> None:
    photos = [np.asarray(picture(2000 + i, (32, 32))) for i in range(90)]
    names = [f"IMG_{i:04d}" for i in range(90)] + [f"clip_{i}" for i in range(60)]
    of_names = found(names, [*photos, *frames[:60]])
    assert of_names == {"clip_#": 60}


def test_few_images_are_opened_and_none_when_it_is_late(frames: Pixels) -> None:
    opened: list[int] = []

    def picture_of(i: int) -> np.ndarray:
        opened.append(i)
        return small(Image.fromarray(frames[i % 233]))

    names = [f"{i // 500}_{i}" for i in range(20_000)]
    find_sequences(names, ["train"] * 20_000, picture_of)
    assert len(set(opened)) == len(opened) <= 480
    with pytest.raises(TimeoutError):
        find_sequences(names, ["train"] * 20_000, picture_of, late=lambda: len(opened) > 500)


@pytest.mark.parametrize("kind", ["masks", "folder"])
def test_the_check_names_frames_taken_for_independent_images(
    tmp_path: Path, kind: str, make_folder: Callable[..., Path]
) -> None:
    root = save_frames(tmp_path / "film", kind=kind)
    (shown,) = [each for each in check(f"{kind}:{root}").findings if each.what == IN_SEQUENCES]
    assert shown.level == "falsifies"  # keymix draws the test split frame by frame
    assert len(shown.where) == 2
    assert ("groups.csv" in shown.remedy) == (kind == "masks")
    photos = make_folder({"a": 40, "b": 40})
    assert IN_SEQUENCES not in {each.what for each in check(str(photos)).findings}


def test_a_split_of_the_data_sets_own_that_shares_sequences_is_warned_of_alike(
    tmp_path: Path,
) -> None:
    """Its remedy changes no split, and check and comparison give it one severity."""
    film = save_frames(tmp_path / "film", kind="folder")
    root = tmp_path / "own"
    for image in sorted(film.rglob("*.png")):
        place = root / ("test" if int(image.stem[2:]) % 4 == 0 else "train") / image.parent.name
        place.mkdir(parents=True, exist_ok=True)
        image.rename(place / image.name)
    spec = f"folder:{root}"
    for report in (check(spec), quick_check(load(spec))):
        (shown,) = [each for each in report.findings if each.what == IN_SEQUENCES]
        assert shown.level == "warning"
        assert "groups.csv" not in shown.remedy
        assert report.fit


def test_images_whose_groups_are_named_are_no_hidden_sequences(tmp_path: Path) -> None:
    root = save_frames(tmp_path / "film", kind="masks")
    stems = sorted(path.stem for path in (root / "images").iterdir())
    rows = [f"{stem},{stem[0]}{int(stem[2:]) // 8}" for stem in stems]
    (root / "groups.csv").write_text("image,group\n" + "\n".join(rows) + "\n")
    assert IN_SEQUENCES not in {each.what for each in check(f"masks:{root}").findings}
