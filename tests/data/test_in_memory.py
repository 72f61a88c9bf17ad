# SPDX-License-Identifier: Apache-2.0
"""Sets in memory: no host work between batches, and the order of what is done to images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from each import together
from keymix.data import Augment, ImageData, Loader, load
from keymix.data.loaders import InMemoryBatches
from keymix.data.mixing import Mixing

EVERYTHING = Augment(crop_padding=2, flip=True, rand_augment=(2, 9), erasing=0.5)
FIRST = Augment(crop_padding=2, flip=True, rand_augment=(2, 9), rand_augment_first=True)
NOISY = Augment(erasing=0.5, erasing_fill="noise")
CPU = torch.device("cpu")


class Refused(Exception):
    """The device would have to wait for the host, or the host for the device."""


class NoHostWork(TorchDispatchMode):
    """Refuse what makes the host wait for a device, or brings numbers from the host to it."""

    asks = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(a)]
        if name.rstrip("_") in self.asks or "unique" in name:
            raise Refused(name)
        if name in ("index", "index_put", "index_put_") and any(
            t.dtype == torch.bool for t in tensors[1:]
        ):
            raise Refused(f"{name} by a mask")
        if name in ("lift_fresh", "lift_fresh_copy"):  # torch.tensor(...): made by the host
            raise Refused(name)
        out = func(*args, **(kwargs or {}))
        made = out.device if torch.is_tensor(out) else None
        if made is not None and any(t.device != made and t.dim() for t in tensors):
            raise Refused(f"{name} from {[t.device for t in tensors]} to {made}")
        return out


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load("digits", limit=300)


def colour(data: ImageData) -> ImageData:
    """The same digits, in three different channels."""
    from dataclasses import replace

    def tinted(split: Any) -> Any:
        assert split.images is not None
        images = torch.cat([split.images, split.images // 2, ~split.images], 1)
        return replace(split, images=images, view=replace(split.view, channels=3))

    mean, std = data.mean * 3, data.std * 3
    return replace(data, train=tinted(data.train), in_chans=3, mean=mean, std=std)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("augment", [EVERYTHING, FIRST, NOISY, Augment(rand_augment=(2, 14)), None])
def test_between_batches_the_host_only_launches(
    digits: ImageData, augment: Augment | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ``meta`` every tensor that travels from the host is seen; values cannot be asked for."""
    monkeypatch.setattr(
        "keymix.data.loaders._GROUP_BYTES", 1
    )  # every batch is augmented in the loop
    data = colour(digits)
    loader = Loader(
        data.train, data, batch_size=64, train=True, augment=augment, seed=1, device=device
    )
    mix = Mixing(0.4, 1.0, num_classes=10, seed=1)
    batches = iter(loader)
    first = next(batches)
    mix(first.images, first.targets, first.index, 0)  # uploads its tables
    with NoHostWork():
        rest = [mix(batch.images, batch.targets, batch.index, 0) for batch in batches]
    assert len(rest) == len(loader) - 1
    assert all(images.device.type == device for images, _ in rest)


@together
@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: torch.tensor([1, 2]),
        lambda x: x.to("meta"),
        lambda x: bool((x > 0).any()),
        lambda x: x.index_put_((x > 0,), torch.ones(4)),
        lambda x: x.unique(),
    ],
)
def test_host_work_would_be_seen(work: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(Refused), NoHostWork():
        work(torch.ones(4))


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for(digits: ImageData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.data.loaders._GROUP_BYTES", 1)
    data = colour(digits)
    options = {"batch_size": 64, "train": True, "augment": EVERYTHING, "seed": 1}
    on_gpu = Loader(data.train, data, device="cuda", **options)  # type: ignore[arg-type]
    mix = Mixing(0.4, 1.0, num_classes=10, seed=1)
    batches = iter(on_gpu)
    first = next(batches)
    mix(first.images, first.targets, first.index, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rest = list(batches)
        for batch in rest:
            mix(batch.images, batch.targets, batch.index, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = Loader(data.train, data, **options)  # type: ignore[arg-type]
    for here, there in zip(on_cpu, [first, *rest], strict=True):
        assert torch.equal(here.index, there.index.cpu())
        # a blend may be rounded the other way: one grey level
        difference = (here.images - there.images.cpu()).abs().max()
        assert difference <= 1.01 / (255 * min(data.std))


def made(images: torch.Tensor, augment: Augment, **options: int) -> torch.Tensor:
    index = np.arange(len(images), dtype=np.int64)
    served = InMemoryBatches(images, augment, 0, CPU)
    return torch.cat([b.pixels for b in served.batches(index, options.get("size", 32), epoch=0)])


def test_rand_augment_comes_before_crop_and_flip_where_asked(digits: ImageData) -> None:
    images = digits.train.images
    assert images is not None
    alone = made(images, Augment(rand_augment=(2, 9)))
    cropped = Augment(crop_padding=2, flip=True)
    first, last = (
        made(images, Augment(crop_padding=2, flip=True, rand_augment=(2, 9), rand_augment_first=f))
        for f in (True, False)
    )
    assert torch.equal(first, made(alone, cropped))
    assert torch.equal(last, made(made(images, cropped), Augment(rand_augment=(2, 9))))
    assert not torch.equal(first, last)


@pytest.mark.parametrize("group_bytes", [1, 5000, 1 << 30])
def test_how_many_are_augmented_at_once_changes_nothing(
    digits: ImageData, group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = digits.train.images
    assert images is not None
    expected = made(images, EVERYTHING, size=32)
    monkeypatch.setattr("keymix.data.loaders._GROUP_BYTES", group_bytes)
    for size in (1, 32, 200):
        assert torch.equal(made(images, EVERYTHING, size=size), expected)


def test_an_epoch_is_drawn_before_its_first_batch_only(
    digits: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = digits.train.images
    assert images is not None
    monkeypatch.setattr("keymix.data.loaders._GROUP_BYTES", 1)
    calls: list[int] = []
    kept = InMemoryBatches._draw

    def counted(self: InMemoryBatches, *args: Any) -> Any:
        calls.append(1)
        return kept(self, *args)

    monkeypatch.setattr(InMemoryBatches, "_draw", counted)
    served = InMemoryBatches(images, EVERYTHING, 0, CPU)
    batches: Iterator[Any] = served.batches(np.arange(len(images)), 32, epoch=0)
    next(batches)
    assert calls == [1]
    list(batches)
    assert calls == [1]
