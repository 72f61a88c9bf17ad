# SPDX-License-Identifier: Apache-2.0
"""The data of a recipe: which, how they are split and served, and what only some kinds have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keymix.data.bounds import check_numbers
from keymix.data.specs import FRAMES_BY, SPLIT_BY
from keymix.errors import unknown
from keymix.train._checks import require, sides
from keymix.train._convert import DERIVED


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images and how they are served.

    Args:
        spec: Data spec, e.g. ``digits``, ``parquet:PATH``, ``folder:PATH``.
        image_size: Side of the images the model sees, pixels, or their height and width
            (``32,48``); None keeps the data's own. Events are gathered in so many pixels.
        limit: Use only this many training images, a stratified choice; None for all.
        val_fraction: Share of the training images carved off for validation, in (0, 1).
        split_seed: Seed of that split, apart from the training seed.
        batch_size: Training images a step; a run uses one device.
        eval_batch_size: Images a step in validation and test.
        workers: Loader processes; 0 loads in the training process.
        skip_corrupt: Leave broken images out, counted and named in the record; otherwise the first
            one is an error.
        time_steps: Frames made of each recording of events; None for 10. Like the next two, for
            data of events alone.
        frames_by: ``number`` for equally many events a frame, ``time`` for equally long frames;
            None for ``number``.
        event_split: A published split by its name (``first90`` or ``tebn`` of CIFAR10-DVS); None
            for the first.
        stack: Neighbouring slices of a scan that become the channels of an image (2.5-D), an odd
            number; None for the image alone. Like the next two, for data with masks alone.
        split_by: ``case`` keeps all images of a case in one split, ``slice`` does not, and leaks;
            None for ``case``.
        test_fraction: Share of a set without a test split of its own that becomes test, in (0, 1);
            None for 0.04.
        cell_mib: Most MiB that an encoded image of a parquet file may take, against files that
            would fill the memory; None for 64. For ``parquet:PATH`` and ``hf:OWNER/NAME`` alone.
        task_options: Those of ``task.options`` that loading takes; a recipe sets them.
    """

    spec: str
    image_size: int | tuple[int, int] | None = None
    limit: int | None = None
    val_fraction: float = 0.1
    split_seed: int = 0
    batch_size: int = 128
    eval_batch_size: int = 512
    workers: int = 0
    skip_corrupt: bool = False
    time_steps: int | None = None
    frames_by: str | None = None
    event_split: str | None = None
    stack: int | None = None
    split_by: str | None = None
    test_fraction: float | None = None
    cell_mib: int | None = None
    task_options: Mapping[str, str | int | float] = field(default_factory=dict, metadata=DERIVED)

    def __post_init__(self) -> None:
        require(bool(self.spec), "data.spec", self.spec, "name the data, e.g. 'digits'")
        if self.image_size is not None:
            object.__setattr__(self, "image_size", sides(self.image_size))
        check_numbers(self, "data.")
        if self.frames_by is not None and self.frames_by not in FRAMES_BY:
            raise unknown("data.frames_by", self.frames_by, FRAMES_BY)
        if self.stack is not None:
            odd = self.stack % 2 == 1
            require(odd, "data.stack", self.stack, "must be an odd number of slices, such as 3")
        if self.split_by is not None and self.split_by not in SPLIT_BY:
            raise unknown("data.split_by", self.split_by, SPLIT_BY)

    def omitted(self) -> tuple[str, ...]:
        """The fields that are not written: those that follow from the rest of a recipe."""
        return ("task_options",)
