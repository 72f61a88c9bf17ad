# SPDX-License-Identifier: Apache-2.0
"""From a data spec to train, validation and test splits.

`load` is the same for all data; what differs by kind is a `Preparation`. That of images is here; a
source names the class of another kind (`keymix.data.sources.base.Source.preparation`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from keymix.data.dataset import ImageData, Split
from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    WHITE,
    Size,
    checked_size,
    convert,
    dim,
    evaluation_array,
    fitted_size,
    orientation,
    reading,
    reason,
    refuse_turned,
    upright_size,
)
from keymix.data.drop_corrupt import (
    LeftOut,
    drop_corrupt,
    left_out_note,
    named_left_out,
    rows_left_out,
)
from keymix.data.files import in_chunks
from keymix.data.inputs import (
    HASHED,
    FittedImages,
    ImagesInMemory,
    ImagesOneByOne,
    Inputs,
    WholeImages,
)
from keymix.data.kinds import CLASS, IMAGE
from keymix.data.record import DataFacts, task_of
from keymix.data.sources.base import REMEDY, Faults, Source, Table
from keymix.data.specs import Options, look_up, parse
from keymix.data.splits import Part, is_large, make_splits, sample
from keymix.data.streams import IntArray
from keymix.data.targets import Targets
from keymix.errors import KeymixWarning, UserError
from keymix.task import Task, get_task


def header_size(table: Table, i: int) -> Size:
    """Open image ``i``, check what its header says, and give height and width when upright."""
    if table.in_memory is not None:
        return (table.in_memory.shape[2], table.in_memory.shape[3])
    with reading(table.name(i), REMEDY), table.open(i) as image:
        size = upright_size(image)
        if table.targets.kind.placed:
            refuse_turned(image, table.name(i))
        image.verify()
    return size


def header_sizes(table: Table, *, sampled: bool = False) -> list[Size]:
    """Check the headers of images, of a fixed sample of 2,000 if wanted, and give their sizes."""
    rows = sample(len(table)).tolist() if sampled else range(len(table))

    def check(some: range) -> list[Size]:
        return [header_size(table, rows[k]) for k in some]

    return [size for part in in_chunks(len(rows), check) for size in part]


def decode_all(
    table: Table,
    size: Size,
    in_chans: int,
    *,
    crop_pct: float = 1.0,
    only_this_size: bool = False,
) -> NDArray[np.uint8] | None:
    """Decode a table through the evaluation transform, uint8 ``[N, C, H, W]``."""
    if table.in_memory is not None:
        return _fitted(table, table.in_memory, size, in_chans, crop_pct)
    pixels = np.empty((len(table), in_chans, *size), dtype=np.uint8)

    def decode(rows: range) -> bool:
        for i in rows:
            with reading(table.name(i), REMEDY), table.open(i) as image:
                if only_this_size and upright_size(image) != size:
                    return False
                pixels[i] = evaluation_array(image, size, in_chans, crop_pct, table.white_level)
        return True

    return pixels if all(in_chunks(len(table), decode)) else None


def _fitted(
    table: Table, pixels: NDArray[np.uint8], size: Size, in_chans: int, crop_pct: float
) -> NDArray[np.uint8]:
    """Resize pixels where they have another size, and repeat grey ones to ``in_chans``."""
    count, channels = pixels.shape[:2]
    if pixels.shape[2:] != size or crop_pct < 1.0:
        resized = np.empty((count, channels, *size), dtype=np.uint8)

        def resize(rows: range) -> None:
            for i in rows:
                resized[i] = evaluation_array(table.open(i), size, channels, crop_pct)

        in_chunks(count, resize)
        pixels = resized
    return pixels if channels == in_chans else np.repeat(pixels, in_chans, axis=1)


def broken(table: Table, in_chans: int) -> dict[int, str]:
    """Decode every image once and say what is wrong with those that cannot be used.

    JPEG files are decoded at an eighth of their size: all their data is read, but fewer pixels are
    made of it.

    Returns the reason by position, in ascending order.
    """

    def find(rows: range) -> dict[int, str]:
        found = {}
        for i in rows:
            try:
                with table.open(i) as image:
                    if image.format == "JPEG":
                        image.draft(image.mode, (1, 1))
                    convert(image, in_chans)
            except DAMAGE as error:
                found[i] = reason(error)
        return found

    if table.in_memory is not None:
        return {}
    return {i: why for part in in_chunks(len(table), find) for i, why in part.items()}


CACHE_SIDE = 128  # pixels: images up to this side are kept decoded in memory …
CACHE_BYTES = 2 << 30  # … if all splits together stay below this
_DECODED = 200  # images of 16 bits whose largest value is looked for, where nobody asks for it
LAZY_CROP_PCT = 0.875  # timm's evaluation crop for images read one by one
DEFAULT_SIZE: Size = (224, 224)
"""Height and width of images that have no common size and where nobody says one."""

Pairs = dict[str, tuple[Inputs, Targets]]
"""Inputs and targets of each split."""


class Preparation:
    """What loading does for images."""

    def __init__(self, source: Source, spec: str, options: Options, task: Task) -> None:
        self.source, self.spec, self.options, self.task = source, spec, options, task
        self._notes: list[str] = []
        self._white: int | None = None

    def look(self, tables: Mapping[str, Table]) -> None:
        """Look how cameras stored the training images: turned by EXIF, or of fewer than 16 bits."""
        train, wanted = tables["train"], self.options.white_level
        if train.in_memory is not None:
            return
        if wanted not in (None, "auto") and wanted not in range(1, WHITE + 1):
            raise UserError(f"data.white_level = {wanted!r}: give auto, or 1 to {WHITE}.")
        rows = range(len(train)) if wanted == "auto" else sample(len(train)).tolist()

        def see(some: range) -> tuple[int, int]:
            turned = largest = 0
            for k in some:
                with suppress(*DAMAGE), train.open(rows[k]) as image:
                    turned += orientation(image) != 1
                    if image.mode in SIXTEEN_BIT and (wanted == "auto" or k < _DECODED):
                        largest = max(largest, int(np.asarray(image).max()))
            return turned, largest

        seen = in_chunks(len(rows), see)
        turned, largest = sum(each for each, _ in seen), max(each for _, each in seen)
        if turned:
            self._notes.append(
                f"{turned:,} of {len(rows):,} training images are turned upright by EXIF"
            )
        if wanted == "auto" and not largest:
            raise UserError(
                f"data.white_level = 'auto': no training image of data {self.spec} has 16 bits of "
                "grey. Leave it out."
            )
        self._white = largest if wanted == "auto" else int(wanted) if wanted else None
        if wanted is None and (text := dim(largest)):
            self._notes.append(text)
            warnings.warn(f"data {self.spec}: {text}", KeymixWarning, stacklevel=4)

    def broken(self, name: str, table: Table) -> Mapping[int, str]:
        """Say what is wrong with inputs of a split, by position in ascending order."""
        del name
        return broken(table, self.source.in_chans)

    def check(self, tables: Mapping[str, Table]) -> None:
        """Refuse the first input with a fault, of those that `look` saw."""

    def pairs(self, tables: dict[str, Table]) -> Pairs:
        """Make inputs and targets of each split."""
        for table in tables.values():
            table.white_level = self._white
        size = self.options.image_size or self.source.image_size
        if self.task.whole_images or self.source.train.targets.kind.placed:
            return self._whole(tables, size)
        crop_pct = self.options.crop_pct
        size, pixels = _pixels(tables, self.source.in_chans, size, crop_pct or 1.0)
        self._notes += _resized(tables.values(), size)
        return {
            name: (
                ImagesOneByOne(table, size, self.source.in_chans, crop_pct or LAZY_CROP_PCT)
                if (kept := pixels[name]) is None
                else ImagesInMemory(table, torch.from_numpy(kept), crop_pct or 1.0),
                table.targets,
            )
            for name, table in tables.items()
        }

    def sizes(self, table: Table) -> list[Size]:
        """Return height and width of every image of a split, by its header."""
        return header_sizes(table)

    def notes(self, parts: Mapping[str, Part]) -> list[str]:
        """Say what was done, a sentence each."""
        del parts
        return self._notes

    def facts(self, facts: DataFacts) -> DataFacts:
        """Add what only data of this kind have."""
        return replace(facts, white_level=self._white)

    def _whole(self, tables: Mapping[str, Table], size: Size | None) -> Pairs:
        """Make images of which all is seen, with targets that follow them."""
        sizes = {name: self.sizes(table) for name, table in tables.items()}
        every = sorted({each for found in sizes.values() for each in found})
        own = size is None and self.task.own_sizes
        if own:
            size = max(each[0] for each in every), max(each[1] for each in every)
            self._notes.append(
                f"{self.source.items} keep their own sizes; the largest height is {size[0]} and "
                f"the largest width {size[1]} pixels"
            )
        elif size is None:
            size = every[0] if len(every) == 1 else DEFAULT_SIZE
        after = {name: [size] * len(found) for name, found in sizes.items()}
        if self.task.fits:
            size = min(size), max(size)
            after = {
                name: [fitted_size(each, size) for each in found] for name, found in sizes.items()
            }
            self._notes.append(
                f"{self.source.items} keep their proportions: the short side becomes {size[0]} "
                f"pixels, unless the long one would be longer than {size[1]}"
            )
        targets = self.source.train.targets
        if not own and sizes != after and targets.kind.placed and not targets.moves:
            raise UserError(
                f"data {self.spec}: images whose {targets.kind.nouns} cannot be moved are not "
                "resized. Leave data.image_size out, or make the targets tv_tensors of torchvision."
            )
        return {
            name: (
                self._inputs(table, size, own=own),
                table.targets if own else table.targets.resized(sizes[name], after[name]),
            )
            for name, table in tables.items()
        }

    def _inputs(self, table: Table, size: Size, *, own: bool) -> WholeImages:
        channels, listed = self.source.in_chans, self.task.whole_images
        if self.task.fits:
            return FittedImages(table, size, channels)
        return WholeImages(table, size, channels, own_sizes=own, listed=listed)


def _pixels(
    tables: Mapping[str, Table], in_chans: int, wanted: Size | None, crop_pct: float
) -> tuple[Size, dict[str, NDArray[np.uint8] | None]]:
    """Decode all images of a small set; check the headers of a large one."""
    count = sum(map(len, tables.values()))

    def small(size: Size) -> bool:
        return max(size) <= CACHE_SIDE and count * in_chans * size[0] * size[1] < CACHE_BYTES

    def sizes() -> set[Size]:
        return {
            size
            for table in tables.values()
            for size in header_sizes(table, sampled=is_large(len(table)))
        }

    size = wanted
    if size is None:  # the common one; where all are small, decoding finds out if there is one
        size = header_size(tables["train"], 0)
        if small(size):
            pixels = {
                name: decode_all(table, size, in_chans, crop_pct=crop_pct, only_this_size=True)
                for name, table in tables.items()
            }
            if all(kept is not None for kept in pixels.values()):
                return size, pixels
        found = sizes()
        size = found.pop() if len(found) == 1 else DEFAULT_SIZE
    elif not small(size):
        sizes()
    if not small(size):
        return size, dict.fromkeys(tables)
    return size, {
        name: decode_all(table, size, in_chans, crop_pct=crop_pct) for name, table in tables.items()
    }


def _resized(tables: Iterable[Table], size: Size) -> list[str]:
    """Note that images which a source has as pixels got another size."""
    own = {kept.shape[2:] for table in tables if (kept := table.in_memory) is not None}
    return [
        f"images of {own_size[0]}x{own_size[1]} pixels resized to {size[0]}x{size[1]} (bicubic)"
        for own_size in own - {size}
    ]


def load(
    spec: str,
    *,
    image_size: int | Size | None = None,
    crop_pct: float | None = None,
    channels: int | None = None,
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
    white_level: int | str | None = None,
) -> ImageData:
    """Load a data set.

    Validation is split from train by ``split_seed``; never from test. A source without a test split
    gives up a fixed part of train for it (or its own validation split, as in ImageNet). Where
    targets are classes, both are stratified, and classes with a single image stay in train.

    Args:
        spec: ``digits``, ``cifar10``, ``folder:PATH`` or another of `keymix.data.specs`.
        image_size: Pixels a side, or height and width. None: the common size if all images have the
            same, else 224; the sensor's, where the data are events.
        crop_pct: Share of the resized image's side that the evaluation crop keeps. None: all of it
            in a set that is in memory, else 0.875.
        channels: 1 to read images as grey, 3 as colour; None for the source's own: 3 of files.
        limit: Most images of train and validation together, stratified where targets are classes;
            test is cut to the same number.
        val_fraction: Share of train that becomes validation, in (0, 1).
        split_seed: Seed of the choice for ``limit`` and validation, apart from training seeds.
        skip_corrupt: Decode every image once and leave the broken ones out; they are counted and
            named in the record. Of images with instances, unfit annotations are left out alone:
            what they mark counts as background. Otherwise either is an error.
        time_steps: Frames made of each recording of events; None for 10.
        frames_by: ``number`` for equally many events a frame (None), ``time`` for equally long
            frames.
        event_split: A published split by its name, where events have some; None for the first.
        masks: ``exclusive`` (one class per pixel) or ``multilabel``, where data has masks; None for
            what the folders of ``masks:PATH`` show, else ``exclusive``.
        stack: Neighbouring slices of a scan that are the channels of an image, an odd number;
            None for the image alone.
        split_by: ``case`` keeps all images of a case in one split (None), ``slice`` does not.
        test_fraction: Share of a set with masks and without a test split that becomes test; None
            for 0.04.
        white_level: The 16-bit grey value that becomes white; ``auto`` for the largest of the
            training images, None for 65,535. Of image files with a class each.

    Raises:
        UserError: If the spec, a value or the data is bad; a damaged image is named.
    """
    options = Options(
        image_size=None if image_size is None else checked_size(image_size),
        crop_pct=crop_pct,
        channels=channels,
        limit=limit,
        val_fraction=val_fraction,
        split_seed=split_seed,
        skip_corrupt=skip_corrupt,
        time_steps=time_steps,
        frames_by=frames_by,
        event_split=event_split,
        masks=masks,
        stack=stack,
        split_by=split_by,
        test_fraction=test_fraction,
        white_level=white_level,
    )
    entry, argument = parse(spec)
    if not 0.0 < val_fraction < 1.0:
        raise UserError(f"{val_fraction=} is not between 0 and 1, both excluded.")
    entry.check_settings(spec, options.of_one_kind)
    source = entry.open(argument, Faults(), **options.of_opening)
    if source.train.targets.kind is CLASS and not source.classes:
        raise UserError(f"data {spec} have class numbers, but no classes. Name them in the source.")
    if channels is not None:
        source = _in_channels(source, spec, channels)
    task = get_task(entry.task)
    prepare: type[Preparation] = look_up(source.preparation)
    preparation = prepare(source, spec, options, task)
    source = preparation.source
    parts, notes = make_splits(
        source,
        spec,
        limit,
        val_fraction,
        split_seed,
        split_by=split_by,
        test_fraction=test_fraction,
    )
    tables = {name: part.table.select(part.rows) for name, part in parts.items()}
    preparation.look(tables)
    left_out: list[LeftOut] = []
    if skip_corrupt:
        parts, tables, left_out = drop_corrupt(parts, tables, source, spec, find=preparation.broken)
        notes += left_out_note(left_out, source)
    preparation.check(tables)
    pairs = preparation.pairs(tables)
    notes += preparation.notes(parts)
    made = {
        name: Split(
            name=name,
            inputs=inputs,
            targets=targets,
            rows=parts[name].rows,
            origin=parts[name].origin,
            table=inputs.table,
        )
        for name, (inputs, targets) in pairs.items()
    }
    train = made["train"].inputs
    mean, std, measured_on = train.statistics()
    fingerprint, fingerprint_of = _fingerprint(pairs, rows_left_out(left_out))
    facts = DataFacts(
        compared_by=task.decided_by(_class_inputs(made["train"].targets, len(source.classes))),
        split_seed=split_seed,
        val_fraction=val_fraction,
        limit=limit,
        mean_std_of=measured_on,
        fingerprint=fingerprint,
        fingerprint_of=fingerprint_of,
        notes=tuple(notes),
        left_out=named_left_out(left_out),
        left_out_count=len(left_out),
    )
    facts = preparation.facts(facts)
    return ImageData(
        spec=spec,
        classes=source.classes,
        image_size=train.image_size,
        in_chans=source.in_chans,
        mean=mean,
        std=std,
        train=made["train"],
        val=made["val"],
        test=made["test"],
        facts=facts,
        task=task_of(task.name, facts),
    )


def _in_channels(source: Source, spec: str, channels: int) -> Source:
    """Return a source of images that are read as grey or colour."""
    fixed = any(table.in_memory is not None for table in source.tables.values())
    if channels not in (1, 3) or source.kind is not IMAGE or (fixed and channels < source.in_chans):
        raise UserError(
            f"data {spec}: channels={channels!r} does not fit its {source.items} of "
            f"{source.in_chans} channels; leave it out."
        )
    return replace(source, in_chans=channels)


def _class_inputs(targets: Targets, classes: int) -> list[int]:
    """Count the inputs of each class; empty where targets are no classes."""
    if targets.kind is not CLASS:
        return []
    return [int(n) for n in np.bincount(targets.strata, minlength=classes)]


def _fingerprint(pairs: Pairs, left_out: Mapping[str, IntArray]) -> tuple[str, str]:
    """Hash inputs and targets of all splits (sha256), and say what of an input went into it."""
    whole = hashlib.sha256()
    hashed = []
    for name, (inputs, targets) in pairs.items():
        whole.update(f"{name} {len(inputs)}\n".encode())
        targets.update_digest(whole)
        if len(left_out.get(name, ())):
            whole.update(b"left out " + left_out[name].astype("<i8").tobytes())
        hashed.append(inputs.update_digest(whole))
    every = [targets for _, targets in pairs.values()]
    loosest = max(hashed, key=lambda what: HASHED.index(what) if what in HASHED else 0)
    what = loosest.format(targets=every[0].kind.nouns)
    return every[0].sealed(whole.hexdigest(), every), what
