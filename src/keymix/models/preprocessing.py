# SPDX-License-Identifier: Apache-2.0
"""How a model's weights want their images shown, in the words of timm's ``pretrained_cfg``.

A model that was built describes the weights its family published. What it was trained with since
then stands in the record of a run's data, and goes over that here, so that
``timm.data.resolve_model_data_config(model)`` gives the evaluation transform of the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from timm.models import get_model_traits
from torch import nn

from keymix.errors import UserError, require
from keymix.hosts.base import encoder_of
from keymix.models.family import families
from keymix.task import DEFAULT, get_task, list_tasks

Config = dict[str, Any]


@runtime_checkable
class TrainedOn(Protocol):
    """What the record of a run's data says of images and classes."""

    @property
    def task(self) -> str:
        """Name of the task."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""

    @property
    def in_chans(self) -> int:
        """Channels."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel, of values 0..1."""

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel."""

    @property
    def crop_pct(self) -> float:
        """Share of the resized image's side that the evaluation crop keeps."""


_SHOWN = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")
_ANSWERED = ("num_classes", "label_names")
_OF_OTHER_WEIGHTS = (
    *("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "tag", "custom_load"),
    *("test_input_size", "test_crop_pct", "test_pool_size"),
    *("label_names", "label_offset", "label_descriptions"),
)
_CROPPED = {"crop_mode": "center", "interpolation": "bicubic"}


def check_shown(
    in_chans: int, mean: Sequence[float], std: Sequence[float], crop_pct: float
) -> None:
    """Refuse what a file says of images if none can be shown so."""
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != in_chans:
            raise UserError(f"{name} = {list(values)}: must be a number for each of {in_chans=}")
    require(0 < crop_pct <= 1, "crop_pct", crop_pct, "must be above 0 and at most 1")


def preprocessing_of(data: TrainedOn) -> Config:
    """Return what the record of a run's data says, as ``pretrained_cfg`` has it."""
    check_shown(data.in_chans, data.mean, data.std, data.crop_pct)
    return {
        "input_size": (data.in_chans, *data.image_size),
        "mean": data.mean,
        "std": data.std,
        "crop_pct": data.crop_pct,
        **_CROPPED,
        **_declared(data.task),
        "num_classes": len(data.classes),
        "label_names": data.classes,
    }


def _declared(task: str) -> Mapping[str, str]:
    """Return what the models for a task, known or not, declare of how its images are resized."""
    takes = get_task(task).takes if task in list_tasks() else task
    builds = [build for build in families() if getattr(build, "task", DEFAULT) == takes]
    return next(filter(None, (getattr(build, "preprocessing", None) for build in builds)), {})


def described(model: nn.Module) -> Config:
    """Return what a model's ``pretrained_cfg`` says of images and classes, and nothing else."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return {name: cfg[name] for name in (*_SHOWN, *_ANSWERED) if name in cfg}


def describe(model: nn.Module, shown: Mapping[str, Any]) -> None:
    """Let a model's ``pretrained_cfg`` say how its weights want their images shown.

    ``shown`` is what `preprocessing_of` or `described` returns. A backbone in it that has a
    description of its own, and the encoder of a dense model, get theirs: the same images, and no
    classes but those that they have. Models that timm did not build are left as they are.
    """
    cfg = getattr(model, "pretrained_cfg", None)
    if not cfg:
        return
    images = {name: _value(shown[name]) for name in _SHOWN if name in shown}
    for part, own in [*_parts(model, cfg)]:
        kept = {name: value for name, value in own.items() if name not in _OF_OTHER_WEIGHTS}
        new: Any = {"pool_size": None, **kept, **images}
        if tuple(own.get("input_size", ())) != new.get("input_size"):
            new["pool_size"] = None  # it was that of the other size
        if part is model:
            new |= {name: _value(shown[name]) for name in _ANSWERED if name in shown}
        elif (classes := getattr(part, "num_classes", None)) is not None:
            new["num_classes"] = classes
        made: Any = part
        made.pretrained_cfg = made.default_cfg = new


def describe_loaded(model: nn.Module, shown: Mapping[str, Any], *, with_classes: bool) -> None:
    """Do as `describe` does for a model that took some weights over, at its own image size.

    ``with_classes`` says whether the classifier was among them.
    """
    traits = get_model_traits(model)
    channels, *size = shown["input_size"]
    if traits.get("in_chans", channels) != channels:
        return  # the first layer is not theirs
    images = {name: shown[name] for name in _SHOWN}
    images["input_size"] = (channels, *(traits.get("img_size") or size))
    own = {"num_classes": traits["num_classes"]} if "num_classes" in traits else {}
    describe(model, images | ({name: shown[name] for name in _ANSWERED} if with_classes else own))


def _parts(model: nn.Module, cfg: Config) -> Iterator[tuple[nn.Module, Config]]:
    """Yield what is described: the model, what in it describes itself, and a bare encoder."""
    encoder, before = encoder_of(model)
    for part in model.modules():
        own = getattr(part, "pretrained_cfg", None)
        if own:
            yield part, own
        elif part is encoder:
            yield part, _inside(cfg, before)


def _inside(cfg: Config, before: str) -> Config:
    """Turn the description of a model into that of its part, whose names begin with ``before``."""
    inside = {name: value for name, value in cfg.items() if name != "architecture"}
    first = cfg.get("first_conv")
    inside["first_conv"] = first.removeprefix(before) if isinstance(first, str) else first
    return inside | {"classifier": None}


def _value(value: Any) -> Any:
    """Make tuples of lists, as JSON leaves them."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
