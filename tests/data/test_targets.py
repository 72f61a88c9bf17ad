# SPDX-License-Identifier: Apache-2.0
"""Targets that are no classes: numbers of images, and points on images of unequal sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import picture
from torchvision import tv_tensors

from keymix.cli import main
from keymix.data import Augment, ImageData, Loader, load
from keymix.data import specs as known
from keymix.data.augment import check_augment
from keymix.data.check import check, quick_check
from keymix.data.decode import fitted_size
from keymix.data.kinds import IMAGE, PLACE
from keymix.data.random_parameters import flips
from keymix.data.sources.base import Arrays, Faults, Source
from keymix.data.sources.folder import Files
from keymix.data.specs import DataSpec, list_specs, parse, register_source, task_name
from keymix.data.targets import ArrayTargets, ClassTargets, Digest, RaggedTargets, Targets
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


def dials(argument: str, faults: Faults) -> Source:
    """60 grey images of 12x12 pixels; the target is the mean, to which an argument adds."""
    del faults
    pixels = np.random.default_rng(3).integers(0, 256, (60, 1, 12, 12), dtype=np.uint8)
    values = pixels.mean((1, 2, 3)) / 255 + float(argument or 0)
    return Source(train=Arrays("dials", pixels, ArrayTargets(values)), in_chans=1)


def points(root: Path, wrap: Callable[[np.ndarray, int], np.ndarray | torch.Tensor]) -> Source:
    """40 colour images of unequal sizes; image k has k % 4 points."""
    found = []
    for k, (height, width) in enumerate(SIDES):
        file = root / f"{k}.png"
        if not file.exists():
            picture(k, (width, height)).save(file)
        random = np.random.default_rng(k)
        found.append(wrap(random.uniform(0, (width, height), (k % 4, 2)).astype(np.float32), k))
    names = [f"{k}.png" for k in range(len(SIDES))]
    return Source(train=Files(root, names, RaggedTargets(found)))


def key_points(array: np.ndarray, k: int) -> torch.Tensor:
    return tv_tensors.KeyPoints(array, canvas_size=SIDES[k])


class Named(Targets):
    """Several tensors by name: a box that moves with its image, a number and a byte that do not."""

    kind = PLACE
    moves = True

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, i: int) -> dict[str, torch.Tensor]:
        row = int(self.rows[i])
        size = SIDES[row]
        box = torch.tensor([[1.0, 2.0, size[1] / 2, size[0] / 2]])
        return {
            "box": tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=size),
            "number": torch.tensor(row),
            "byte": torch.full((row % 3, 2), row, dtype=torch.uint8),
        }

    def update_digest(self, digest: Digest) -> None:
        digest.update(self.rows.astype("<i8").tobytes())

    def select(self, rows: np.ndarray) -> Named:
        return Named(self.rows[rows])


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Path]:
    """Register a source of numbers, one of points and one of points that can be moved."""
    fits = replace(task("scene", whole=True), fits=True)
    for one in (task("dial"), task("point", whole=True), fits):
        register_task(one)

    def open_points(argument: str, faults: Faults) -> Source:
        del argument, faults
        return points(tmp_path, lambda array, k: array)

    def open_key_points(argument: str, faults: Faults) -> Source:
        del argument, faults
        return points(tmp_path, key_points)

    register_source(
        DataSpec(name="dials", argument="[N]", summary="dials", open_with=dials, task="dial")
    )

    def open_scenes(argument: str, faults: Faults) -> Source:
        del argument, faults
        files = points(tmp_path, key_points).train
        names = [f"{k}.png" for k in range(len(files))]
        return Source(train=Files(tmp_path, names, Named(np.arange(len(names)))))

    register_source(
        DataSpec(
            name="scenes", summary="boxes", open_with=open_scenes, task="scene", target="place"
        )
    )
    for name, opened in (("points", open_points), ("key_points", open_key_points)):
        register_source(
            DataSpec(name=name, summary="points", open_with=opened, task="point", target="place")
        )
    yield tmp_path
    for name in ("dials", "points", "key_points", "scenes"):
        known._OWN.pop(name)
    for name in ("dial", "point", "scene"):
        _OWN.pop(name)


def batches(data: ImageData, augment: Augment | None = None, **options: int) -> list:
    loader = Loader(data.train, data, batch_size=4, train=True, augment=augment, **options)
    return list(loader)


def test_numbers_are_loaded_split_and_served(sources: Path) -> None:
    data = load("dials")
    assert data.classes == ()
    assert data.record().task == data.task.name == "dial"
    rows = np.concatenate([split.rows for split in data.splits])
    assert sorted(rows.tolist()) == list(range(60))
    whole = dials("", Faults()).train
    for batch in batches(data, Augment(flip=True, crop_padding=1)):
        assert batch.targets.dtype == torch.float32
        wanted = [whole.targets.read(int(data.train.rows[i])) for i in batch.index]
        assert torch.equal(batch.targets, torch.stack(wanted))
    with pytest.raises(UserError, match="values"):
        _ = data.train.labels
    few = load("dials", limit=20)
    assert len(few.train) + len(few.val) == 20
    with pytest.raises(UserError, match="limit=1 is below two images"):
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
    assert data.train.crop_pct == 1
    seen = 0
    mean, std = (torch.tensor(each)[:, None, None] for each in (data.mean, data.std))
    for batch in batches(data, Augment(), workers=workers):
        assert isinstance(batch.images, list)
        assert isinstance(batch.targets, list)
        for image, target, i in zip(batch.images, batch.targets, batch.index, strict=True):
            row = int(data.train.rows[i])
            assert image.shape == (3, *SIDES[row])
            torch.testing.assert_close(
                image, (data.train.read(int(i)) / 255 - mean) / std, atol=1e-5, rtol=1e-5
            )
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
        for image, target, i in zip(batch.images, batch.targets, batch.index.tolist(), strict=True):
            assert type(target) is torch.Tensor
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
    own = load("key_points")
    for i in range(len(data.train)):
        row = int(data.train.rows[i])
        assert data.train.read(i).shape == (3, 40, 48)
        scale = torch.tensor([48 / SIDES[row][1], 40 / SIDES[row][0]])
        wanted = own.train.targets.read(i).as_subclass(torch.Tensor) * scale
        torch.testing.assert_close(
            data.train.targets.read(i).as_subclass(torch.Tensor), wanted, atol=1e-3, rtol=1e-4
        )
    assert isinstance(next(iter(batches(data))).images, list)
    with pytest.raises(UserError, match=r"data points: .*image_size"):
        load("points", image_size=40)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_several_tensors_by_name_are_served_with_their_types(sources: Path, workers: int) -> None:
    data = load("scenes", image_size=(30, 36))
    moved = set()
    for batch in batches(data, Augment(flip=True), workers=workers):
        assert isinstance(batch.targets, list)
        for image, target, i in zip(batch.images, batch.targets, batch.index.tolist(), strict=True):
            row = int(data.train.rows[i])
            size = fitted_size(SIDES[row], (30, 36))
            assert image.shape[1:] == size
            assert [type(each) for each in target.values()] == [torch.Tensor] * 3
            assert target["byte"].dtype == torch.uint8
            assert target["number"] == row
            scale = torch.tensor([size[1] / SIDES[row][1], size[0] / SIDES[row][0]] * 2)
            left, top, right, bottom = (Named(data.train.rows).read(i)["box"][0] * scale).tolist()
            mirrored = bool(flips(np.array([i]), seed=0, epoch=0)[0])
            if mirrored:
                left, right = size[1] - right, size[1] - left
            assert target["box"][0].tolist() == pytest.approx([left, top, right, bottom], abs=1e-3)
            moved.add(mirrored)
    assert moved == {True, False}


def test_several_tensors_by_name_are_told_apart(sources: Path) -> None:
    targets = Named(np.array([0, 3, 6]))
    assert len({targets.content(i) for i in range(3)}) == 3
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
        source = dials(argument, faults)
        groups = [f"patient{k // 5}" for k in range(60)]
        targets = ArrayTargets(np.arange(60), groups=groups)
        assert source.train.in_memory is not None
        return replace(source, train=Arrays("dials", source.train.in_memory, targets))

    register_source(replace(parse("dials")[0], open_with=grouped))
    data = load("dials")
    found = [set(split.targets.groups or ()) for split in data.splits]
    assert sum(map(len, found)) == len(set.union(*found)) == 12
    assert batches(data)[0].targets.dtype == torch.int64


def test_a_registered_source_is_one_like_others(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"dials", "points"} <= {spec.name for spec in list_specs()}
    assert task_name("dials:3") == "dial"
    assert parse("dials:3")[1] == "3"
    assert main(["data", "check", "dials", "--json"]) == 0
    assert '"train": 60' in capsys.readouterr().out
    with pytest.raises(UserError, match="Did you mean 'dials'"):
        parse("dial")
    with pytest.raises(UserError, match=r"data\.masks = 'exclusive': data dials holds no masks"):
        load("dials", masks="exclusive")
    with pytest.raises(UserError, match="digits"):
        register_source(DataSpec(name="digits", summary="mine", open_with=dials))
    with pytest.raises(UserError, match="open_with"):
        register_source(DataSpec(name="mine", summary="mine"))
    with pytest.raises(UserError, match="film"):
        register_source(DataSpec(name="mine", summary="mine", open_with=dials, kind="film"))


def test_targets_that_do_not_fit_their_inputs_are_refused(sources: Path) -> None:
    with pytest.raises(UserError, match="5 inputs, but 4 values"):
        Arrays("five", np.zeros((5, 1, 2, 2), dtype=np.uint8), ArrayTargets(np.zeros(4)))

    def unnamed(argument: str, faults: Faults) -> Source:
        source = dials(argument, faults)
        assert source.train.in_memory is not None
        return replace(source, train=Arrays("x", source.train.in_memory, np.arange(60) % 2))

    register_source(replace(parse("dials")[0], open_with=unnamed))
    with pytest.raises(UserError, match="no classes"):
        load("dials")


@pytest.mark.parametrize(
    "targets",
    [
        ClassTargets(np.array([2, 0, 1, 1])),
        ArrayTargets(np.array([0.5, 1, 2, 3])),
        ArrayTargets(np.arange(8).reshape(4, 2)),
        RaggedTargets([np.ones((k, 2)) for k in range(4)]),
    ],
    ids=lambda targets: type(targets).__name__,
)
def test_a_selection_is_what_it_selects(targets: Targets) -> None:
    rows = np.array([1, 3])
    some = targets.select(rows)
    assert len(some) == 2
    assert all(torch.equal(some.read(k), targets.read(row)) for k, row in enumerate((1, 3)))
    if targets.values is not None:
        assert torch.equal(targets.values, torch.stack([targets.read(i) for i in range(4)]))
    digests = []
    for each in (targets, some, targets.select(np.arange(4))):
        digest = hashlib.sha256()
        each.update_digest(digest)
        digests.append(digest.hexdigest())
    assert digests[0] == digests[2] != digests[1]


def test_strata_are_classes_where_there_are_any() -> None:
    labels = np.array([2, 0, 1, 1])
    assert ClassTargets(labels).strata.tolist() == labels.tolist()
    assert ArrayTargets(labels).strata.tolist() == [0] * 4


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
        source = dials(argument, faults)
        assert isinstance(source.train, Arrays)
        pixels = source.train.in_memory.copy()
        pixels[1] = pixels[0]
        return replace(source, train=Arrays("dials", pixels, source.train.targets))

    register_source(replace(parse("dials")[0], open_with=copied))
    found = {finding.what: finding.count for finding in check("dials").findings}
    assert found["images with more than one value"] == 1
