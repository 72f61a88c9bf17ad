# SPDX-License-Identifier: Apache-2.0
"""The table of data specs, ``NAME`` or ``NAME:ARGUMENT``. Reading it costs no heavy import."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from keymix.data.kinds import IMAGE, RECORDING, InputKind
from keymix.errors import UserError, unknown
from keymix.task import DEFAULT

if TYPE_CHECKING:
    from keymix.data.sources.base import Faults, Source

FRAMES_BY = ("number", "time")  # of events: equally many, or equally long
MASKS = ("exclusive", "multilabel")  # one class a pixel, or any number of them
SPLIT_BY = ("case", "slice")
OF_ONE_KIND = {
    **dict.fromkeys(("time_steps", "frames_by", "event_split"), "events"),
    **dict.fromkeys(("masks", "stack", "split_by", "test_fraction"), "masks"),
    "cell_mib": "cells",
}
"""Settings that only one kind of data has, and which."""
_WORDNET_ID = re.compile(r"n\d{8}")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A kind of data set.

    Args:
        name: What stands before the colon.
        argument: What stands after it (``"PATH"``), in brackets where it may be left out
            (``"[ROOT]"``), or nothing.
        summary: One line of help.
        module: The module that opens it.
        function: Its function there, which takes the argument and a `sources.base.Faults`.
        downloads: Whether it comes from the network the first time.
        events: Whether it holds recordings of events.
        task: What is learned from it: ``classification``, or ``segmentation`` where it has masks.
        cells: Whether its images are cells of parquet files.
    """

    name: str
    argument: str
    summary: str
    module: str
    function: str = "open_source"
    downloads: bool = False
    events: bool = False
    task: str = "classification"
    cells: bool = False

    @property
    def optional(self) -> bool:
        """Whether the argument may be left out."""
        return not self.argument or self.argument.startswith("[")

    @property
    def usage(self) -> str:
        """How to write it: ``digits``, ``folder:PATH``, ``cifar10[:ROOT]``."""
        if not self.argument:
            return self.name
        if self.optional:
            return f"{self.name}[:{self.argument[1:-1]}]"
        return f"{self.name}:{self.argument}"

    def check_settings(
        self, spec: str, settings: Mapping[str, object], *, remedy: str = "Leave it out"
    ) -> None:
        """Refuse settings of events, masks or parquet files for data that have none.

        Args:
            spec: The data as typed, for the message.
            settings: Such settings by name, None where they are not given.
            remedy: What to do about those of events.

        Raises:
            UserError: Naming the first that is given.
        """
        for name, value in settings.items():
            if value is None:
                continue
            if OF_ONE_KIND[name] == "masks" and self.task != "segmentation":
                raise UserError(
                    f"data.{name} = {value!r}: data {spec} holds no masks. Leave it out, or take "
                    "data for segmentation, such as masks:PATH."
                )
            if OF_ONE_KIND[name] == "cells" and not self.cells:
                raise UserError(
                    f"data.{name} = {value!r}: data {spec} has no parquet files. Leave it out."
                )
            if OF_ONE_KIND[name] == "events" and not self.events:
                own = "a spiking model's steps on images are model.options.time_steps"
                raise UserError(
                    f"data.{name} = {value!r}: data {spec} holds images, not events. {remedy}"
                    + (f"; {own}." if name == "time_steps" else ".")
                )

    def open(self, argument: str, faults: Faults, **settings: object) -> Source:
        """Open the images.

        Args:
            argument: What stood after the colon.
            faults: What to do about faults of the data: raise, or collect them.
            settings: Of data with masks, ``masks``, ``stack`` and ``split_by``; of parquet files
                ``cell_mib``; None is the source's own default.

        Raises:
            UserError: If nothing can be opened, or on a fault that is not collected.
        """
        opener = getattr(importlib.import_module(self.module), self.function)
        given = {name: value for name, value in settings.items() if value is not None}
        return cast("Source", opener(argument, faults, **given))


_SMALL = "keymix.data.sources.torchvision_sets"

SPECS: tuple[DataSpec, ...] = (
    DataSpec(
        name="digits",
        argument="",
        summary="scikit-learn's 1,797 handwritten digits, each at its own place on a 12x12 canvas; "
        "no download",
        module="keymix.data.sources.digits",
    ),
    DataSpec(
        name="cifar10",
        argument="[ROOT]",
        summary="60,000 colour images of 32x32 pixels in 10 classes, 170 MB",
        module=_SMALL,
        function="open_cifar10",
        downloads=True,
    ),
    DataSpec(
        name="cifar100",
        argument="[ROOT]",
        summary="60,000 colour images of 32x32 pixels in 100 classes, 169 MB",
        module=_SMALL,
        function="open_cifar100",
        downloads=True,
    ),
    DataSpec(
        name="svhn",
        argument="[ROOT]",
        summary="99,289 house-number digits of 32x32 pixels, without the extra set, 246 MB",
        module=_SMALL,
        function="open_svhn",
        downloads=True,
    ),
    DataSpec(
        name="fashion_mnist",
        argument="[ROOT]",
        summary="70,000 grey images of 28x28 pixels, resized to 32x32 and three channels, 31 MB",
        module=_SMALL,
        function="open_fashion_mnist",
        downloads=True,
    ),
    DataSpec(
        name="folder",
        argument="PATH",
        summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with image files",
        module="keymix.data.sources.folder",
    ),
    DataSpec(
        name="imagenet",
        argument="PATH",
        summary="PATH/{train,val}/<WordNet id>/, or the folder of Kaggle's download; test is val",
        module="keymix.data.sources.imagenet",
    ),
    DataSpec(
        name="moving_digits",
        argument="[N]",
        summary="events that a camera would see of scikit-learn's 1,797 digits in saccades, 32x32 "
        "pixels, the first N of them; no download",
        module="keymix.data.sources.moving_digits",
        events=True,
    ),
    DataSpec(
        name="cifar10dvs",
        argument="PATH",
        summary="CIFAR10-DVS: events, PATH/<class>/cifar10_<class>_<number>.aedat; splits first90 "
        "and tebn",
        module="keymix.data.sources.cifar10dvs",
        events=True,
    ),
    DataSpec(
        name="dvs128",
        argument="PATH",
        summary="DVS128 Gesture: events, PATH/DvsGesture/ with .aedat files, labels and lists of "
        "trials",
        module="keymix.data.sources.dvs128",
        events=True,
    ),
    DataSpec(
        name="events",
        argument="PATH",
        summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with .npz files of events: t, x, "
        "y, p",
        module="keymix.data.sources.event_folder",
        events=True,
    ),
    DataSpec(
        name="uwgi",
        argument="PATH",
        summary="UW-Madison GI Tract: PATH/train.csv with run lengths and 16-bit slices under "
        "PATH/train/case*/; masks of three organs",
        module="keymix.data.segmentation.uwgi",
        task="segmentation",
    ),
    DataSpec(
        name="masks",
        argument="PATH",
        summary="PATH/images/ and PATH/masks/ with PNG masks of class numbers (255 = ignore) and "
        "PATH/classes.txt, or the same in PATH/{train,val,test}/",
        module="keymix.data.segmentation.folder",
        task="segmentation",
    ),
    DataSpec(
        name="parquet",
        argument="PATH",
        summary="Hugging Face image layout: a parquet file, or a folder of train-*.parquet, "
        "test-*.parquet, validation-*.parquet",
        module="keymix.data.sources.parquet",
        cells=True,
    ),
    DataSpec(
        name="hf",
        argument="OWNER/NAME",
        summary="a data set of the Hugging Face Hub; OWNER/NAME/CONFIG where it has several parts",
        module="keymix.data.sources.hf",
        downloads=True,
        cells=True,
    ),
)


_OWN: dict[str, DataSpec] = {}


def register_source(row: DataSpec) -> DataSpec:
    """Add data of one's own to the specs; the same name again replaces it.

    Args:
        row: What it is, and the function that opens it.

    Raises:
        UserError: If a built-in spec has the name, or the name holds a colon.
    """
    if any(row.name == own.name for own in SPECS):
        raise UserError(f"data {row.name!r} is keymix's own: choose another name")
    if not row.name or ":" in row.name:
        raise UserError(f"data {row.name!r}: a name has at least one letter, and no colon")
    _OWN[row.name] = row
    return row


def all_specs() -> tuple[DataSpec, ...]:
    """Return all rows, built-in and registered."""
    return (*SPECS, *_OWN.values())


def is_events(spec: str | None) -> bool:
    """Tell whether a data spec names recordings of events."""
    name = "" if spec is None else spec.partition(":")[0]
    return any(row.events for row in all_specs() if row.name == name)


def kind_of_spec(spec: str | None) -> InputKind:
    """Tell the kind of input that a data spec names, by its name alone; images if it names none."""
    return RECORDING if is_events(spec) else IMAGE


def task_name(spec: str | None) -> str:
    """Tell the task that a data spec sets, by its name alone."""
    name = "" if spec is None else spec.partition(":")[0]
    return next((row.task for row in all_specs() if row.name == name), DEFAULT)


def named(text: str, *, events: bool) -> str:
    """Call images in a sentence recordings, where they are.

    Args:
        text: What is said of images.
        events: Whether the data are recordings of events.
    """
    if not events:
        return text
    text = re.sub(r"\b([Aa])n image\b", r"\1 recording", text)
    return re.sub(r"\bimage(s?)\b", r"recording\1", text)


def parse(spec: str) -> tuple[DataSpec, str]:
    """Split a spec as typed into its table row and its argument.

    Raises:
        UserError: If the name is unknown, or a path is missing or not wanted.
    """
    name, colon, argument = spec.partition(":")
    known = {s.name: s for s in all_specs()}
    if name not in known:
        if Path(spec).expanduser().exists():
            kind = kind_of(Path(spec).expanduser())
            raise UserError(f"data {spec!r} is a path without its kind. Write {kind}:{spec}")
        raise unknown("data", name, known)
    row = known[name]
    if not row.argument and colon:
        raise UserError(f"data {spec!r}: {name} takes nothing after the name. Write {row.usage}")
    if not argument and (colon or not row.optional):
        argument = row.argument.strip("[]")
        usage = f"{name} or {name}:{argument}" if row.optional else row.usage
        raise UserError(f"data {spec!r} needs its {argument}. Write {usage}")
    return row, argument


def existing_path(spec_name: str, argument: str) -> Path:
    """Make the path behind ``spec_name:argument``, with ``~`` for the home folder.

    Raises:
        UserError: If nothing is there.
    """
    path = Path(argument).expanduser()
    if not path.exists():
        raise UserError(f"data {spec_name}:{argument}: there is no {str(path)!r}. Check the path.")
    return path


def existing_folder(spec_name: str, argument: str) -> Path:
    """Make the folder behind ``spec_name:argument``.

    Raises:
        UserError: If nothing is there, or a file.
    """
    path = existing_path(spec_name, argument)
    if not path.is_dir():
        raise UserError(
            f"data {spec_name}:{argument}: {path} is a file. Give the folder of the classes."
        )
    return path


def kind_of(path: Path) -> str:
    """Tell by what lies there which spec a path belongs to, such as parquet, uwgi or folder."""
    if _holds_parquet(path):
        return "parquet"
    if (path / "train.csv").is_file() and any((path / "train").glob("case*/")):
        return "uwgi"
    if any(_holds_masks(path / part) for part in ("", "train", "val", "test")):
        return "masks"
    if (path / "ILSVRC").is_dir():
        return "imagenet"
    if (path / "train").is_dir() and (path / "val").is_dir():
        inside = [p.name for p in (path / "train").iterdir() if p.is_dir()]
        if inside and all(_WORDNET_ID.fullmatch(name) for name in inside):
            return "imagenet"
    return "events" if _holds_events(path) else "folder"


def _holds_events(path: Path) -> bool:
    """Whether the first file of the first class is a recording of events."""
    base = path / "train" if (path / "train").is_dir() else path
    inside = (
        sorted(p for p in base.glob("*/") if not p.name.startswith(".")) if base.is_dir() else []
    )
    first = next((file for folder in inside[:1] for file in folder.iterdir()), None)
    return first is not None and first.suffix.lower() == ".npz"


def _holds_masks(path: Path) -> bool:
    return (path / "images").is_dir() and (path / "masks").is_dir()


def _holds_parquet(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".parquet"
    return any(path.glob("*.parquet")) or any(path.glob("data/*.parquet"))
