# SPDX-License-Identifier: Apache-2.0
"""From a data spec to train, validation and test splits."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from typing import cast

from keymix.data.carve import carve
from keymix.data.dataset import ImageData, Split
from keymix.data.decode import Size, checked_size
from keymix.data.inputs import HASHED
from keymix.data.kinds import CLASS
from keymix.data.prepare import Pairs, Preparation
from keymix.data.record import DataFacts
from keymix.data.sieve import LeftOut, left_out_note, named_left_out, rows_left_out, sieve
from keymix.data.sources.base import Faults, Source
from keymix.data.specs import Options, parse
from keymix.data.streams import IntArray
from keymix.errors import UserError
from keymix.task import Task, get_task


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
    options = Options(
        image_size=None if image_size is None else checked_size(image_size),
        crop_pct=crop_pct,
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
        cell_mib=cell_mib,
    )
    entry, argument = parse(spec)
    if not 0.0 < val_fraction < 1.0:
        raise UserError(f"{val_fraction=} is not between 0 and 1, both excluded.")
    entry.check_settings(spec, options.of_one_kind)
    source = entry.open(argument, Faults(), **options.of_opening)
    if source.train.targets.kind is CLASS and not source.classes:
        raise UserError(f"data {spec} have class numbers, but no classes. Name them in the source.")
    task = get_task(entry.task)
    preparation = _preparation(source, spec, options, task)
    source = preparation.source
    parts, notes = carve(
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
        parts, tables, left_out = sieve(parts, tables, source, spec, find=preparation.broken)
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
        facts=preparation.facts(facts),
        task=task,
    )


def _preparation(source: Source, spec: str, options: Options, task: Task) -> Preparation:
    """Open what loading does for a source."""
    module, _, name = source.preparation.partition(":")
    opened = cast("type[Preparation]", getattr(importlib.import_module(module), name))
    return opened(source, spec, options, task)


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
