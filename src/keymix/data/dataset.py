# SPDX-License-Identifier: Apache-2.0
"""From a data spec to train, validation and test splits, with the record that repeats them."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from keymix.data import splits
from keymix.data.decode import Size, checked_size, convert, evaluation_array, reading
from keymix.data.sources.base import Source, Table, some
from keymix.data.specs import parse
from keymix.data.streams import IntArray, Stream, hash64
from keymix.errors import UserError

CACHE_SIDE = 96  # pixels: images up to this side are held decoded in memory …
CACHE_BYTES = 2 << 30  # … if all splits together stay below this
LAZY_CROP_PCT = 0.875  # timm's evaluation crop for images read one by one
STATISTICS_SAMPLE = 2000
_DEFAULT_SIZE = (224, 224)
_TEST_SEED = 0  # the test split is one and the same whatever the split seed


@dataclass(frozen=True, eq=False, kw_only=True)
class Split:
    """Labelled images of one split, in memory or read one by one.

    Args:
        name: ``train``, ``val`` or ``test``.
        labels: Class numbers, int64 ``[N]``.
        images: uint8 ``[N, C, H, W]`` if the set is held in memory, else None.
        rows: Rows of the source's table ``origin`` that the split consists of, ascending.
        origin: The table: the source's train, val or test.
        table: Where the images are opened.
        image_size: Height and width in pixels.
        in_chans: Channels.
        crop_pct: Share of the resized image's side that the evaluation crop keeps.
    """

    name: str
    labels: Tensor
    images: Tensor | None
    rows: IntArray
    origin: str
    table: Table
    image_size: Size
    in_chans: int
    crop_pct: float

    def __len__(self) -> int:
        return len(self.labels)

    def ids(self, i: int) -> str:
        """Say where image ``i`` comes from: its file, or its file and row."""
        return self.table.name(i)

    def read(self, i: int) -> Tensor:
        """Read image ``i`` as evaluation sees it, uint8 ``[C, H, W]``.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        if self.images is not None:
            return self.images[i]
        with reading(self.ids(i)), self.table.open(i) as image:
            array = evaluation_array(image, self.image_size, self.in_chans, self.crop_pct)
        return torch.from_numpy(array.copy())

    def decoded(self, i: int) -> Image.Image:
        """Decode image ``i`` at its own size, for transforms that crop before they resize.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        with reading(self.ids(i)), self.table.open(i) as image:
            return convert(image, self.in_chans)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData:
    """A data set, split and measured.

    Args:
        spec: The data spec it was loaded from.
        classes: Names of the classes, by label.
        image_size: Height and width of the images in pixels.
        in_chans: Channels, 1 or 3.
        mean: Mean of each channel over train, of values 0..1.
        std: Standard deviation of each channel over train.
        train: The split to learn from.
        val: The split to choose by; carved from train unless the source brings one.
        test: The split that is read once, at the end.
        facts: The rest of what `record` tells.
    """

    spec: str
    classes: tuple[str, ...]
    image_size: Size
    in_chans: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    val: Split
    test: Split
    facts: dict[str, Any]

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """Train, val and test."""
        return self.train, self.val, self.test

    @property
    def crop_pct(self) -> float:
        """Share of the resized image's side that the evaluation crop keeps."""
        return self.test.crop_pct

    def record(self) -> dict[str, Any]:
        """Tell everything about the data that a result depends on, ready for JSON.

        ``index_sha256`` hashes the rows of every split; ``fingerprint`` hashes images and labels,
        as ``fingerprint_of`` says.
        """
        return {
            "spec": self.spec,
            "classes": list(self.classes),
            "image_size": list(self.image_size),
            "in_chans": self.in_chans,
            "mean": list(self.mean),
            "std": list(self.std),
            "crop_pct": self.crop_pct,
            "cached": self.train.images is not None,
            "sizes": {split.name: len(split) for split in self.splits},
            "index_sha256": {s.name: splits.digest(s.origin, s.rows) for s in self.splits},
            **self.facts,
        }


def load(
    spec: str,
    *,
    image_size: int | Size | None = None,
    limit: int | None = None,
    val_fraction: float = 0.1,
    split_seed: int = 0,
) -> ImageData:
    """Load a data set.

    Validation is carved from train, stratified, by ``split_seed``; never from test. A source
    without a test split gives up a fixed, stratified part of train for it (or its own validation
    split, as in ImageNet). Classes with a single image stay in train.

    Args:
        spec: ``digits``, ``folder:PATH`` or ``parquet:PATH`` (see `keymix.data.specs`).
        image_size: Pixels a side, or height and width. None: the common size if all images have the
            same, else 224.
        limit: Most images of train and validation together, a stratified choice; test is cut to the
            same number.
        val_fraction: Share of train that becomes validation, in (0, 1).
        split_seed: Seed of the choice for ``limit`` and validation, apart from training seeds.

    Raises:
        UserError: If the spec, a value or the data is bad; a damaged image is named.
    """
    entry, argument = parse(spec)
    size = None if image_size is None else checked_size(image_size)
    if not 0.0 < val_fraction < 1.0:
        raise UserError(f"{val_fraction=} is not between 0 and 1, both excluded.")
    source: Source = importlib.import_module(entry.module).open_source(argument)
    parts, notes = _carve(source, spec, limit, val_fraction, split_seed)
    tables = {name: part.table.select(part.rows) for name, part in parts.items()}

    if size is None:
        size = _common_size(tables) or _DEFAULT_SIZE
        checked = True
    else:
        checked = False
    bytes_needed = sum(map(len, tables.values())) * source.in_chans * size[0] * size[1]
    cached = max(size) <= CACHE_SIDE and bytes_needed < CACHE_BYTES
    if not cached and not checked:
        for table in tables.values():
            _check_headers(table)
    crop_pct = 1.0 if cached else LAZY_CROP_PCT
    made = {
        name: Split(
            name=name,
            labels=torch.from_numpy(table.labels.copy()),
            images=_decode_all(table, size, source.in_chans) if cached else None,
            rows=parts[name].rows,
            origin=parts[name].origin,
            table=table,
            image_size=size,
            in_chans=source.in_chans,
            crop_pct=crop_pct,
        )
        for name, table in tables.items()
    }
    mean, std, measured_on = _statistics(made["train"])
    return ImageData(
        spec=spec,
        classes=source.classes,
        image_size=size,
        in_chans=source.in_chans,
        mean=mean,
        std=std,
        **made,
        facts={
            "split_seed": split_seed,
            "val_fraction": val_fraction,
            "limit": limit,
            "mean_std_of": measured_on,
            "fingerprint": _fingerprint(made),
            "fingerprint_of": "pixels and labels"
            if cached
            else "length and first 64 KiB of the encoded images, and labels",
            "notes": notes,
        },
    )


@dataclass(frozen=True)
class _Part:
    origin: str
    table: Table
    rows: IntArray

    @property
    def labels(self) -> IntArray:
        return self.table.labels[self.rows]

    def keep(self, chosen: IntArray) -> _Part:
        return replace(self, rows=self.rows[chosen])

    def without(self, chosen: IntArray) -> _Part:
        return self.keep(splits.rest(len(self.rows), chosen))


def _carve(
    source: Source, spec: str, limit: int | None, val_fraction: float, seed: int
) -> tuple[dict[str, _Part], list[str]]:
    """Choose the rows of train, val and test."""
    notes = list(source.notes)
    train = _whole("train", source.train)
    val = _whole("val", source.val) if source.val is not None else None
    if source.test is not None:
        test = _whole("test", source.test)
    elif val is not None:
        test, val = val, None
        notes.append("test = the source's validation split; validation carved from train")
    else:
        number = max(1, round(source.test_fraction * len(train.rows)))
        chosen = splits.choose(
            train.labels, number, seed=_TEST_SEED, stream=Stream.TEST, leave_one=True
        )
        train, test = train.without(chosen), train.keep(chosen)
        notes.append(f"test = {len(chosen)} images carved from train, stratified, fixed")

    if limit is not None:
        present = len(np.unique(train.labels))
        if limit < present:
            raise UserError(f"{limit=} is below the number of classes, {present}. Raise it.")
        chosen = splits.choose(train.labels, limit, seed=seed, stream=Stream.LIMIT)
        train = train.keep(chosen)
        test = test.keep(splits.choose(test.labels, limit, seed=_TEST_SEED, stream=Stream.LIMIT))
    number = max(1, round(val_fraction * len(train.rows)))
    if val is not None:
        notes.append("validation = the source's validation split")
        if limit is not None:
            val = val.keep(splits.choose(val.labels, number, seed=seed, stream=Stream.LIMIT))
            train = train.keep(
                splits.choose(train.labels, limit - len(val.rows), seed=seed, stream=Stream.LIMIT)
            )
    else:
        counts = np.bincount(train.labels, minlength=len(source.classes))
        single = [source.classes[i] for i in np.flatnonzero(counts == 1)]
        if single:
            notes.append(f"classes with a single image stay in train: {some(single)}")
        chosen = splits.choose(
            train.labels, number, seed=seed, stream=Stream.VALIDATION, leave_one=True
        )
        train, val = train.without(chosen), train.keep(chosen)
    for name, part in (("validation", val), ("test", test)):
        if not len(part.rows):
            raise UserError(
                f"data {spec}: no images are left for {name}: every class has a single image. "
                "Add images."
            )
    return {"train": train, "val": val, "test": test}, notes


def _whole(origin: str, table: Table) -> _Part:
    return _Part(origin, table, np.arange(len(table), dtype=np.int64))


def _headers(table: Table) -> Iterator[Size]:
    """Open every image, check what a header can tell, and give its height and width."""

    def header(i: int) -> Size:
        with reading(table.name(i)), table.open(i) as image:
            size = (image.height, image.width)
            image.verify()
        return size

    with ThreadPoolExecutor(4) as pool:  # waits for the disk, mostly
        yield from pool.map(header, range(len(table)))


def _check_headers(table: Table) -> None:
    for _ in _headers(table):
        pass


def _common_size(tables: dict[str, Table]) -> Size | None:
    """Find the size that all images have, if they have one; every header is checked."""
    sizes = {size for table in tables.values() for size in _headers(table)}
    return sizes.pop() if len(sizes) == 1 else None


def _decode_all(table: Table, size: Size, in_chans: int) -> Tensor:
    pixels = np.empty((len(table), in_chans, *size), dtype=np.uint8)
    for i in range(len(table)):
        with reading(table.name(i)), table.open(i) as image:
            pixels[i] = evaluation_array(image, size, in_chans, 1.0)
    return torch.from_numpy(pixels)


def _statistics(train: Split) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Measure mean and standard deviation of each channel, in integers and so exactly."""
    rows = np.arange(len(train), dtype=np.int64)
    measured_on = "all training images"
    if train.images is None and len(rows) > STATISTICS_SAMPLE:
        order = np.argsort(hash64(_TEST_SEED, Stream.STATISTICS, rows), kind="stable")
        rows = np.sort(order[:STATISTICS_SAMPLE])
        measured_on = f"a fixed sample of {STATISTICS_SAMPLE} training images"
    counts = np.zeros((train.in_chans, 256), dtype=np.int64)
    for i in rows:
        for channel, plane in enumerate(train.read(int(i)).numpy()):
            counts[channel] += np.bincount(plane.ravel(), minlength=256)
    value = np.arange(256) / 255.0
    total = counts.sum(axis=1)
    mean = counts @ value / total
    std = np.sqrt(np.maximum(counts @ value**2 / total - mean**2, 0.0))
    std = np.maximum(std, 1 / 255)  # a channel without contrast must not divide by zero
    return tuple(mean.tolist()), tuple(std.tolist()), measured_on


def _fingerprint(made: dict[str, Split]) -> str:
    whole = hashlib.sha256()
    for split in made.values():
        whole.update(f"{split.name} {len(split)} {split.image_size} {split.in_chans}\n".encode())
        whole.update(split.labels.numpy().astype("<i8").tobytes())
        if split.images is not None:
            whole.update(split.images.numpy().tobytes())
        else:
            for i in range(len(split)):
                whole.update(split.table.digest(i))
    return whole.hexdigest()
