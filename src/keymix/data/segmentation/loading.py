# SPDX-License-Identifier: Apache-2.0
"""From a source of images with masks to train, validation and test splits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from keymix.data.carve import Part
from keymix.data.dataset import ImageData, Split
from keymix.data.decode import Size
from keymix.data.measure import fingerprint as fingerprint_of_pixels
from keymix.data.measure import in_chunks
from keymix.data.record import DataFacts
from keymix.data.segmentation.held import HELD_BYTES, HeldScans, hold
from keymix.data.segmentation.splits import carve_scans, cases_note
from keymix.data.segmentation.table import (
    ScanSource,
    ScanTable,
    Seen,
    refuse,
    unfit,
)
from keymix.data.sieve import LeftOut, left_out_note, named_left_out, rows_left_out, sieve
from keymix.data.sources.base import Faults, Table, some
from keymix.data.specs import MASKS, SPLIT_BY, DataSpec
from keymix.data.statistics import statistics_of
from keymix.errors import UserError, unknown

SIZE: Size = (224, 224)
"""Height and width of images that have no common size and where nobody says one."""


def load_masks(
    entry: DataSpec,
    argument: str,
    spec: str,
    *,
    masks: str | None,
    stack: int | None,
    split_by: str | None,
    test_fraction: float | None,
    image_size: Size | None,
    limit: int | None,
    val_fraction: float,
    split_seed: int,
    skip_corrupt: bool,
) -> ImageData:
    """Load images with masks; see `keymix.data.loading.load`.

    All masks that are text, the headers of all images and, in sets held in memory, all pixels are
    checked here, before anything is trained.

    Raises:
        UserError: If a setting does not fit the data, or an image or mask is damaged; it is named.
    """
    by = SPLIT_BY[0] if split_by is None else split_by
    if by not in SPLIT_BY:
        raise unknown("data.split_by", by, SPLIT_BY)
    if test_fraction is not None and not 0.0 < test_fraction < 1.0:
        raise UserError(f"{test_fraction=} is not between 0 and 1, both excluded.")
    source = entry.open(argument, Faults(), masks=masks, stack=stack, split_by=by)
    assert isinstance(source, ScanSource)
    parts, notes = carve_scans(
        source,
        spec,
        split_by=by,
        test_fraction=test_fraction,
        val_fraction=val_fraction,
        seed=split_seed,
        limit=limit,
    )
    carved = "test" not in source.tables and "val" not in source.tables
    tables = {name: _scans(part.table.select(part.rows)) for name, part in parts.items()}
    seen = {name: _seen(table, decode=skip_corrupt) for name, table in tables.items()}
    left_out: list[LeftOut] = []
    if skip_corrupt:
        parts, tables, seen, left_out = _whole(parts, tables, seen, source, spec)
        notes += left_out_note(left_out, source)
    for found in seen.values():
        for each in found:
            refuse(each.faults)
    if by == "slice":
        notes += cases_note(parts)
    notes += _notes(seen)
    if source.unlisted:
        ids = some([each.id for each in source.unlisted], 3)
        notes.append(f"slices without a row for an organ, which count as without it: {ids}")
    size = image_size or _common_size(tables)
    tables = _held(tables, source, size)
    splits = {
        name: Split(
            name=name,
            labels=torch.from_numpy(table.labels.copy()),
            images=table.images if isinstance(table, HeldScans) else None,
            rows=parts[name].rows,
            origin=parts[name].origin,
            table=table,
            image_size=size,
            in_chans=source.in_chans,
            crop_pct=1.0,
            scans=table,
        )
        for name, table in tables.items()
    }
    mean, std, measured_on = statistics_of(splits["train"])
    fingerprint, fingerprint_of = _fingerprint(tables, left_out)
    why = unfit(seen, source.masks, source.classes)
    facts = DataFacts(
        split_seed=split_seed,
        val_fraction=val_fraction,
        test_fraction=(test_fraction or source.test_fraction) if carved else None,
        split_by=by,
        masks=MASKS[source.masks.multilabel],
        stack=stack or 1,
        limit=limit,
        cases={name: len(set(table.groups)) for name, table in tables.items()},
        empty={name: sum(each.empty for each in found) for name, found in seen.items()},
        unfit=why[0] if why else None,
        grouped=source.grouped,
        class_images={name: _class_images(found, source) for name, found in seen.items()},
        mean_std_of=measured_on,
        fingerprint=fingerprint,
        fingerprint_of=fingerprint_of,
        notes=tuple(notes),
        left_out=named_left_out(left_out),
        left_out_count=len(left_out),
    )
    return ImageData(
        spec=spec,
        classes=source.classes,
        image_size=size,
        in_chans=source.in_chans,
        mean=mean,
        std=std,
        masks=source.masks,
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
        facts=facts,
        unlisted=source.unlisted,
    )


def _scans(table: Table) -> ScanTable:
    assert isinstance(table, ScanTable)
    return table


def _seen(table: ScanTable, *, decode: bool) -> list[Seen]:
    """Look at all images of a table."""

    def look(rows: range) -> list[Seen]:
        return [table.inspect(i, decode=decode) for i in rows]

    return [each for part in in_chunks(len(table), look) for each in part]


def _whole(
    parts: Mapping[str, Part],
    tables: Mapping[str, ScanTable],
    seen: Mapping[str, list[Seen]],
    source: ScanSource,
    spec: str,
) -> tuple[dict[str, Part], dict[str, ScanTable], dict[str, list[Seen]], list[LeftOut]]:
    """Leave out the images with faults."""
    of = {id(table): seen[name] for name, table in tables.items()}

    def reasons(table: Table) -> dict[int, str]:
        return {
            i: "; ".join(fault.message for fault in each.faults)
            for i, each in enumerate(of[id(table)])
            if each.faults
        }

    left_parts, left_tables, left_out = sieve(parts, tables, source, spec, find=reasons)
    left_seen = {name: [each for each in found if not each.faults] for name, found in seen.items()}
    scans = {name: _scans(table) for name, table in left_tables.items()}
    return left_parts, scans, left_seen, left_out


def _class_images(seen: Sequence[Seen], source: ScanSource) -> tuple[int, ...]:
    """Count the images that have each class."""
    return tuple(sum(c in each.classes for each in seen) for c in range(len(source.classes)))


def _notes(seen: Mapping[str, Sequence[Seen]]) -> list[str]:
    """Tell how much of masks was overwritten, and of stacks replaced."""
    every = [each for found in seen.values() for each in found]
    notes = []
    over = [each.overlap for each in every if each.overlap]
    if over:
        notes.append(
            f"classes overlap in {sum(over):,} pixels of {len(over):,} image{'s' * (len(over) > 1)}"
            ": the later class is kept (data.masks=multilabel keeps all)"
        )
    if replaced := sum(each.replaced for each in every):
        notes.append(
            f"{replaced:,} missing neighbours in the stacks replaced by the nearest slice on the "
            "way to them"
        )
    return notes


def _common_size(tables: Mapping[str, ScanTable]) -> Size:
    sizes = {table.size(i) for table in tables.values() for i in range(len(table))}
    return sizes.pop() if len(sizes) == 1 else SIZE


def _held(tables: dict[str, ScanTable], source: ScanSource, size: Size) -> dict[str, ScanTable]:
    """Decode a small set."""
    planes = source.in_chans + (len(source.classes) if source.masks.multilabel else 1)
    if sum(map(len, tables.values())) * planes * size[0] * size[1] >= HELD_BYTES:
        return tables
    return {name: hold(table, size) for name, table in tables.items()}


def _fingerprint(tables: Mapping[str, ScanTable], left_out: Sequence[LeftOut]) -> tuple[str, str]:
    """Hash images and masks of all splits."""
    held = {name: table for name, table in tables.items() if isinstance(table, HeldScans)}
    pixels = {name: held[name].images.numpy() if name in held else None for name in tables}
    digest, what = fingerprint_of_pixels(tables, pixels, rows_left_out(left_out))
    whole = hashlib.sha256(digest.encode())
    for table in held.values():
        whole.update(np.ascontiguousarray(table.masks.numpy()).data)
    return whole.hexdigest(), what.replace("labels", "masks")
