# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from keymix.data import Augment, Loader, load
from keymix.data.dataset import ImageData
from keymix.data.frame_augment import OPERATIONS, augmented_frames
from keymix.data.mixing import Mixing
from keymix.data.random_parameters import flips
from keymix.data.streams import Stream, uniforms
from keymix.errors import UserError

BOTH = Augment(flip=True, snn_wide=True)


@pytest.fixture(scope="module")
def data() -> ImageData:
    return load("moving_digits:150", time_steps=5)


def served(data: ImageData, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An epoch, in the order of the split."""
    loader = Loader(data.train, data, **{"batch_size": 16, "train": True, "seed": 3, **options})
    loader.set_epoch(2)
    batches = list(loader)
    index = torch.cat([b.index for b in batches])
    order = index.argsort()
    images, targets = (torch.cat([b[k] for b in batches])[order] for k in (0, 1))
    return images, targets, index[order]


def test_batches_are_frames_of_counts(data: ImageData) -> None:
    images, targets, index = served(data)
    assert images.shape == (len(data.train), 5, 2, 32, 32)
    assert images.dtype == torch.float32
    for i in range(0, len(index), 17):
        assert (images[i] == data.train.read(i)).all()
        assert targets[i] == data.train.labels[i]


@pytest.mark.parametrize("augment", [None, BOTH])
def test_workers_batches_and_ranks_change_nothing(data: ImageData, augment: Augment | None) -> None:
    one = served(data, augment=augment)
    for options in ({"workers": 2}, {"batch_size": 7}):
        for ours, theirs in zip(one, served(data, augment=augment, **options), strict=True):
            assert (ours == theirs).all()
    ranks = [
        Loader(
            data.train,
            data,
            batch_size=8,
            train=True,
            augment=augment,
            seed=3,
            rank=r,
            world_size=2,
        )
        for r in (0, 1)
    ]
    for loader in ranks:
        loader.set_epoch(2)
        for batch in loader:
            assert (batch.images == one[0][batch.index]).all()


def test_an_epoch_can_be_entered_in_the_middle(data: ImageData) -> None:
    loader = Loader(data.train, data, batch_size=16, train=True, augment=BOTH)
    whole, rest = list(loader.batches()), list(loader.batches(start=3))
    assert len(rest) == len(whole) - 3
    assert all((a.images == b.images).all() for a, b in zip(whole[3:], rest, strict=True))


def test_evaluation_shows_frames_as_they_are(data: ImageData) -> None:
    loader = Loader(data.test, data, batch_size=16, train=False, augment=BOTH)
    images = torch.cat([batch.images for batch in loader])
    assert (images == torch.stack([data.test.read(i) for i in range(len(data.test))])).all()


def test_augmentation_changes_with_seed_epoch_and_index() -> None:
    frames = torch.randint(0, 9, (1, 3, 2, 32, 32), dtype=torch.uint8).expand(40, -1, -1, -1, -1)
    index = np.arange(40)

    def made(index: Any = index, seed: int = 1, epoch: int = 0) -> torch.Tensor:
        return augmented_frames(frames, index, flip=True, wide=True, seed=seed, epoch=epoch)

    base = made()
    assert (made() == base).all()
    assert len({made().flatten(1)[i].numpy().tobytes() for i in range(40)}) > 20
    for changed in ({"seed": 2}, {"epoch": 1}, {"index": index + 40}):
        assert (made(**changed) != base).any()
    assert (made(index=index[::-1].copy()) == base.flip(0)).all()


def test_augmentation_is_alike_for_all_frames_and_polarities() -> None:
    one = torch.randint(0, 9, (64, 1, 1, 24, 32), dtype=torch.uint8)
    frames = one.expand(-1, 6, 2, -1, -1).contiguous()
    made = augmented_frames(frames, np.arange(64), flip=True, wide=True, seed=0, epoch=0)
    assert made.shape == frames.shape
    assert (made == made[:, :1, :1]).all()
    assert (made != frames).any()


def by_hand(image: np.ndarray, i: int, seed: int, epoch: int) -> np.ndarray:
    """One image, pixel by pixel."""
    H, W = image.shape
    draws = uniforms(5, seed, epoch, Stream.FRAMES, i)[0]
    name, much = OPERATIONS[int(draws[0] * 5)], 2 * draws[1] - 1
    mirrored = flips(np.array([i]), seed=seed, epoch=epoch)[0]
    shown = image[:, ::-1] if mirrored else image
    made = np.zeros_like(image)
    side = [1 + int(draws[2] * 30 / 128 * n) for n in (H, W)]
    corner = [int(draws[3 + k] * n) - side[k] // 2 for k, n in enumerate((H, W))]
    for y in range(H):
        for x in range(W):
            u, v = x - (W - 1) / 2, y - (H - 1) / 2
            if name == "shear":
                u += much * 0.3 * v
            if name == "rotate":
                a = np.deg2rad(30) * much
                u, v = np.cos(a) * u + np.sin(a) * v, np.cos(a) * v - np.sin(a) * u
            from_x, from_y = u + (W - 1) / 2, v + (H - 1) / 2
            from_x -= much * 5 / 128 * W if name == "translate_x" else 0
            from_y -= much * 5 / 128 * H if name == "translate_y" else 0
            column, row = int(np.rint(from_x)), int(np.rint(from_y))
            hidden = name == "cutout" and all(
                corner[k] <= at < corner[k] + side[k] for k, at in enumerate((y, x))
            )
            if 0 <= column < W and 0 <= row < H and not hidden:
                made[y, x] = shown[row, column]
    return made


def test_augmentation_equals_a_loop_over_pixels() -> None:
    torch.manual_seed(1)
    frames = torch.randint(0, 200, (50, 1, 1, 20, 26), dtype=torch.uint8)
    made = augmented_frames(frames, np.arange(50), flip=True, wide=True, seed=4, epoch=7)
    seen = set()
    for i in range(50):
        expected = by_hand(frames[i, 0, 0].numpy(), i, 4, 7)
        np.testing.assert_array_equal(made[i, 0, 0], expected)
        seen.add(int(uniforms(5, 4, 7, Stream.FRAMES, i)[0, 0] * 5))
    assert seen == {0, 1, 2, 3, 4}


def test_a_mirror_alone_is_one() -> None:
    frames = torch.randint(0, 2**20, (30, 2, 2, 8, 9), dtype=torch.int32)
    made = augmented_frames(frames, np.arange(30), flip=True, wide=False, seed=0, epoch=0)
    mirrored = torch.from_numpy(flips(np.arange(30), seed=0, epoch=0))
    assert 5 < int(mirrored.sum()) < 25
    assert (made == torch.where(mirrored[:, None, None, None, None], frames.flip(-1), frames)).all()


@pytest.mark.parametrize("mixing", [{"mixup": 0.5, "cutmix": 0.0}, {"mixup": 0.0, "cutmix": 1.0}])
def test_frames_are_mixed_as_images_are(mixing: dict[str, float]) -> None:
    frames = torch.rand(6, 4, 2, 8, 8)
    targets, index = torch.arange(6), torch.arange(6) + 10
    mix = Mixing(num_classes=6, seed=2, **mixing)
    made, shares = mix(frames, targets, index, 1)
    assert made.shape == frames.shape
    for t in range(4):
        alone, same = mix(frames[:, t].contiguous(), targets, index, 1)
        assert (made[:, t] == alone).all()
        assert (shares == same).all()


def test_augmentation_of_frames_is_refused_for_images() -> None:
    images = load("digits", limit=40)
    with pytest.raises(UserError, match=r"^augment\.snn_wide=True does not fit images"):
        Loader(images.train, images, batch_size=4, train=True, augment=Augment(snn_wide=True))
    with pytest.raises(UserError, match=r"augment\.snn_wide = 1"):
        Augment(snn_wide=1)  # type: ignore[arg-type]


def test_a_picture_shows_darker_red_and_brighter_blue(data: ImageData) -> None:
    picture, counts = data.train.picture(0), data.train.read(0).sum(0)
    assert picture.dtype == torch.uint8
    assert picture.shape == (3, 32, 32)
    assert picture.max() == 255
    assert ((picture[0] > 0) == (counts[0] > 0)).all()
    assert ((picture[2] > 0) == (counts[1] > 0)).all()
    assert picture[1].sum() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_recordings_on_cuda_are_those_on_the_cpu(data: ImageData, options: dict[str, Any]) -> None:
    here = served(data, augment=BOTH)
    there = served(data, augment=BOTH, device="cuda", **options)
    assert all(part.is_cuda for part in there[:2])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here, strict=True))
