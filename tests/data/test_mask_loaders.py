# SPDX-License-Identifier: Apache-2.0
"""Images with masks in batches: what comes depends on (seed, epoch, index) and on nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scan_tables import MULTILABEL, Scans, data_of, scans_of

from keymix.data import Augment, ImageData, Loader
from keymix.data.kinds import MaskKind
from keymix.errors import UserError

FIVE = Augment(
    flip=True,
    vertical_flip=True,
    shift_scale_rotate=True,
    coarse_dropout=True,
    brightness_contrast=True,
)


@pytest.fixture(scope="module")
def scans() -> Scans:
    return scans_of(23, channels=5)


@pytest.fixture(scope="module")
def data(scans: Scans) -> ImageData:
    return data_of(scans)


def loader(data: ImageData, augment: Augment | None = FIVE, **options) -> Loader:
    options = {"batch_size": 8, "seed": 5, "train": True} | options
    return Loader(data.train, data, augment=augment, **options)


def served(loader: Loader, epoch: int = 0) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    loader.set_epoch(epoch)
    return {
        int(i): (image, mask)
        for batch in loader
        for i, image, mask in zip(batch.index, batch.images, batch.targets, strict=True)
    }


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, y) for i in a for x, y in zip(a[i], b[i], strict=True)
    )


@pytest.mark.parametrize(
    "options", [{"batch_size": 3}, {"batch_size": 23}, {"workers": 2}], ids=str
)
def test_batches_and_workers_change_nothing(data: ImageData, options: dict) -> None:
    before = torch.get_rng_state()
    base, other = loader(data), loader(data, **options)
    for epoch in (2, 0):
        assert same(served(base, epoch), served(other, epoch))
        assert list(served(base, epoch)) == list(served(other, epoch))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_augment_sets_in_memory_too(data: ImageData, scans: Scans) -> None:
    ahead = loader(data_of(scans, in_memory=True), workers=2)
    assert ahead.workers == 2
    assert same(served(ahead), served(loader(data)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_serve_what_one_process_serves(data: ImageData, world_size: int) -> None:
    ranks = [served(loader(data, rank=r, world_size=world_size)) for r in range(world_size)]
    together = {i: pair for rank in ranks for i, pair in rank.items()}
    assert same(together, served(loader(data)))


def test_epochs_and_seeds_differ(data: ImageData) -> None:
    base = served(loader(data))
    for other in (served(loader(data), 1), served(loader(data, seed=6))):
        assert list(base) != list(other)
        assert sum(torch.equal(base[i][0], other[i][0]) for i in base) < 5


def test_an_epoch_goes_on_from_any_batch(data: ImageData) -> None:
    whole = list(loader(data))
    for start in (1, len(whole)):
        rest = list(loader(data).batches(start))
        assert len(rest) == len(whole) - start
        for a, b in zip(rest, whole[start:], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_evaluation_shows_images_and_masks_as_they_are(data: ImageData, scans: Scans) -> None:
    shown = served(Loader(data.test, data, batch_size=4, train=False, augment=FIVE))
    assert list(shown) == list(range(len(scans.rows)))
    for i, (image, mask) in shown.items():
        expected = (torch.from_numpy(scans.images[i]) / 255 - 0.5) / 0.25
        torch.testing.assert_close(image, expected, atol=1e-5, rtol=1e-5)
        assert mask.dtype == torch.int64
        assert torch.equal(mask, torch.from_numpy(scans.masks[i]).long())  # 255 as well
    assert not same(shown, served(loader(data)))


def test_masks_of_several_classes_come_a_plane_each() -> None:
    scans = scans_of(6, channels=3)
    several = Scans(scans.images, (scans.masks[:, None] == [[[1]], [[2]]]).astype("uint8"))
    batch = next(iter(loader(data_of(several, MULTILABEL), batch_size=6)))
    assert batch.targets.shape == (6, 2, 24, 20)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert set(batch.targets.unique().tolist()) == {0, 1}


@pytest.mark.parametrize(("background", "fill"), [(None, 255), (2, 2)])
def test_outside_of_a_turned_image_is_background_or_ignored(background, fill) -> None:
    scans = scans_of(8)
    scans.masks[:] = 1
    data = data_of(scans, MaskKind(multilabel=False, background=background))
    masks = [mask for _, mask in served(loader(data)).values()]
    assert set(torch.stack(masks).unique().tolist()) == {1, fill}


def test_a_damaged_scan_is_named() -> None:
    def missing():
        raise UserError("scans/2.png: the mask is missing.")

    scans = scans_of(4)
    scans.rows[2] = replace(scans.rows[2], target=missing)
    broken = data_of(scans)
    with pytest.raises(UserError, match=r"scans/2\.png: the mask is missing"):
        list(loader(broken))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("crop_padding", 2),
        ("rand_augment", (2, 9)),
        ("rand_augment_first", True),
        ("auto_augment", "rand-m9"),
        ("erasing", 0.25),
    ],
)
def test_what_would_not_move_masks_along_is_refused(
    data: ImageData, field: str, value: object
) -> None:
    with pytest.raises(UserError, match=f"augment.{field}=.*does not fit images with masks"):
        loader(data, replace(FIVE, **{field: value}))
    with pytest.raises(UserError, match="snn_wide=True does not fit images with masks"):
        loader(data, Augment(snn_wide=True))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=str)
def test_batches_on_cuda_are_those_on_the_cpu(data: ImageData, options: dict) -> None:
    for here, there in zip(loader(data), loader(data, device="cuda", **options), strict=True):
        assert there.images.is_cuda
        assert there.targets.is_cuda
        assert torch.equal(there.index.cpu(), here.index)
        assert torch.equal(there.targets.cpu(), here.targets)
        assert torch.allclose(there.images.cpu(), here.images, atol=1e-5)
