# SPDX-License-Identifier: Apache-2.0
"""From a data spec to a data set: open, split, look, decide how images are seen, measure."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision import tv_tensors

from keymix.arguments import whole_size
from keymix.data.dataset import ImageData, Split
from keymix.data.decode import (
    DAMAGE,
    SIXTEEN_BIT,
    WHITE,
    Encoded,
    dim,
    orientation,
    reading,
)
from keymix.data.files import in_chunks
from keymix.data.kinds import CLASS, IMAGE, RECORDING, TargetKind, mask_kind
from keymix.data.looks import Seen, look, target_bytes
from keymix.data.mask_augment import outside
from keymix.data.record import LeftOutImage, task_of
from keymix.data.sample import (
    REMEDY,
    Fault,
    Faults,
    Row,
    Size,
    Source,
    Stored,
    digest_of,
    refuse,
    size_of,
    some,
)
from keymix.data.specs import Options, look_up, parse
from keymix.data.splits import STATISTICS_SAMPLE, Part, Table, is_large, make_splits, sample
from keymix.data.streams import IntArray
from keymix.data.view import Mode, View, moves, resized_mask
from keymix.errors import KeymixWarning, UserError
from keymix.task import Task, get_task

Rows: TypeAlias = Mapping[str, Sequence[Row]]
Looks: TypeAlias = Mapping[str, Sequence[Seen]]
Pixels: TypeAlias = Mapping[str, Tensor]
"""The rows of each split, what was seen of them, and those that are in memory."""

CACHE_SIDE = 128  # pixels: images up to this side are kept decoded in memory …
CACHE_BYTES = 2 << 30  # … if all splits together stay below this
CACHE_MASKS = 1 << 30  # bytes below which images with masks, of any size, are kept so
LAZY_CROP_PCT = 0.875  # timm's evaluation crop for images read one by one
DEFAULT_SIZE: Size = (224, 224)
"""Height and width of images that have no common size and where nobody says one."""
HASHED = (
    "pixels and {targets}",
    "length and first 64 KiB of the encoded images, and {targets}",
    "name and length of all image files, 64 KiB of a fixed sample of 2,000 a split, {targets}",
    "what is known of each training shard without reading it, all of the other splits",
)
"""What of images enters the fingerprint: from the strictest to the loosest; of a stream."""
_DECODED = 200  # images of 16 bits whose largest value is looked for, where nobody asks for it
_NAMED = 50  # images left out that a record names
_CHANNEL_CHUNK = 1 << 24  # pixels counted at once


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
    intensity_window: tuple[float, float] | None = None,
    window_overlap: float | None = None,
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
        intensity_window: Values of scans that become black and white, such as (-160, 240)
            Hounsfield units; None for the least and the largest of each slice.
        window_overlap: Where data has masks: by which share the windows of ``image_size`` overlap
            in which images are seen at their own size; None resizes images.

    Raises:
        UserError: If the spec, a value or the data is bad; a damaged image is named.
    """
    options = Options(
        image_size=None if image_size is None else whole_size("image_size", image_size),
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
        intensity_window=intensity_window,
        window_overlap=window_overlap,
    )
    entry, argument = parse(spec)
    for name in ("val_fraction", "test_fraction"):
        share = getattr(options, name)
        if share is not None and not 0.0 < share < 1.0:
            raise UserError(f"{name}={share} is not between 0 and 1, both excluded.")
    entry.check_settings(spec, options.of_one_kind)
    target, task = entry.target_kind, get_task(entry.task)
    source = entry.open(argument, Faults(), options)
    if target is CLASS and not source.classes:
        raise UserError(f"data {spec} have class numbers, but no classes. Name them in the source.")
    if channels is not None:
        source = _in_channels(source, spec, channels)
    table = Table.of(source.rows, target)
    parts, notes = make_splits(source, table, spec, options)
    before = parts
    rows = {name: part.select(source.rows) for name, part in parts.items()}
    seen: Looks = {}
    if skip_corrupt or target.placed or source.kind is not IMAGE:
        seen = {name: look(part, target, decode=skip_corrupt) for name, part in rows.items()}
    broken: list[LeftOutImage] = []
    if skip_corrupt:
        parts, broken, said = _without_broken(parts, rows, seen, source, spec)
        notes += said
        rows = {name: part.select(source.rows) for name, part in parts.items()}
        seen = {name: [one for one in of if not one.faults] for name, of in seen.items()}
    else:
        refuse(source.loose, "entries")
        for every in seen.values():
            for one in every:
                refuse(one.faults, source.items)
    known = source.facts
    if target.facts:
        known, said = look_up(target.facts)(rows, seen, source, options)
        notes += said
    white, said = _white_level(rows.get("train", ()), target, spec, white_level)
    notes += said
    view = View(mode="crop", size=DEFAULT_SIZE, channels=source.in_chans, white_level=white)
    view, images, drawn, said = _in_view(spec, rows, seen, source, options, view)
    notes += said
    kind = mask_kind(known.masks, source.classes)
    splits = {
        name: Split(
            name=name,
            rows=rows[name],
            index=part.rows,
            origin=part.origin,
            kind=source.kind,
            target_kind=target,
            view=view,
            images=images.get(name),
            targets=drawn.get(name),
            outside=0 if kind is None else outside(kind),
            listed=task.whole_images or window_overlap is not None,
            values=_values(rows[name], part, target),
            groups=part.names(by_group=True) if table.keys else (),
        )
        for name, part in parts.items()
    }
    if source.stream is not None:
        splits["train"] = replace(
            splits["val"], name="train", rows=source.stream, images=None, values=None
        )
    train = splits["train"]
    mean, std, measured_on = _statistics(train)
    gone = {name: np.setdiff1d(part.rows, parts[name].rows) for name, part in before.items()}
    fingerprint, fingerprint_of = _fingerprint(splits, seen, gone)
    facts = replace(
        known,
        compared_by=task.decided_by(_of_class(train, len(source.classes))),
        split_seed=split_seed,
        val_fraction=val_fraction,
        limit=limit,
        mean_std_of=measured_on,
        fingerprint=fingerprint,
        fingerprint_of=fingerprint_of,
        notes=tuple(notes),
        left_out=tuple(broken[:_NAMED]),
        left_out_count=len(broken),
        white_level=white,
        intensity_window=intensity_window,
        window_overlap=window_overlap,
    )
    return ImageData(
        spec=spec,
        classes=source.classes,
        image_size=view.size,
        in_chans=view.channels,
        mean=mean,
        std=std,
        **splits,
        facts=facts,
        task=task_of(task.name, facts),
        found=source.found,
    )


def _of_class(train: Split, classes: int) -> Sequence[int]:
    """Count the training inputs of each class; none where nobody did, or there are no classes."""
    if train.stream is not None:
        return train.stream.of.of_class
    if train.target_kind is not CLASS:
        return ()
    counts: list[int] = train.labels.bincount(minlength=classes).tolist()
    return counts


def _in_channels(source: Source, spec: str, channels: int) -> Source:
    """Return a source of images that are read as grey or colour."""
    fits = channels in (1, 3) and source.kind is IMAGE
    if not fits or (channels < source.in_chans and not isinstance(source.rows[0].image, Stored)):
        raise UserError(
            f"data {spec}: channels={channels!r} does not fit its {source.items} of "
            f"{source.in_chans} channels; leave it out."
        )
    return replace(source, in_chans=channels)


def _without_broken(
    parts: Mapping[str, Part], rows: Rows, seen: Looks, source: Source, spec: str
) -> tuple[dict[str, Part], list[LeftOutImage], list[str]]:
    """Drop samples with faults; the splits stay as they were chosen, so this moves no other one.

    Returns what is left, what is not, and notes.
    """
    left: dict[str, Part] = {}
    broken: dict[str, dict[int, LeftOutImage]] = {}
    for name, part in parts.items():
        broken[name] = {
            i: _left_out(rows[name][i], one.faults)
            for i, one in enumerate(seen[name])
            if one.faults
        }
        left[name] = part.without(np.fromiter(broken[name], dtype=np.int64))
        if not len(left[name].rows):
            first = broken[name][0]
            raise UserError(
                f"data {spec}: all {source.items} of {name} are broken: {first.id}: {first.reason}."
            )
    strata = parts["train"].strata
    gone = np.setdiff1d(strata, left["train"].strata)
    if len(gone):
        names = some([repr(source.classes[i]) for i in gone])
        first = next(one for i, one in broken["train"].items() if strata[i] == gone[0])
        raise UserError(
            f"data {spec}: class {names} has no training {source.items} left, all are broken "
            f"({first.id}: {first.reason}). Replace them, or remove the class."
        )
    counts = ", ".join(f"{len(of)} of {name}" for name, of in broken.items() if of)
    notes = [f"broken {source.items} left out: {counts}"] if counts else []
    return left, [one for of in broken.values() for one in of.values()], notes


def _left_out(row: Row, faults: Sequence[Fault]) -> LeftOutImage:
    """Name a sample with faults."""
    reasons = [
        fault.message.removeprefix("cannot read image ").removeprefix(f"{row.id}: ")
        for fault in faults
    ]
    return LeftOutImage(id=row.id, reason="; ".join(reasons))


def _white_level(
    rows: Sequence[Row], target: TargetKind, spec: str, wanted: int | str | None
) -> tuple[int | None, list[str]]:
    """Look how cameras stored the training images: turned by EXIF, or of fewer than 16 bits.

    Returns the 16-bit value that becomes white, and notes.
    """
    if target.placed or not rows or not isinstance(rows[0].image, Encoded):
        return None, []
    if wanted not in (None, "auto") and wanted not in range(1, WHITE + 1):
        raise UserError(f"data.white_level = {wanted!r}: give auto, or 1 to {WHITE}.")
    chosen = range(len(rows)) if wanted == "auto" else sample(len(rows)).tolist()

    def see(some_of: range) -> tuple[int, int]:
        turned = largest = 0
        for k in some_of:
            stored = rows[chosen[k]].image
            if not isinstance(stored, Encoded):
                continue
            with suppress(*DAMAGE), stored.open() as image:
                turned += orientation(image) != 1
                if image.mode in SIXTEEN_BIT and (wanted == "auto" or k < _DECODED):
                    largest = max(largest, int(np.asarray(image).max()))
        return turned, largest

    found = in_chunks(len(chosen), see)
    turned, largest = sum(each for each, _ in found), max(each for _, each in found)
    notes = []
    if turned:
        notes.append(f"{turned:,} of {len(chosen):,} training images are turned upright by EXIF")
    if wanted == "auto" and not largest:
        raise UserError(
            f"data.white_level = 'auto': no training image of data {spec} has 16 bits of grey. "
            "Leave it out."
        )
    if wanted is None and (text := dim(largest)):
        notes.append(text)
        warnings.warn(f"data {spec}: {text}", KeymixWarning, stacklevel=3)
    return largest if wanted == "auto" else int(wanted) if wanted else None, notes


def _sizes(rows: Sequence[Row], *, sampled: bool = False) -> list[Size]:
    """Check the headers of images, of a fixed sample of 2,000 if wanted, and give their sizes."""
    chosen = sample(len(rows)).tolist() if sampled else range(len(rows))

    def check(some_of: range) -> list[Size]:
        found = []
        for k in some_of:
            row = rows[chosen[k]]
            with reading(row.id, REMEDY):
                found.append(size_of(row.image))
        return found

    return [size for part in in_chunks(len(chosen), check) for size in part]


def _in_view(
    spec: str, rows: Rows, seen: Looks, source: Source, options: Options, view: View
) -> tuple[View, Pixels, Pixels, list[str]]:
    """Decide how a model sees the images, and keep those of a small set in memory so.

    Returns the view, images and masks in memory, and notes.
    """
    size = options.image_size or source.image_size
    if source.kind is RECORDING:
        at = size_of(rows["train"][0].image)
        return replace(view, mode="frames", size=at), {}, {}, []
    entry, _ = parse(spec)
    task = get_task(entry.task)
    if not task.whole_images and not entry.target_kind.placed:
        view, images, notes = _cropped(rows, view, size, options.crop_pct)
        return view, images, {}, notes
    if options.window_overlap is not None:
        assert size is not None  # options say so
        view = replace(view, mode="window", size=size)
        return view, {}, {}, [f"{source.items} keep their own sizes and are seen in windows"]
    view, notes = _whole(rows, view, seen, size, source, task, spec)
    return view, *_kept_with_masks(rows, view), notes


def _cropped(
    rows: Rows, view: View, size: Size | None, crop_pct: float | None
) -> tuple[View, Pixels, list[str]]:
    """Decide the size of images that are cropped, and decode all of a small set.

    Without a size it is the common one; where images are small, decoding finds out if there is one.
    """
    count = sum(map(len, rows.values()))
    first = next(iter(rows.values()))[0]
    with reading(first.id, REMEDY):
        width = view.values(first.image()).element_size()

    def small(size: Size) -> bool:
        every = count * view.channels * size[0] * size[1] * width
        return max(size) <= CACHE_SIDE and every < CACHE_BYTES

    def kept(size: Size, *, only: bool) -> Pixels:
        at = replace(view, size=size, crop_pct=crop_pct or 1.0)
        found = {name: _decoded(part, at, only=only) for name, part in rows.items()}
        whole = {name: images for name, images in found.items() if images is not None}
        return whole if len(whole) == len(found) else {}

    def common() -> set[Size]:
        return {
            each for part in rows.values() for each in _sizes(part, sampled=is_large(len(part)))
        }

    images: Pixels = {}
    if size is None:
        with reading(first.id, REMEDY):
            size = size_of(first.image)
        if small(size):
            images = kept(size, only=True)
        if not images:
            every = common()
            size = every.pop() if len(every) == 1 else DEFAULT_SIZE
    elif not small(size):
        common()  # checks the headers
    if not images and small(size):
        images = kept(size, only=False)
    shares = crop_pct or (1.0 if images else LAZY_CROP_PCT)
    firsts = [part[0].image for part in rows.values()]
    notes = [
        f"images of {own[0]}x{own[1]} pixels resized to {size[0]}x{size[1]} (bicubic)"
        for own in {size_of(image) for image in firsts if not isinstance(image, Stored)} - {size}
    ]
    return replace(view, size=size, crop_pct=shares), images, notes


def _decoded(rows: Sequence[Row], view: View, *, only: bool = False) -> Tensor | None:
    """Decode all images as a model sees them, ``[N, C, H, W]``.

    None if ``only`` images of the view's size are wanted and one has another.
    """
    with reading(rows[0].id, REMEDY):
        kind = view.values(rows[0].image()).dtype
    pixels = torch.empty((len(rows), view.channels, *view.size), dtype=kind)
    array = pixels.numpy()  # NumPy's assignment keeps the interpreter, torch's lets threads fight

    def decode(chunk: range) -> bool:
        for i in chunk:
            with reading(rows[i].id, REMEDY):
                image = view.values(rows[i].image())
            if only and image.shape[-2:] != view.size:
                return False
            array[i] = view.shown(image).numpy()
        return True

    return pixels if all(in_chunks(len(rows), decode)) else None


def _whole(
    rows: Rows,
    view: View,
    seen: Looks,
    size: Size | None,
    source: Source,
    task: Task,
    spec: str,
) -> tuple[View, list[str]]:
    """Decide the size of images of which all is seen, with targets that follow them."""
    sizes = [one.size for of in seen.values() for one in of]
    if not seen:
        sizes += [each for part in rows.values() for each in _sizes(part)]
    every = sorted({each for each in sizes if each})
    notes = []
    mode: Mode = "stretch"
    if size is None and task.own_sizes:
        mode, size = "own", (max(each[0] for each in every), max(each[1] for each in every))
        notes.append(
            f"{source.items} keep their own sizes; the largest height is {size[0]} and the largest "
            f"width {size[1]} pixels"
        )
    elif size is None:
        size = every[0] if len(every) == 1 else DEFAULT_SIZE
    if task.fits:
        mode, size = "fit", (min(size), max(size))
        notes.append(
            f"{source.items} keep their proportions: the short side becomes {size[0]} pixels, "
            f"unless the long one would be longer than {size[1]}"
        )
    view = replace(view, mode=mode, size=size)
    target = rows["train"][0].read_target()
    if not moves(target) and any(view.size_of(each) != each for each in every):
        raise UserError(
            f"data {spec}: images whose targets cannot be moved are not resized. Leave "
            "data.image_size out, or make the targets tv_tensors of torchvision."
        )
    return view, notes


def _kept_with_masks(rows: Rows, view: View) -> tuple[Pixels, Pixels]:
    """Read images and masks of a set that is small enough for memory."""
    target = rows["train"][0].read_target()
    if view.mode != "stretch" or not isinstance(target, tv_tensors.Mask):
        return {}, {}
    planes = view.channels + (len(target) if target.ndim == 3 else 1)
    if sum(map(len, rows.values())) * planes * view.size[0] * view.size[1] >= CACHE_MASKS:
        return {}, {}
    images = {name: _decoded(part, view) for name, part in rows.items()}
    return cast("Pixels", images), {name: _masks(part, view.size) for name, part in rows.items()}


def _masks(rows: Sequence[Row], size: Size) -> Tensor:
    """Read all masks at a size."""

    def read(chunk: range) -> list[Tensor]:
        return [resized_mask(rows[i].read_target(), size).as_subclass(Tensor) for i in chunk]

    return torch.stack([mask for part in in_chunks(len(rows), read) for mask in part])


def _statistics(split: Split) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Measure mean and deviation of each channel, of values 0..1; and say of which images.

    Of images that keep their proportions before they are resized or cut.
    """
    items = f"training {split.kind.nouns}"
    if not split.kind.normalised:
        what = "nothing: frames are counts of events and are served as they are"
        return (0.0,) * split.in_chans, (1.0,) * split.in_chans, what
    if split.images is not None:
        return *_mean_std(_counts(split.images)), f"all {items}"
    of = split.stream
    chosen = sample(len(split)) if of is None else of.few(STATISTICS_SAMPLE)

    def count(chunk: range) -> NDArray[Any]:
        some = chosen[chunk.start : chunk.stop]
        here = split if of is None else split.of(of.fetch(some))
        read = here.own if here.view.mode in ("fit", "window") else here.read
        counts: NDArray[Any] = np.stack([_counts(read(i)[None]) for i in some.tolist()]).sum(0)
        return counts

    few = f"a fixed sample of {len(chosen)}" if len(chosen) < len(split) else "all"
    return *_mean_std(np.stack(in_chunks(len(chosen), count)).sum(0)), f"{few} {items}"


def _counts(images: Tensor) -> NDArray[Any]:
    """Count the values of each channel, ``[C, 256]``; of float32 number, sum and sum of squares.

    Shape: ``[N, C, H, W]`` of 0..255 -> ``[C, 256]``, or ``[C, 3]``.
    """
    if images.is_floating_point():
        values = (images.double() / 255).transpose(0, 1).flatten(1)
        number = torch.full((len(values),), values.shape[1], dtype=torch.float64)
        sums = torch.stack([number, values.sum(1), values.square().sum(1)], dim=1)
        return sums.numpy()
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    step = max(1, _CHANNEL_CHUNK // (images.shape[2] * images.shape[3]))
    for start in range(0, len(images), step):
        for channel in range(images.shape[1]):
            plane = images[start : start + step, channel].numpy()
            counts[channel] += np.bincount(plane.ravel(), minlength=256)
    return counts


def _mean_std(counts: NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and standard deviation of each channel, of values 0..1."""
    if counts.shape[1] == 256:
        value = np.arange(256) / 255.0
        total, first, second = counts.sum(axis=1), counts @ value, counts @ value**2
    else:
        total, first, second = counts.T
    mean = first / total
    variance = np.maximum(second / total - mean**2, 0.0)
    std = np.maximum(np.sqrt(variance), 1 / 255)  # a flat channel must not divide by zero
    return tuple(mean.tolist()), tuple(std.tolist())


def _values(rows: Sequence[Row], part: Part, kind: TargetKind) -> Tensor | None:
    """Read all targets as a tensor ``[N, ...]``; None of ragged ones and those with a place."""
    if kind is CLASS:
        return torch.from_numpy(part.strata)
    found = [] if kind.placed else [row.read_target() for row in rows]
    return torch.stack(found) if len({each.shape for each in found}) == 1 else None


def _fingerprint(
    splits: Mapping[str, Split], seen: Looks, gone: Mapping[str, IntArray]
) -> tuple[str, str]:
    """Hash inputs and targets of all splits (sha256), and say what of an input went into it."""
    whole = hashlib.sha256()
    for name, split in splits.items():
        whole.update(f"{name} {len(split)}\n".encode())
        if split.stream is not None:
            whole.update(split.sha256.encode())
            continue
        if split.target_kind is CLASS:
            whole.update(split.labels.numpy().astype("<i8").tobytes())
        elif split.target_kind.placed:
            whole.update(b"".join(one.target or b"" for one in seen[name]))
        else:
            whole.update(b"".join(target_bytes(row.read_target()) for row in split.rows))
        if len(gone[name]):
            whole.update(b"left out " + gone[name].astype("<i8").tobytes())
        _enter_images(whole, split)
    train, large = splits["train"], any(is_large(len(split)) for split in splits.values())
    what = HASHED[0] if train.images is not None else HASHED[2 if large else 1]
    what = HASHED[3] if train.stream is not None else what
    what = "frames and {targets}" if train.kind is RECORDING else what
    return whole.hexdigest(), what.format(targets=train.target_kind.nouns)


def _enter_images(whole: Any, split: Split) -> None:
    """Enter the images of a split into a fingerprint."""
    if split.images is not None:
        whole.update(f"{tuple(split.images.shape)}\n".encode())
        whole.update(split.images.numpy().data)
        return
    read = frozenset(sample(len(split)).tolist()) if is_large(len(split)) else range(len(split))

    def digests(chunk: range) -> bytes:
        return b"".join(digest_of(split.rows[i].image, content=i in read) for i in chunk)

    for part in in_chunks(len(split), digests):
        whole.update(part)
