# SPDX-License-Identifier: Apache-2.0
"""From a data spec to train, validation and test splits, with the record that repeats them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.data import measure, splits
from keymix.data.carve import carve
from keymix.data.decode import Size, checked_size, convert, evaluation_array, reading
from keymix.data.pixels import picture_of
from keymix.data.sieve import NAMED, LeftOut, left_out_note, rows_left_out, sieve
from keymix.data.sources.base import Faults, Table
from keymix.data.specs import parse
from keymix.data.statistics import statistics_of
from keymix.data.streams import IntArray
from keymix.data.tasks import CLASSIFICATION, SEGMENTATION, MaskKind, TaskKind
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.data.events.store import Frames
    from keymix.data.segmentation.table import ScanTable, Unlisted

CACHE_SIDE = 96  # pixels: images up to this side are held decoded in memory …
CACHE_BYTES = 2 << 30  # … if all splits together stay below this
LAZY_CROP_PCT = 0.875  # timm's evaluation crop for images read one by one
_DEFAULT_SIZE = (224, 224)


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
        frames: The frames of the whole set, where the images are recordings of events.
        scans: The table as one of images with masks, where the task is segmentation; labels are
            0 then.
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
    frames: Frames | None = None
    scans: ScanTable | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def ids(self, i: int) -> str:
        """Say where image ``i`` comes from: its file, or its file and row."""
        return self.table.name(i)

    def read(self, i: int) -> Tensor:
        """Read image ``i`` as evaluation sees it, uint8 ``[C, H, W]``; frames are ``[T, C, H, W]``.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        if self.frames is not None:
            return self.frames_of(np.array([i], dtype=np.int64))[0]
        if self.scans is not None:
            return self.scans.read(i, self.image_size)[0]
        if self.images is not None:
            return self.images[i].clone()
        with reading(self.ids(i), measure.REMEDY), self.table.open(i) as image:
            array = evaluation_array(image, self.image_size, self.in_chans, self.crop_pct)
        return torch.from_numpy(array.copy())

    def frames_of(self, index: IntArray) -> Tensor:
        """Copy the frames of some recordings, counts ``[n, T, C, H, W]``.

        Raises:
            ValueError: If the split has images.
        """
        if self.frames is None:
            raise ValueError(f"the split {self.name!r} has images, no frames")
        return self.frames.tensor(self.table.set_rows(index))

    def mask(self, i: int) -> Tensor:
        """Read the mask of image ``i`` at the size of the images, uint8.

        Class numbers ``[H, W]`` of exclusive masks, 0 and 1 ``[K, H, W]`` of others; 255 is
        ignored.

        Raises:
            UserError: If image or mask is damaged; it is named.
            ValueError: If the split has no masks.
        """
        if self.scans is None:
            raise ValueError(f"the split {self.name!r} has no masks")
        return self.scans.read(i, self.image_size)[1]

    def picture(self, i: int) -> Tensor:
        """Read image ``i`` for a person to look at, uint8 ``[C, H, W]``.

        Of frames, red where it became darker and blue where brighter, over all time; of a stack of
        slices, the middle one.
        """
        image = self.read(i)
        if self.scans is not None and self.scans.stacked:
            return image[self.in_chans // 2][None]
        return image if self.frames is None else picture_of(image)

    def decoded(self, i: int) -> Image.Image:
        """Decode image ``i`` at its own size, for transforms that crop before they resize.

        Raises:
            UserError: If the image is damaged; it is named.
        """
        with reading(self.ids(i), measure.REMEDY), self.table.open(i) as image:
            return convert(image, self.in_chans)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData:
    """A data set, split and measured.

    Args:
        spec: The data spec it was loaded from.
        classes: Names of the classes, by label.
        image_size: Height and width of the images in pixels.
        in_chans: Channels, 1 or 3; 2, the polarities, of frames of events.
        mean: Mean of each channel over train, of values 0..1; 0 of frames.
        std: Standard deviation of each channel over train; 1 of frames.
        train: The split to learn from.
        val: The split to choose by; carved from train unless the source brings one.
        test: The split that is read once, at the end.
        facts: The rest of what `record` tells.
        time_steps: Frames of a recording, where the images are recordings of events; else None.
        masks: What the masks are, where the task is segmentation; else None.
        unlisted: Slices for which the table of masks lacks rows.
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
    time_steps: int | None = None
    masks: MaskKind | None = None
    unlisted: tuple[Unlisted, ...] = ()

    @property
    def task(self) -> TaskKind:
        """What is learned from it."""
        return CLASSIFICATION if self.masks is None else SEGMENTATION

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        """Train, val and test."""
        return self.train, self.val, self.test

    @property
    def crop_pct(self) -> float:
        """Share of the resized image's side that the evaluation crop keeps."""
        return self.test.crop_pct

    def prepared(self, pixels: Tensor) -> Tensor:
        """Make of ``[B, C, H, W]`` read by a split what a model is given, float32.

        Images are normalised. Frames ``[B, T, C, H, W]`` stay the counts that they are.
        """
        if self.time_steps is not None:
            return pixels.float()
        mean = torch.tensor(self.mean, dtype=torch.float64).view(1, -1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64).view(1, -1, 1, 1)
        return ((pixels.double() / 255 - mean) / std).float()

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
            **self._of_masks(),
            **self.facts,
        }

    def _of_masks(self) -> dict[str, Any]:
        if self.masks is None:
            return {}
        return {"task": self.task.name, "multilabel": self.masks.multilabel}


def load(
    spec: str,
    *,
    image_size: int | Size | None = None,
    crop_pct: float | None = None,
    limit: int | None = None,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    skip_corrupt: bool = False,
    time_steps: int | None = None,
    frames_by: str | None = None,
    event_split: str | None = None,
    masks: str | None = None,
    stack: int | None = None,
    split_by: str | None = None,
    test_fraction: float | None = None,
    cell_mib: int | None = None,
) -> ImageData:
    """Load a data set.

    Validation is carved from train, stratified, by ``split_seed``; never from test. A source
    without a test split gives up a fixed, stratified part of train for it (or its own validation
    split, as in ImageNet). Classes with a single image stay in train.

    Args:
        spec: ``digits``, ``cifar10``, ``folder:PATH`` or another of `keymix.data.specs`.
        image_size: Pixels a side, or height and width. None: the common size if all images have the
            same, else 224; the sensor's, where the data are events.
        crop_pct: Share of the resized image's side that the evaluation crop keeps. None: all of it
            in a set that is held in memory, else 0.875.
        limit: Most images of train and validation together, a stratified choice; test is cut to the
            same number.
        val_fraction: Share of train that becomes validation, in (0, 1).
        split_seed: Seed of the choice for ``limit`` and validation, apart from training seeds.
        skip_corrupt: Decode every image once and leave the broken ones out; they are counted and
            named in the record. Otherwise a broken image is an error.
        time_steps: Frames made of each recording of events; None for 10.
        frames_by: ``number`` for equally many events a frame (None), ``time`` for equally long
            frames.
        event_split: A published split by its name, where events have some; None for the first.
        masks: ``exclusive`` (one class a pixel) or ``multilabel``, where data has masks; None for
            what the folders of ``masks:PATH`` tell, else ``exclusive``.
        stack: Neighbouring slices of a scan that are the channels of an image, an odd number;
            None for the image alone.
        split_by: ``case`` keeps all images of a case in one split (None), ``slice`` does not.
        test_fraction: Share of a set with masks and without a test split that becomes test; None
            for 0.04.
        cell_mib: Most MiB that an encoded image of a parquet file may take; None for 64.

    Raises:
        UserError: If the spec, a value or the data is bad; a damaged image is named.
    """
    entry, argument = parse(spec)
    size = None if image_size is None else checked_size(image_size)
    if not 0.0 < val_fraction < 1.0:
        raise UserError(f"{val_fraction=} is not between 0 and 1, both excluded.")
    of_events: dict[str, Any] = {
        "time_steps": time_steps,
        "frames_by": frames_by,
        "event_split": event_split,
    }
    of_masks: dict[str, Any] = {
        "masks": masks,
        "stack": stack,
        "split_by": split_by,
        "test_fraction": test_fraction,
    }
    entry.check_settings(spec, of_events | of_masks | {"cell_mib": cell_mib})
    shared: dict[str, Any] = {
        "image_size": size,
        "limit": limit,
        "val_fraction": val_fraction,
        "split_seed": split_seed,
        "skip_corrupt": skip_corrupt,
    }
    if entry.task == SEGMENTATION.name:
        from keymix.data.segmentation.loading import load_masks

        return load_masks(entry, argument, spec, **of_masks, **shared)
    source = entry.open(argument, Faults(), cell_mib=cell_mib)
    if source.events:
        from keymix.data.events.loading import load_events

        return load_events(source, spec, **of_events, **shared)
    parts, notes = carve(source, spec, limit, val_fraction, split_seed)
    tables = {name: part.table.select(part.rows) for name, part in parts.items()}
    left_out: list[LeftOut] = []
    if skip_corrupt:
        parts, tables, left_out = sieve(parts, tables, source, spec)
        notes += left_out_note(left_out, source)
    size, pixels = _pixels(tables, source.in_chans, size or source.image_size, crop_pct or 1.0)
    notes += _resized(tables, size)
    made = {
        name: Split(
            name=name,
            labels=torch.from_numpy(table.labels.copy()),
            images=None if (held := pixels[name]) is None else torch.from_numpy(held),
            rows=parts[name].rows,
            origin=parts[name].origin,
            table=table,
            image_size=size,
            in_chans=source.in_chans,
            crop_pct=crop_pct or (LAZY_CROP_PCT if held is None else 1.0),
        )
        for name, table in tables.items()
    }
    mean, std, measured_on = statistics_of(made["train"])
    fingerprint, fingerprint_of = measure.fingerprint(tables, pixels, rows_left_out(left_out))
    return ImageData(
        spec=spec,
        classes=source.classes,
        image_size=size,
        in_chans=source.in_chans,
        mean=mean,
        std=std,
        train=made["train"],
        val=made["val"],
        test=made["test"],
        facts={
            "split_seed": split_seed,
            "val_fraction": val_fraction,
            "limit": limit,
            "mean_std_of": measured_on,
            "fingerprint": fingerprint,
            "fingerprint_of": fingerprint_of,
            "notes": notes,
            "left_out": [{"id": each.id, "reason": each.reason} for each in left_out[:NAMED]],
            "left_out_count": len(left_out),
        },
    )


def _pixels(
    tables: dict[str, Table], in_chans: int, wanted: Size | None, crop_pct: float
) -> tuple[Size, dict[str, NDArray[np.uint8] | None]]:
    """Decode all images of a small set; check the headers of a large one."""
    count = sum(map(len, tables.values()))

    def small(size: Size) -> bool:
        return max(size) <= CACHE_SIDE and count * in_chans * size[0] * size[1] < CACHE_BYTES

    size = wanted
    if (
        size is None
    ):  # the common size; where all are small, decoding finds out whether there is one
        size = measure.header_size(tables["train"], 0)
        if small(size):
            pixels = {
                name: measure.decode_all(
                    table, size, in_chans, crop_pct=crop_pct, only_this_size=True
                )
                for name, table in tables.items()
            }
            if all(held is not None for held in pixels.values()):
                return size, pixels
        sizes = measure.header_sizes(list(tables.values()))
        size = sizes.pop() if len(sizes) == 1 else _DEFAULT_SIZE
    elif not small(size):
        measure.header_sizes(list(tables.values()))
    if not small(size):
        return size, dict.fromkeys(tables)
    return size, {
        name: measure.decode_all(table, size, in_chans, crop_pct=crop_pct)
        for name, table in tables.items()
    }


def _resized(tables: dict[str, Table], size: Size) -> list[str]:
    """Note that images which a source has as pixels got another size."""
    own = {held.shape[2:] for table in tables.values() if (held := table.held) is not None}
    return [
        f"images of {own_size[0]}x{own_size[1]} pixels resized to {size[0]}x{size[1]} (bicubic)"
        for own_size in own - {size}
    ]
