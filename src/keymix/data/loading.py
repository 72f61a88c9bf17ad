# SPDX-License-Identifier: Apache-2.0
"""From a data spec to train, validation and test splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from keymix.data.carve import carve
from keymix.data.dataset import ImageData, Split
from keymix.data.decode import Size, checked_size
from keymix.data.measure import decode_all, header_size, header_sizes
from keymix.data.measure import fingerprint as fingerprint_of_pixels
from keymix.data.record import DataFacts
from keymix.data.sieve import LeftOut, left_out_note, named_left_out, rows_left_out, sieve
from keymix.data.sources.base import Faults, Table
from keymix.data.specs import parse
from keymix.data.statistics import statistics_of
from keymix.data.tasks import SEGMENTATION
from keymix.errors import UserError

CACHE_SIDE = 96  # pixels: images up to this side are kept decoded in memory …
CACHE_BYTES = 2 << 30  # … if all splits together stay below this
LAZY_CROP_PCT = 0.875  # timm's evaluation crop for images read one by one
_DEFAULT_SIZE = (224, 224)


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
            in a set that is in memory, else 0.875.
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
            what the folders of ``masks:PATH`` show, else ``exclusive``.
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
            images=None if (kept := pixels[name]) is None else torch.from_numpy(kept),
            rows=parts[name].rows,
            origin=parts[name].origin,
            table=table,
            image_size=size,
            in_chans=source.in_chans,
            crop_pct=crop_pct or (LAZY_CROP_PCT if kept is None else 1.0),
        )
        for name, table in tables.items()
    }
    mean, std, measured_on = statistics_of(made["train"])
    fingerprint, fingerprint_of = fingerprint_of_pixels(tables, pixels, rows_left_out(left_out))
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
        facts=DataFacts(
            split_seed=split_seed,
            val_fraction=val_fraction,
            limit=limit,
            mean_std_of=measured_on,
            fingerprint=fingerprint,
            fingerprint_of=fingerprint_of,
            notes=tuple(notes),
            left_out=named_left_out(left_out),
            left_out_count=len(left_out),
        ),
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
        size = header_size(tables["train"], 0)
        if small(size):
            pixels = {
                name: decode_all(table, size, in_chans, crop_pct=crop_pct, only_this_size=True)
                for name, table in tables.items()
            }
            if all(kept is not None for kept in pixels.values()):
                return size, pixels
        sizes = header_sizes(list(tables.values()))
        size = sizes.pop() if len(sizes) == 1 else _DEFAULT_SIZE
    elif not small(size):
        header_sizes(list(tables.values()))
    if not small(size):
        return size, dict.fromkeys(tables)
    return size, {
        name: decode_all(table, size, in_chans, crop_pct=crop_pct) for name, table in tables.items()
    }


def _resized(tables: dict[str, Table], size: Size) -> list[str]:
    """Note that images which a source has as pixels got another size."""
    own = {kept.shape[2:] for table in tables.values() if (kept := table.held) is not None}
    return [
        f"images of {own_size[0]}x{own_size[1]} pixels resized to {size[0]}x{size[1]} (bicubic)"
        for own_size in own - {size}
    ]
