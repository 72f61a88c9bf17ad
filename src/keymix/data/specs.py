# SPDX-License-Identifier: Apache-2.0
"""The data specs, ``NAME`` or ``NAME:ARGUMENT``. Listing them costs no heavy import.

A source is a function under the decorator `source`. Those of keymix are in the files of
`keymix.data.sources`; the folder is searched for them. One's own then works wherever a data spec is
taken.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from keymix.arguments import check_kind, checked
from keymix.data.files import IMAGE_FOLDERS, MASK_FOLDERS, folder_named, split_named
from keymix.data.kinds import (
    FILES,
    IMAGE,
    KINDS,
    PUBLISHED,
    RECORDING,
    SCANS,
    TARGETS,
    InputKind,
    Settings,
    TargetKind,
    get_kind,
)
from keymix.errors import UserError, unknown
from keymix.task import DEFAULT

if TYPE_CHECKING:
    from keymix.data.sample import Faults, Source

FRAMES_BY = ("number", "time")  # of events: equally many, or equally long
MASKS = ("exclusive", "multilabel")  # one class per pixel, or any number of them
SPLIT_BY = ("case", "slice")
Setting: TypeAlias = str | float | tuple[float, float]
"""What an option of loading is."""
OF_ONE_KIND: Mapping[str, Settings] = {
    name: settings
    for settings in (
        *(kind.settings for kind in KINDS.values()),
        *(kind.settings for kind in TARGETS.values()),
        FILES,
        PUBLISHED,
        SCANS,
    )
    if settings is not None
    for name in settings.names
}
"""Settings that only some data have, and which."""
_SOURCES = "keymix.data.sources"
Opener: TypeAlias = "Callable[..., Source]"
_Opener = TypeVar("_Opener", bound=Opener)
_OF_COCO = (
    "annotations/instances_train*.json",
    "annotations/train.json",
    "train/_annotations.coco.json",
)
"""Files by which a folder is recognised as images with instances."""
_OF_VOLUMES = ("imagesTr/", "labels/*.nii*", "train/labels/*.nii*")
"""What a folder of volumes has: labels of other formats may be pictures."""
TABLES = ("labels.csv", "metadata.csv")
"""Tables by which a folder is recognised as images with a class each."""
_WORDNET_ID = re.compile(r"n\d{8}")


def look_up(place: str) -> Any:
    """Open what a kind of data names as ``module:name``, so that only its own data load it."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What loading or a check is asked for; see `keymix.data.loading.load`.

    Raises:
        UserError: If masks, or a way to split, are asked for that there are not.
    """

    image_size: tuple[int, int] | None = None
    crop_pct: float | None = None
    channels: int | None = None
    limit: int | None = None
    val_fraction: float = 0.1
    split_seed: int = 0
    skip_corrupt: bool = False
    time_steps: int | None = None
    frames_by: str | None = None
    event_split: str | None = None
    masks: str | None = None
    stack: int | None = None
    split_by: str | None = None
    test_fraction: float | None = None
    white_level: int | str | None = None
    intensity_window: tuple[float, float] | None = None
    window_overlap: float | None = None

    def __post_init__(self) -> None:
        if self.masks not in (None, *MASKS):
            raise unknown("task.options.masks", str(self.masks), MASKS)
        if self.split_by not in (None, *SPLIT_BY):
            raise unknown("data.split_by", str(self.split_by), SPLIT_BY)
        if self.window_overlap is not None and self.image_size is None:
            raise UserError(
                f"task.options.window_overlap = {self.window_overlap!r}: give the size of the "
                "windows, data.image_size."
            )

    @property
    def of_one_kind(self) -> dict[str, Setting | None]:
        """Settings that only some data have, by name."""
        return {name: getattr(self, name) for name in OF_ONE_KIND}


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A kind of data set.

    Args:
        name: What stands before the colon.
        argument: What stands after it (``"PATH"``), in brackets where it may be left out
            (``"[ROOT]"``), or nothing.
        summary: One line of help.
        opener: Its function, which takes the argument and a `keymix.data.sample.Faults`, and by
            name those fields of `Options` that its signature has; or where it is, ``module:name``.
        downloads: Whether it comes from the network the first time.
        on_disk: Whether the argument is a path to what it is made of.
        kind: Name of its kind of input, of `keymix.data.kinds.KINDS`.
        target: Name of its kind of target, of `keymix.data.kinds.TARGETS`; empty for that of its
            task: ``class`` of classification, otherwise ``value``.
        task: Name of the task that it sets, such as ``classification``.
        settings: Settings of `OF_ONE_KIND` that it takes in addition to those of its
            kinds.
    """

    name: str
    summary: str
    opener: Opener | str
    argument: str = ""
    downloads: bool = False
    on_disk: bool = False
    kind: str = "image"
    target: str = ""
    task: str = DEFAULT
    settings: tuple[str, ...] = ()

    @property
    def input_kind(self) -> InputKind:
        """The kind of its inputs."""
        return get_kind(self.kind)

    @property
    def target_kind(self) -> TargetKind:
        """The kind of its targets, as far as its name says."""
        return TARGETS[self.target or ("class" if self.task == DEFAULT else "value")]

    @property
    def events(self) -> bool:
        """Whether it holds recordings of events."""
        return self.input_kind is RECORDING

    def takes(self, setting: str) -> bool:
        """Whether a setting of `OF_ONE_KIND` is one of this data."""
        own = OF_ONE_KIND[setting]
        return setting in self.settings or own in (
            self.input_kind.settings,
            self.target_kind.settings,
        )

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

    def check_settings(self, spec: str, settings: Mapping[str, object]) -> None:
        """Refuse settings that only other kinds of data have.

        Args:
            spec: The data as typed, for the message.
            settings: Such settings by name, None where they are not given.

        Raises:
            UserError: Naming the first that is given.
        """
        for name, value in settings.items():
            if value is None or self.takes(name):
                continue
            own = OF_ONE_KIND[name]
            text = f"Leave it out, or take {own.instead}" if own.instead else "Leave it out"
            if name in own.notes:
                text += f"; {own.notes[name]}"
            raise UserError(f"data.{name} = {value!r}: data {spec} {own.lacks}. {text}.")

    def open(self, argument: str, faults: Faults, options: Options | None = None) -> Source:
        """Open the data.

        Args:
            argument: What stood after the colon.
            faults: What to do about faults of the data: raise, or collect them.
            options: What loading is asked for; the function gets those of its signature that are
                given.

        Raises:
            UserError: If nothing can be opened, or on a fault that is not collected.
        """
        opener = look_up(self.opener) if isinstance(self.opener, str) else self.opener
        taken = inspect.signature(opener).parameters
        asked = options or Options()
        given = {f.name: getattr(asked, f.name) for f in fields(asked) if f.name in taken}
        given = {name: value for name, value in given.items() if value is not None}
        return cast("Source", opener(argument, faults, **given))


_OWN: dict[str, DataSpec] = {}


@checked
def source(
    name: str,
    *,
    summary: str,
    argument: str = "",
    task: str = DEFAULT,
    kind: str = "image",
    target: str = "",
    settings: tuple[str, ...] = (),
    on_disk: bool = False,
    downloads: bool = False,
) -> Callable[[_Opener], _Opener]:
    """Make a function a data source; of the same name again replaces it.

    The function takes what stood after the colon and a `keymix.data.sample.Faults`, and returns a
    `keymix.data.sample.Source`. It gets those options of loading that its signature names, such as
    ``stack``. The arguments are those of `DataSpec`.

    Raises:
        UserError: If a built-in source has the name, or a kind or setting is unknown.
    """

    def register(opener: _Opener) -> _Opener:
        check_kind("opener", opener, Callable)
        if not opener.__module__.startswith(f"{_SOURCES}."):  # those are found as text
            _register(
                DataSpec(
                    name=name,
                    opener=opener,
                    summary=summary,
                    argument=argument,
                    task=task,
                    kind=kind,
                    target=target,
                    settings=settings,
                    on_disk=on_disk,
                    downloads=downloads,
                )
            )
        return opener

    return register


def _register(spec: DataSpec) -> None:
    if spec.name in built_in():
        raise UserError(f"data {spec.name!r} is keymix's own: choose another name")
    if not spec.name or ":" in spec.name:
        raise UserError(f"data {spec.name!r}: a name has no colon and is not empty")
    get_kind(spec.kind)
    if spec.target and spec.target not in TARGETS:
        raise unknown("kind of target", spec.target, TARGETS)
    for name in spec.settings:
        if name not in OF_ONE_KIND:
            raise unknown("setting of data", name, OF_ONE_KIND)
    _OWN[spec.name] = spec


@cache
def built_in() -> Mapping[str, DataSpec]:
    """Return what the files of sources declare, by name, in alphabetical order.

    A file is read as text, so the arguments of its decorators are constants: importing it would
    load the libraries that open its data.
    """
    found = []
    for file in sorted(Path(__file__).with_name("sources").glob("*.py")):
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            for call in getattr(statement, "decorator_list", ()):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == source.__name__:
                    name, facts = ast.literal_eval(call.args[0]), call.keywords
                    opener = f"{_SOURCES}.{file.stem}:{cast('ast.FunctionDef', statement).name}"
                    given = {str(each.arg): ast.literal_eval(each.value) for each in facts}
                    found.append(DataSpec(name=name, opener=opener, **given))
    return {row.name: row for row in sorted(found, key=lambda row: row.name)}


def list_specs() -> list[DataSpec]:
    """Return all data specs, built-in and registered."""
    return [*built_in().values(), *_OWN.values()]


def find_spec(name: str | None) -> DataSpec | None:
    """Return the spec that a data spec as typed names, whatever its argument; None if none does."""
    if name is None:
        return None
    name = name.partition(":")[0]
    return built_in().get(name) or _OWN.get(name)


def kind_of_spec(spec: str | None) -> InputKind:
    """Return the kind of input that a data spec names, by its name alone; images by default."""
    row = find_spec(spec)
    return IMAGE if row is None else row.input_kind


def task_name(spec: str | None) -> str:
    """Return the task that a data spec sets, by its name alone."""
    row = find_spec(spec)
    return DEFAULT if row is None else row.task


def parse(spec: str) -> tuple[DataSpec, str]:
    """Split a spec as typed into its table row and its argument."""
    name, colon, argument = spec.partition(":")
    known = {s.name: s for s in list_specs()}
    if name not in known:
        if spec and Path(spec).expanduser().exists():
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


def kind_of(path: Path) -> str:
    """Return, by what is there, which spec a path belongs to, such as parquet, coco or folder."""
    looks: tuple[tuple[str, Callable[[Path], bool]], ...] = (
        ("parquet", _holds_parquet),
        ("uwgi", _holds_scans),
        ("coco", lambda at: any(any(at.glob(names)) for names in _OF_COCO)),
        ("csv", _holds_table),
        ("volumes", lambda at: any(any(at.glob(names)) for names in _OF_VOLUMES)),
        ("masks", lambda at: any(_holds_masks(at / part) for part in ("", "train", "val", "test"))),
        ("imagenet", _holds_imagenet),
        ("events", _holds_events),
    )
    return next((name for name, holds in looks if holds(path)), "folder")


def _holds_table(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".csv"
    places = (path, *(part for part in path.glob("*/") if split_named(part.name)))
    return any((place / name).is_file() for place in places for name in TABLES)


def _holds_scans(path: Path) -> bool:
    return (path / "train.csv").is_file() and any((path / "train").glob("case*/"))


def _holds_imagenet(path: Path) -> bool:
    if (path / "ILSVRC").is_dir():
        return True
    if not (path / "train").is_dir() or not (path / "val").is_dir():
        return False
    inside = [p.name for p in (path / "train").iterdir() if p.is_dir()]
    return bool(inside) and all(_WORDNET_ID.fullmatch(name) for name in inside)


def _holds_events(path: Path) -> bool:
    """Whether the first file of the first class is a recording of events."""
    base = path / "train" if (path / "train").is_dir() else path
    inside = (
        sorted(p for p in base.glob("*/") if not p.name.startswith(".")) if base.is_dir() else []
    )
    first = next((file for folder in inside[:1] for file in folder.iterdir()), None)
    return first is not None and first.suffix.lower() == ".npz"


def _holds_masks(path: Path) -> bool:
    return all(folder_named(path, names) for names in (IMAGE_FOLDERS, MASK_FOLDERS))


def _holds_parquet(path: Path) -> bool:
    if path.is_file():
        return path.suffix in (".parquet", ".arrow")
    names = ("*.parquet", "data/*.parquet", "dataset_dict.json", "data-*.arrow")
    return any(any(path.glob(name)) for name in names)
