# SPDX-License-Identifier: Apache-2.0
"""The kinds of input and of target, and how each is called. Reading this costs no heavy import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keymix.errors import unknown

BACKGROUND = "background"
"""Name of the class of exclusive masks that no mean over classes counts."""
IGNORE = 255
"""Value of a mask's pixels that neither train nor count."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a data set that only some data have."""

    names: tuple[str, ...]  # their names, as of ``data.NAME``
    lacks: str  # what data without them are like, such as ``holds no masks``
    # which data or recipe to take instead; empty where nobody would
    instead: str = ""
    # what else to do in place of one of them, by its name
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class InputKind:
    """A kind of input.

    Args:
        name: Its name, in data specs.
        noun: What one input is called in a sentence.
        holds: What data of it are called, such as ``recordings of events``.
        axes: Shape of a batch, such as ``[B, C, H, W]``.
        normalised: Whether a model is given values by mean and deviation; else as they are.
        shown: What a model is given of it, in the plural, such as ``frames of events``.
        stored: How to store a file so that it is read as one.
        settings: Settings that only data of this kind have.
        augment: Fields of `keymix.data.augment.Augment` for this kind alone, not counting ``flip``.
            Where there are any, those of images are refused.
        recipe: A recipe for such data.
    """

    name: str
    noun: str
    holds: str
    axes: str
    normalised: bool = True
    shown: str = "images"
    stored: str = "give them an image's ending"
    settings: Settings | None = None
    augment: tuple[str, ...] = ()
    recipe: str = "digits_vit"

    @property
    def nouns(self) -> str:
        """What several inputs are called."""
        return f"{self.noun}s"

    def count(self, number: int) -> str:
        """Write a number of inputs: ``1 image``, ``1,200 images``."""
        return f"{number:,} {self.noun if number == 1 else self.nouns}"


IMAGE = InputKind(name="image", noun="image", holds="images", axes="[B, C, H, W]")
RECORDING = InputKind(
    name="recording",
    noun="recording",
    holds="recordings of events",
    axes="[B, T, C, H, W]",
    normalised=False,
    shown="frames of events",
    stored="store them as .npz",
    settings=Settings(
        names=("time_steps", "frames_by"),
        lacks="holds images, not events",
        instead="a recipe for images, such as digits_vit or small_images_vit",
        notes={"time_steps": "a spiking model's steps on images are model.options.time_steps"},
    ),
    augment=("snn_wide",),
    recipe="moving_digits_qkformer",
)
SLICES = InputKind(name="slices", noun="image", holds="stacks of slices", axes="[B, C, H, W]")
KINDS = {kind.name: kind for kind in (IMAGE, RECORDING, SLICES)}


def get_kind(name: str) -> InputKind:
    """Return a kind of input by name."""
    if name not in KINDS:
        raise unknown("kind of input", name, KINDS)
    return KINDS[name]


def recorded_kind(time_steps: int | None, stack: int | None) -> InputKind:
    """Return the kind of input by what a record keeps: frames of a recording, slices of a stack."""
    if time_steps is not None:
        return RECORDING
    return IMAGE if stack in (None, 1) else SLICES


@dataclass(frozen=True, kw_only=True)
class TargetKind:
    """A kind of target: what belongs to an input, for a model to learn."""

    name: str
    noun: str  # what one is called in a sentence
    nouns: str  # what several are called
    grouping: str = ""  # how groups of such inputs can be named, the beginning of a remedy
    # whether it says where something is in the image, so that what moves the image must move it
    # too
    placed: bool = False
    settings: Settings | None = None  # settings that only data with such targets have
    # fields of `keymix.data.augment.Augment` for such targets alone, not counting ``flip``
    augment: tuple[str, ...] = ()
    recipe: str = ""  # a recipe for such data
    # functions of such targets, ``module:name``, empty for none: what is kept of one that was read;
    # what a record says of a set (`keymix.data.loading`); what a check says (`keymix.data.check`)
    seen: str = ""
    facts: str = ""
    described: str = ""
    val_fraction: float | None = None  # what recipes for such data validate on, where not a tenth


CLASS = TargetKind(
    name="class",
    noun="label",
    nouns="labels",
    described="keymix.data.check:describe_classes",
)
MASK = TargetKind(
    name="mask",
    noun="mask",
    nouns="masks",
    grouping="name the sequence of each in groups.csv, or ",
    placed=True,
    settings=Settings(
        names=("masks", "stack", "split_by", "test_fraction", "window_overlap"),
        lacks="holds no masks",
        instead="data for segmentation, such as masks:PATH",
    ),
    augment=("vertical_flip", "shift_scale_rotate", "coarse_dropout", "brightness_contrast"),
    recipe="small_masks_unet",
    seen="keymix.data.mask_facts:seen_of",
    facts="keymix.data.mask_facts:facts",
    described="keymix.data.mask_facts:describe",
    val_fraction=1 / 6,  # 80:16:4 with the test split
)
BOXES = TargetKind(
    name="boxes",
    noun="set of instances",
    nouns="instances",
    placed=True,
    augment=("multi_scale",),
    recipe="mask_rcnn_small",
    facts="keymix.data.instance_facts:facts",
    described="keymix.data.instance_facts:describe",
)
VALUE = TargetKind(name="value", noun="value", nouns="values")
PLACE = TargetKind(name="place", noun="target", nouns="targets", placed=True)
TARGETS = {kind.name: kind for kind in (CLASS, MASK, BOXES, VALUE, PLACE)}

FILES = Settings(names=("white_level",), lacks="has no image files with a class each")
"""Settings of data whose images are encoded, each with a class."""
SCANS = Settings(names=("intensity_window",), lacks="has no scans")
"""Settings of data whose images are slices of scans."""
PUBLISHED = Settings(names=("event_split",), lacks="has no named splits")
"""Settings of data with published splits."""


@dataclass(frozen=True, kw_only=True)
class MaskKind:
    """What the masks of a set are."""

    # whether a pixel may belong to several classes, or to none: the model answers with one logit
    # a class, each for itself. Otherwise a pixel has one class
    multilabel: bool
    # number of the class ``background`` of exclusive masks, which no mean over classes counts;
    # None where there is none
    background: int | None


def mask_kind(masks: str | None, classes: Sequence[str]) -> MaskKind | None:
    """Return what masks are, by the fact of the data; None of data without any."""
    if not masks:
        return None
    multilabel = masks == "multilabel"
    background = None if multilabel or BACKGROUND not in classes else classes.index(BACKGROUND)
    return MaskKind(multilabel=multilabel, background=background)
