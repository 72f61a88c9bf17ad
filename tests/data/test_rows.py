# SPDX-License-Identifier: Apache-2.0
"""Rows of one's own: targets that are no classes, pixels of other types, and seeded samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import picture
from torch import Tensor
from torchvision import tv_tensors

import keymix
from keymix.cli import main
from keymix.data import Augment, Faults, ImageData, Loader, Row, Source, load
from keymix.data import specs as known
from keymix.data.augment import check_augment
from keymix.data.check import check, quick_check
from keymix.data.decode import Encoded, fitted_size
from keymix.data.kinds import IMAGE, PLACE
from keymix.data.random_parameters import flips
from keymix.data.sample import array_rows
from keymix.data.specs import list_specs, parse, source, task_name
from keymix.errors import UserError
from keymix.task import _OWN, Score, Task, register_task

SIDES = [(20 + k % 5, 30 - k % 3) for k in range(40)]


def task(name: str, *, whole: bool = False) -> Task:
    return Task(
        name=name,
        does="reads a dial",
        holds="images with a number each",
        scores=(Score(key="error", name="error", short="error", label="error", better="less"),),
        whole_images=whole,
        training=object(),
        answers=object(),
    )


def pixels_of_dials() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (60, 1, 12, 12), dtype=np.uint8)


def dials(argument: str, faults: Faults) -> Source:
    """60 grey images of 12x12 pixels; the target is the mean, to which an argument adds."""
    del faults
    pixels = pixels_of_dials()
    values = pixels.mean((1, 2, 3)) / 255 + float(argument or 0)
    return Source(rows=array_rows("dials", pixels, values), in_chans=1)


def array_of_points(k: int) -> np.ndarray:
    height, width = SIDES[k]
    random = np.random.default_rng(k)
    return random.uniform(0, (width, height), (k % 4, 2)).astype(np.float32)


def key_points(k: int) -> Tensor:
    return tv_tensors.KeyPoints(array_of_points(k), canvas_size=SIDES[k])


def named(k: int) -> dict[str, Tensor]:
    """Several tensors by name: a box that moves with its image, a number and a byte that do not."""
    height, width = SIDES[k]
    box = torch.tensor([[1.0, 2.0, width / 2, height / 2]])
    return {
        "box": tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=SIDES[k]),
        "number": torch.tensor(k),
        "byte": torch.full((k % 3, 2), k, dtype=torch.uint8),
    }


def files(root: Path, target: Callable[[int], Any]) -> list[Row]:
    """40 colour images of unequal sizes."""
    rows = []
    for k, (height, width) in enumerate(SIDES):
        file = root / f"{k}.png"
        if not file.exists():
            picture(k, (width, height)).save(file)
        image = Encoded(file, str(file), key=file.name)
        rows.append(Row(id=str(file), image=image, target=partial(target, k)))
    return rows


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Path]:
    """Register a source of numbers, and three of targets with a place in their images."""
    before = dict(known._OWN), dict(_OWN)
    for one in (
        task("dial"),
        task("point", whole=True),
        replace(task("scene", whole=True), fits=True),
    ):
        register_task(one)
    source("dials", argument="[N]", summary="dials", task="dial")(dials)
    for name, of, target in (
        ("points", "point", array_of_points),
        ("key_points", "point", key_points),
        ("scenes", "scene", named),
    ):

        def opened(argument: str, faults: Faults, target: Any = target) -> Source:
            del argument, faults
            return Source(rows=files(tmp_path, target))

        source(name, summary=name, task=of, target="place")(opened)
    yield tmp_path
    for registered, kept in zip((known._OWN, _OWN), before, strict=True):
        registered.clear()
        registered.update(kept)


def batches(data: ImageData, augment: Augment | None = None, **options: int) -> list[Any]:
    loader = Loader(data.train, data, batch_size=4, train=True, augment=augment, **options)
    return list(loader)


def test_numbers_are_loaded_split_and_served(sources: Path) -> None:
    data = load("dials")
    assert data.classes == ()
    assert data.record().task == data.task.name == "dial"
    rows = np.concatenate([split.index for split in data.splits])
    assert sorted(rows.tolist()) == list(range(60))
    means = torch.tensor(pixels_of_dials().mean((1, 2, 3)) / 255, dtype=torch.float32)
    for batch in batches(data, Augment(flip=True, crop_padding=1)):
        assert batch.targets.dtype == torch.float32
        assert torch.equal(batch.targets, means[data.train.index[batch.index]])
    with pytest.raises(UserError, match="values"):
        _ = data.train.labels
    few = load("dials", limit=20)
    assert len(few.train) + len(few.val) == 20
    with pytest.raises(UserError, match="limit=1"):
        load("dials", limit=1)


def test_a_fingerprint_is_of_inputs_and_targets(sources: Path) -> None:
    one, again, other = (load(f"dials{more}").record() for more in ("", ":0", ":1"))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert one.index_sha256 == other.index_sha256
    assert one.fingerprint_of == "pixels and values"


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_unequal_sizes_come_in_lists(sources: Path, workers: int) -> None:
    data = load("points")
    assert data.image_size == (24, 30)
    assert any("own sizes" in note for note in data.facts.notes)
    seen = 0
    mean, std = (torch.tensor(each)[:, None, None] for each in (data.mean, data.std))
    for batch in batches(data, Augment(), workers=workers):
        assert isinstance(batch.images, list)
        assert isinstance(batch.targets, list)
        for image, target, i in zip(batch.images, batch.targets, batch.index, strict=True):
            row = int(data.train.index[i])
            assert image.shape == (3, *SIDES[row])
            shown = (data.train.read(int(i)) / 255 - mean) / std
            torch.testing.assert_close(image, shown, atol=1e-5, rtol=1e-5)
            assert target.shape == (row % 4, 2)
            assert target.dtype == torch.float32
            seen += 1
    assert seen == len(data.train)


def test_points_that_can_be_moved_are_mirrored_with_their_images(sources: Path) -> None:
    data = load("key_points")
    plain = {
        i: pair
        for batch in batches(data)
        for i, *pair in zip(batch.index.tolist(), batch.images, batch.targets, strict=True)
    }
    moved = 0
    for batch in batches(data, Augment(flip=True)):
        assert isinstance(batch.targets, list)
        for image, target, i in zip(batch.images, batch.targets, batch.index.tolist(), strict=True):
            assert type(target) is Tensor
            before, points_before = plain[i]
            if torch.equal(image, before):
                assert torch.equal(target, points_before)
                continue
            assert torch.equal(image, before.flip(-1))
            if len(target):
                moved += 1
                mirrored = image.shape[-1] - 1 - points_before[:, 0]
                torch.testing.assert_close(target[:, 0], mirrored, atol=1.01, rtol=0)
                assert torch.equal(target[:, 1], points_before[:, 1])
    assert moved


def test_an_image_size_resizes_images_and_what_can_be_moved(sources: Path) -> None:
    data = load("key_points", image_size=(40, 48))
    assert data.image_size == (40, 48)
    for i in range(len(data.train)):
        row = int(data.train.index[i])
        assert data.train.read(i).shape == (3, 40, 48)
        wanted = array_of_points(row) * [48 / SIDES[row][1], 40 / SIDES[row][0]]
        found = data.train.target(i).as_subclass(Tensor).numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-3, rtol=1e-4)
    assert isinstance(next(iter(batches(data))).images, list)
    with pytest.raises(UserError, match=r"data points: .*image_size"):
        load("points", image_size=40)


def test_several_tensors_by_name_are_served_with_their_types(sources: Path) -> None:
    data = load("scenes", image_size=(30, 36))
    moved = set()
    for batch in batches(data, Augment(flip=True)):
        assert isinstance(batch.targets, list)
        for image, target, i in zip(batch.images, batch.targets, batch.index.tolist(), strict=True):
            row = int(data.train.index[i])
            size = fitted_size(SIDES[row], (30, 36))
            assert image.shape[1:] == size
            assert [type(each) for each in target.values()] == [Tensor] * 3
            assert target["byte"].dtype == torch.uint8
            assert target["number"] == row
            scale = torch.tensor([size[1] / SIDES[row][1], size[0] / SIDES[row][0]] * 2)
            left, top, right, bottom = (named(row)["box"][0] * scale).tolist()
            mirrored = bool(flips(np.array([i]), seed=0, epoch=0)[0])
            if mirrored:
                left, right = size[1] - right, size[1] - left
            assert target["box"][0].tolist() == pytest.approx([left, top, right, bottom], abs=1e-3)
            moved.add(mirrored)
    assert moved == {True, False}
    assert load("scenes").image_size == (224, 224)
    with pytest.raises(UserError, match="whole_images"):
        register_task(replace(task("other"), fits=True))


@pytest.mark.parametrize(
    ("spec", "augment", "field"),
    [
        ("points", Augment(flip=True), "flip"),
        ("points", Augment(crop_padding=2), "crop_padding"),
        ("key_points", Augment(rand_augment=(2, 9)), "rand_augment"),
        ("key_points", Augment(erasing=0.2), "erasing"),
        ("key_points", Augment(vertical_flip=True), "vertical_flip"),
        ("key_points", Augment(multi_scale=(8, 16)), "multi_scale"),
        ("dials", Augment(coarse_dropout=True), "coarse_dropout"),
        ("dials", Augment(snn_wide=True), "snn_wide"),
    ],
)
def test_what_would_part_images_and_targets_is_refused(
    sources: Path, spec: str, augment: Augment, field: str
) -> None:
    with pytest.raises(UserError, match=rf"augment\.{field}="):
        batches(load(spec), augment)
    if field == "flip":
        check_augment(augment, IMAGE, PLACE)  # before the data are known they may be moved


def test_groups_stay_whole(sources: Path) -> None:
    def grouped(argument: str, faults: Faults) -> Source:
        found = dials(argument, faults)
        rows = [
            replace(row, group=f"patient{k // 5}", target=k) for k, row in enumerate(found.rows)
        ]
        return replace(found, rows=rows)

    source("dials", argument="[N]", summary="dials", task="dial")(grouped)
    data = load("dials")
    found = [set(split.groups) for split in data.splits]
    assert sum(map(len, found)) == len(set.union(*found)) == 12
    assert batches(data)[0].targets.dtype == torch.int64


def test_a_source_of_ones_own_is_one_like_others(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"dials", "points"} <= {spec.name for spec in list_specs()}
    assert task_name("dials:3") == "dial"
    assert parse("dials:3")[1] == "3"
    assert main(["data", "check", "dials", "--json"]) == 0
    assert '"train": 60' in capsys.readouterr().out
    with pytest.raises(UserError, match="Did you mean 'dials'"):
        parse("dial")
    with pytest.raises(UserError, match=r"data\.masks"):
        load("dials", masks="exclusive")
    with pytest.raises(UserError, match="digits"):
        keymix.source("digits", summary="mine")(dials)
    with pytest.raises(UserError, match="film"):
        keymix.source("mine", summary="mine", kind="film")(dials)


def test_targets_that_do_not_fit_their_inputs_are_refused(sources: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        array_rows("five", np.zeros((5, 1, 2, 2), dtype=np.uint8), np.zeros(4))
    source("dials", summary="dials")(dials)  # classes, of which none is named
    with pytest.raises(UserError, match="no classes"):
        load("dials")


@pytest.mark.parametrize("spec", ["dials", "points"])
def test_a_check_reads_all_of_them(sources: Path, spec: str) -> None:
    report = check(spec)
    assert report.fit
    assert "classes" not in report.facts
    assert sum(report.facts["splits"].values()) == sum(report.facts["images"].values())
    assert report.facts["sizes"]["different"] == (1 if spec == "dials" else 15)
    found = quick_check(load(spec))
    assert found.fit
    assert found.facts["looked_at"]["images"] == found.facts["looked_at"]["of"]


def test_a_check_finds_copies_with_other_targets(sources: Path) -> None:
    def copied(argument: str, faults: Faults) -> Source:
        found = dials(argument, faults)
        first, second, *others = found.rows
        return replace(found, rows=[first, replace(second, image=first.image), *others])

    source("dials", argument="[N]", summary="dials", task="dial")(copied)
    found = {finding.what: finding.count for finding in check("dials").findings}
    assert found["images with more than one value"] == 1


@pytest.mark.parametrize(("dtype", "white"), [(np.uint16, 65535), (np.float32, 1)])
@pytest.mark.parametrize("side", [12, 160])
def test_images_of_other_types_are_seen_as_those_of_8_bits(
    sources: Path, dtype: type, white: int, side: int
) -> None:
    whole = np.random.default_rng(5).integers(0, 256, (40, 1, side, side), dtype=np.uint8)

    def opened(argument: str, faults: Faults, pixels: np.ndarray) -> Source:
        return Source(rows=array_rows("deep", pixels, np.arange(40) / 40), in_chans=1)

    found = []
    for pixels in (whole, (whole.astype(np.float64) * white / 255).astype(dtype)):
        spec = "plain" if pixels is whole else "deep"
        source(spec, summary=spec, task="dial")(partial_source(opened, pixels))
        data = load(spec)
        augment = Augment(flip=True, random_resized_crop=(0.5, 1.0))
        found.append((data, batches(data, augment if side > 128 else Augment(flip=True))))
    (plain, wanted), (deep, given) = found
    if dtype is np.float32:
        with pytest.raises(UserError, match=r"augment\.rand_augment"):
            batches(deep, Augment(rand_augment=(2, 9)))
    assert deep.mean == pytest.approx(plain.mean, abs=2e-3)
    assert deep.std == pytest.approx(plain.std, abs=2e-3)
    for one, other in zip(wanted, given, strict=True):
        assert other.images.dtype == torch.float32
        # one grey level, and what the bicubic filter loses where 8 bits end
        assert float((one.images - other.images).abs().mean()) < 0.1 * float(one.images.std())


def partial_source(function: Any, pixels: np.ndarray) -> Any:
    def opened(argument: str, faults: Faults) -> Source:
        return function(argument, faults, pixels)

    return opened


ALL = {
    "digits": Augment(crop_padding=1, flip=True, rand_augment=(2, 9)),
    "photos": Augment(flip=True, rand_augment=(2, 9), erasing=0.5),
    "scenes": Augment(flip=True),
    "moving_digits:100": Augment(flip=True, snn_wide=True),
}


@pytest.mark.parametrize("spec", ALL)
def test_a_sample_is_a_function_of_seed_epoch_and_position(sources: Path, spec: str) -> None:
    """Whatever was read before, in batches of whatever size, by 0, 1 or 3 workers."""
    if spec == "photos":

        def photos(argument: str, faults: Faults) -> Source:
            rows = [replace(row, target=k % 2) for k, row in enumerate(files(sources, named))]
            return Source(rows=rows, classes=("even", "odd"))

        source("photos", summary="photos")(photos)
    size = {"photos": 160, "scenes": (30, 36)}.get(spec)
    data = load(spec, image_size=size)  # type: ignore[arg-type]

    def served(batch_size: int, workers: int, epoch: int) -> dict[int, list[bytes]]:
        loader = Loader(
            data.train,
            data,
            batch_size=batch_size,
            train=True,
            augment=ALL[spec],
            seed=7,
            workers=workers,
        )
        found = {}
        for now in (epoch, 0, epoch) if workers == 0 else (epoch,):
            loader.set_epoch(now)
            for batch in loader:
                targets = [*batch.targets]
                for i, image, target in zip(
                    batch.index.tolist(), batch.images, targets, strict=True
                ):
                    parts = target.values() if isinstance(target, dict) else [target]
                    found[i] = [each.numpy().tobytes() for each in (image, *parts)]
        return found

    once = served(4, 0, epoch=2)
    assert len(once) == len(data.train)
    assert served(7, 0, epoch=2) == once
    assert served(3, 1, epoch=2) == once
    assert served(5, 3, epoch=2) == once
    assert served(4, 0, epoch=1) != once
