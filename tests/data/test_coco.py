# SPDX-License-Identifier: Apache-2.0
"""Images with instances: what is read, moved, resized and served is what COCO's file says."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coco_sets import write
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keymix.data import Augment, ImageData, Loader, load
from keymix.data.decode import fitted_size
from keymix.data.instances import Instances
from keymix.data.random_parameters import flips, short_side
from keymix.data.record import DataRecord
from keymix.data.shown import file_pixels, fitted
from keymix.data.specs import kind_of
from keymix.errors import UserError
from keymix.records import from_json, to_json

WITHIN = (60, 80)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "set")


@pytest.fixture
def data(root: Path) -> ImageData:
    return load(f"coco:{root}", image_size=WITHIN)


def instances(data: ImageData, split: str = "train") -> list[Instances]:
    return [row.target for row in getattr(data, split).rows]


def tight(mask: Tensor) -> list[int]:
    """The box of a mask."""
    rows, columns = torch.nonzero(mask, as_tuple=True)
    return [int(x) for x in (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)]


def test_classes_are_in_the_order_of_their_ids(data: ImageData) -> None:
    assert data.classes == ("ant", "cat", "dog")
    assert data.record().class_ids == (3, 7, 90)
    assert data.task.name == "detection"


def test_val_is_test_and_validation_is_split_from_train(data: ImageData) -> None:
    assert [len(split) for split in data.splits] == [7, 1, 3]
    assert data.test.origin == "val"
    assert [each.image_id for each in instances(data, "test")] == [9, 10, 11]
    learned = {each.image_id for each in instances(data) + instances(data, "val")}
    assert learned == set(range(1, 9))


def test_a_test_split_of_its_own_is_kept(tmp_path: Path) -> None:
    root = write(tmp_path / "set", {"train": 4, "val": 3, "test": 2})
    data = load(f"coco:{root}", image_size=WITHIN)
    assert [(len(split), split.origin) for split in data.splits] == [
        (4, "train"),
        (3, "val"),
        (2, "test"),
    ]


def test_train_alone_gives_up_a_part_for_test(tmp_path: Path) -> None:
    root = write(tmp_path / "set", {"train2014": 10})
    data = load(f"coco:{root}", image_size=WITHIN)
    assert [len(split) for split in data.splits] == [7, 1, 2]


def test_the_truth_is_what_the_file_says(root: Path, data: ImageData) -> None:
    told = json.loads((root / "annotations" / "instances_val2017.json").read_text())
    sizes = {entry["id"]: (entry["height"], entry["width"]) for entry in told["images"]}
    class_ids = data.facts.class_ids or ()
    for found in instances(data, "test"):
        truth, key = found.truth(), found.image_id
        own = [each for each in told["annotations"] if each["image_id"] == key]
        assert tuple(truth["size"].tolist()) == sizes[key] == truth["masks"].shape[1:]
        assert truth["boxes"].shape == (len(own), 4)
        for k, each in enumerate(own):
            x, y, w, h = each["bbox"]
            assert truth["boxes"][k].tolist() == [x, y, x + w, y + h]
            assert class_ids[int(truth["labels"][k]) - 1] == each["category_id"]
            assert truth["area"][k] == each["area"]
            assert truth["iscrowd"][k] == bool(each["iscrowd"])


def _coco(path: Path) -> Any:
    api = pytest.importorskip("pycocotools.coco")
    with contextlib.redirect_stdout(io.StringIO()):
        return api.COCO(str(path))


def _check_masks(found: list[Instances], path: Path) -> int:
    """Compare masks at the images' own sizes with those of COCO's own code; how many."""
    told, count = _coco(path), 0
    for one in found:
        truth, encoded = one.truth(), one.encoded() or []
        own = told.loadAnns(told.getAnnIds(imgIds=one.image_id))
        assert len(own) == len(truth["masks"]) == len(encoded)
        for k, each in enumerate(own):
            np.testing.assert_array_equal(truth["masks"][k].numpy(), told.annToMask(each))
            theirs = told.annToRLE(each)
            assert [*encoded[k]["size"]] == [*theirs["size"]]  # type: ignore[misc]
            assert encoded[k]["counts"] == theirs["counts"]
            count += 1
    return count


def test_masks_are_those_of_cocos_own_code(root: Path, data: ImageData) -> None:
    file = root / "annotations" / "instances_val2017.json"
    assert _check_masks(instances(data, "test"), file) == 5


def test_compressed_run_lengths_are_the_same_as_plain_ones(tmp_path: Path) -> None:
    mask = pytest.importorskip("pycocotools.mask")

    def compress(found: dict[str, Any]) -> None:
        for each in found["annotations"]:
            if isinstance(each["segmentation"], dict):
                size = each["segmentation"]["size"]
                counts = mask.frPyObjects(each["segmentation"], *size)["counts"]
                each["segmentation"]["counts"] = counts.decode()

    plain = load(f"coco:{write(tmp_path / 'one')}")
    packed = load(f"coco:{write(tmp_path / 'two', change=compress)}")
    assert plain.facts.fingerprint == packed.facts.fingerprint
    one, two = (instances(each) for each in (plain, packed))
    assert any(each.crowd.any() for each in one)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.truth()["masks"], b.truth()["masks"])


@given(
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    st.tuples(st.integers(1, 2000), st.integers(1, 2000)),
)
def test_a_size_keeps_its_proportions(size: tuple[int, int], within: tuple[int, int]) -> None:
    """The short side, or the long one, is met to a pixel, and neither is passed."""
    short, long = sorted(within)
    found = fitted_size(size, within)
    scale = min(short / min(size), long / max(size))
    assert found == fitted_size(size, (long, short))
    assert min(found) <= short
    assert max(found) <= long
    assert all(abs(a - scale * b) <= 0.5 or a == 1 for a, b in zip(found, size, strict=True))


@pytest.mark.parametrize(
    ("size", "wanted"),
    [((480, 640), (800, 1067)), ((640, 480), (1067, 800)), ((218, 640), (454, 1333))],
)
def test_coco_sizes(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert fitted_size(size, (800, 1333)) == wanted


def test_images_keep_their_proportions_and_boxes_follow(data: ImageData) -> None:
    for i, one in enumerate(instances(data)):
        image, found, own = data.train.read(i), data.train.target(i), one.size
        size = fitted_size(own, WITHIN)
        assert image.shape[1:] == size == found["masks"].shape[1:]
        truth = one.truth()
        scale = torch.tensor([size[1] / own[1], size[0] / own[0]] * 2)
        torch.testing.assert_close(found["boxes"], truth["boxes"] * scale)
        grown = size[0] * size[1] / (own[0] * own[1])
        torch.testing.assert_close(found["area"], truth["area"] * grown)
        for box, mask in zip(found["boxes"].tolist(), found["masks"], strict=True):
            assert tight(mask) == pytest.approx(box, abs=1)
    assert data.image_size == WITHIN
    assert data.record().image_size == WITHIN


def test_a_square_size_bounds_the_long_side(root: Path) -> None:
    data = load(f"coco:{root}", image_size=32)
    assert {max(data.train.read(i).shape[1:]) for i in range(len(data.train))} == {32}
    assert load(f"coco:{root}").image_size == (800, 1333)


AUGMENT = Augment(flip=True, multi_scale=(20, 60))


def served(data: ImageData, *, workers: int, epoch: int = 0, size: int = 3) -> dict[int, Any]:
    loader = Loader(
        data.train, data, batch_size=size, train=True, augment=AUGMENT, seed=5, workers=workers
    )
    loader.set_epoch(epoch)
    return {
        int(i): (image, target)
        for batch in loader
        for image, target, i in zip(batch.images, batch.targets, batch.index, strict=True)
    }


def same(one: Any, two: Any) -> bool:
    return torch.equal(one[0], two[0]) and all(
        torch.equal(one[1][name], two[1][name]) for name in one[1]
    )


def test_a_batch_is_a_list_of_images_and_mappings(data: ImageData) -> None:
    types = {
        "boxes": torch.float32,
        "labels": torch.int64,
        "masks": torch.uint8,
        "iscrowd": torch.bool,
        "area": torch.float32,
    }
    found = served(data, workers=0)
    assert len(found) == len(data.train)
    assert any(not len(target["boxes"]) for _, target in found.values())
    for image, target in found.values():
        assert image.dtype == torch.float32
        assert {name: each.dtype for name, each in target.items()} == types
        count = len(target["boxes"])
        assert target["boxes"].shape == (count, 4)
        assert target["masks"].shape == (count, *image.shape[1:])
        assert all(len(each) == count for each in target.values())


@pytest.mark.slow
def test_workers_make_the_same_batches(data: ImageData) -> None:
    here, there = (served(data, workers=workers) for workers in (0, 2))
    assert here.keys() == there.keys()
    assert all(same(here[i], there[i]) for i in here)


def test_an_image_varies_with_seed_epoch_and_place_alone(data: ImageData) -> None:
    first, again, by_one = (served(data, workers=0, size=size) for size in (3, 3, 1))
    assert all(same(first[i], again[i]) and same(first[i], by_one[i]) for i in first)
    later = [served(data, workers=0, epoch=epoch) for epoch in range(1, 8)]
    for i in first:
        own = data.train.size(i)
        short = [short_side(i, 20, 60, seed=5, epoch=epoch) for epoch in range(1, 8)]
        wanted = [fitted_size(own, (side, WITHIN[1])) for side in short]
        assert [tuple(found[i][0].shape[1:]) for found in later] == wanted
        assert len(set(wanted)) > 2


def test_flip_moves_image_boxes_and_masks(data: ImageData) -> None:
    index = np.arange(len(data.train))
    mirrored = flips(index, seed=5, epoch=0)
    assert 0 < mirrored.sum() < len(index)
    targets, found = instances(data), served(data, workers=0)
    for i in index.tolist():
        image, target = found[i]
        size = (image.shape[1], image.shape[2])
        plain = targets[i].at(size)
        for box, mask in zip(target["boxes"].tolist(), target["masks"], strict=True):
            assert tight(mask) == pytest.approx(box, abs=1)
        masks = plain["masks"].flip(-1) if mirrored[i] else plain["masks"]
        assert torch.equal(target["masks"], masks)
        assert torch.equal(target["labels"], plain["labels"])


def test_multi_scale_steps_as_papers_do() -> None:
    seen = {short_side(i, 480, 800, seed=0, epoch=epoch) for i in range(50) for epoch in range(10)}
    assert seen == set(range(480, 801, 32))
    assert {short_side(i, 30, 30, seed=0, epoch=0) for i in range(9)} == {30}
    few = {short_side(i, 60, 64, seed=0, epoch=epoch) for i in range(50) for epoch in range(10)}
    assert few == {60, 61, 62, 63, 64}


@pytest.mark.parametrize(
    ("augment", "culprit"),
    [
        (Augment(erasing=0.5), "augment.erasing"),
        (Augment(rand_augment=(2, 9)), "augment.rand_augment"),
        (Augment(auto_augment="rand-m9"), "augment.auto_augment"),
        (Augment(crop_padding=2), "augment.crop_padding"),
        (Augment(vertical_flip=True), "augment.vertical_flip"),
        (Augment(shift_scale_rotate=True), "augment.shift_scale_rotate"),
        (Augment(snn_wide=True), "augment.snn_wide"),
        (Augment(multi_scale=(40, 81)), "augment.multi_scale"),
    ],
)
def test_other_augmentation_is_refused(data: ImageData, augment: Augment, culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        Loader(data.train, data, batch_size=2, train=True, augment=augment)


def test_multi_scale_is_refused_for_other_data() -> None:
    digits = load("digits")
    with pytest.raises(UserError, match=r"augment.multi_scale=\(20, 60\).*to none"):
        Loader(digits.train, digits, batch_size=2, train=True, augment=AUGMENT)


@pytest.mark.parametrize("given_sides", [(60, 20), (0, 20), (20,), (20, 1e9)])
def test_multi_scale_is_two_sides(given_sides: Any) -> None:
    with pytest.raises(UserError, match=r"augment\.multi_scale"):
        Augment(multi_scale=given_sides)


def test_prediction_sees_what_evaluation_sees(root: Path, data: ImageData) -> None:
    record = data.record()
    for i in range(3):
        pixels = file_pixels(Path(data.test.ids(i)), record)
        assert torch.equal(fitted(pixels, record, WITHIN), data.test.read(i))
        smaller = fitted(pixels, record, (30, 35))
        assert smaller.shape[1:] == fitted_size(pixels.shape[1:], (30, 35))  # type: ignore[arg-type]


def _moved_point(found: dict[str, Any]) -> None:
    found["annotations"][0]["segmentation"][0][0] += 0.5


def _other_class(found: dict[str, Any]) -> None:
    found["annotations"][0]["category_id"] = 90


def _crowd(found: dict[str, Any]) -> None:
    found["annotations"][0]["iscrowd"] = 1


def _other_run(found: dict[str, Any]) -> None:
    each = next(a for a in found["annotations"] if isinstance(a["segmentation"], dict))
    each["segmentation"]["counts"] = [1, *each["segmentation"]["counts"][1:]]
    each["segmentation"]["counts"][2] -= 1


def _other_area(found: dict[str, Any]) -> None:
    found["annotations"][0]["area"] += 1


def _shuffled(found: dict[str, Any]) -> None:
    by_image = sorted(found["annotations"], key=lambda each: (-each["image_id"], each["id"]))
    found["annotations"] = by_image


def test_the_fingerprint_is_of_all_annotations(tmp_path: Path) -> None:
    plain = load(f"coco:{write(tmp_path / 'plain')}").facts.fingerprint
    changes = (_moved_point, _other_class, _crowd, _other_run, _other_area)
    others = {
        load(f"coco:{write(tmp_path / str(k), change=change)}").facts.fingerprint
        for k, change in enumerate(changes)
    }
    assert len(others | {plain}) == 1 + len(changes)
    same = load(f"coco:{write(tmp_path / 'same', change=_shuffled)}").facts.fingerprint
    assert same == plain


def test_instances_travel_to_workers(data: ImageData) -> None:
    some = instances(data)
    for one, sent in zip(some, pickle.loads(pickle.dumps(some)), strict=True):
        assert sent.content() == one.content()
    assert len({one.content() for one in some}) == len(some)


def _as_files(root: Path, layout: str) -> Path:
    """Put train and val of a made set where another layout has them."""
    notes = root / "annotations"
    for split in ("train", "val"):
        file, folder = notes / f"instances_{split}2017.json", root / f"{split}2017"
        if layout == "images/":
            (root / "images").mkdir(exist_ok=True)
            folder.rename(root / "images" / folder.name)
        elif layout == "train.json":
            file.rename(root / f"{split}.json")
            folder.rename(root / split)
        elif layout == "annotations/train.json":
            file.rename(notes / f"{split}.json")
            folder.rename(root / split)
        elif layout == "_annotations.coco.json":
            own = root / {"val": "valid"}.get(split, split)
            folder.rename(own)
            file.rename(own / layout)
    return root


@pytest.mark.parametrize(
    "layout", ["images/", "train.json", "annotations/train.json", "_annotations.coco.json"]
)
def test_other_layouts(tmp_path: Path, layout: str) -> None:
    plain = load(f"coco:{write(tmp_path / 'plain')}", image_size=WITHIN)
    root = _as_files(write(tmp_path / "other"), layout)
    found = load(f"coco:{root}", image_size=WITHIN)
    assert found.facts.fingerprint == plain.facts.fingerprint
    assert [len(split) for split in found.splits] == [7, 1, 3]
    if layout != "train.json":
        assert kind_of(root) == "coco"


def test_boxes_are_cut_at_the_border_for_training_alone(tmp_path: Path) -> None:
    def shift(found: dict[str, Any]) -> None:
        found["annotations"][0]["bbox"] = [-0.5, 6, 12.5, 20.25]

    root = write(tmp_path / "set", {"train2017": 3, "val2017": 3}, change=shift)
    data = load(f"coco:{root}", image_size=WITHIN, val_fraction=0.34)
    by_id = {each.image_id: each for each in instances(data) + instances(data, "val")}
    assert by_id[1].truth()["boxes"][0, 0] == -0.5
    assert by_id[1].at((80, 60))["boxes"][0, 0] == 0


def test_the_record_round_trips(data: ImageData) -> None:
    record = data.record()
    assert from_json(DataRecord, json.loads(json.dumps(to_json(record))), where="data") == record
    assert "class_ids" not in to_json(load("digits").record())


def test_grey_sets_have_one_channel_where_asked(root: Path) -> None:
    data = load(f"coco:{root}", channels=1, image_size=WITHIN)
    assert data.train.read(0).shape[0] == data.in_chans == 1
    assert len(data.mean) == 1


def test_real_images(real_data: Path) -> None:
    root = real_data / "coco-subset"
    if not root.is_dir():
        pytest.skip("no coco-subset")
    data = load(f"coco:{root}")
    assert [len(split) for split in data.splits] == [58, 6, 36]
    assert (len(data.classes), data.classes[0]) == (80, "person")
    assert (data.facts.class_ids or ())[-1] == 90
    file = root / "annotations" / "instances_val2017.json"
    assert _check_masks(instances(data, "test"), file) == 200
    image, found = data.train.read(0), data.train.target(0)
    assert min(image.shape[1:]) == 800 or max(image.shape[1:]) == 1333
    assert found["masks"].shape[1:] == image.shape[1:]
    loader = Loader(
        data.train, data, batch_size=8, train=True, augment=Augment(multi_scale=(480, 800))
    )
    batch = next(iter(loader))
    assert all(min(image.shape[1:]) in range(480, 801, 32) for image in batch.images)
