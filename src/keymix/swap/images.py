# SPDX-License-Identifier: Apache-2.0
"""Calibration images: checked once, read in batches as often as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.capture import cannot_take
from keymix.analysis.counting import default_input_size
from keymix.analysis.images import one_batch
from keymix.data.shown import PICTURES
from keymix.errors import UserError
from keymix.hosts.base import find_mixers

MIN_IMAGES = 8
"""With fewer images a mean over them says little."""

_HOOK = "keymix_hook"
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)


def input_size(model: nn.Module) -> tuple[int, int, int] | None:
    """Return (channels, height, width) of the images a model is made for, if it says so."""
    config: Any = getattr(model, "config", None)  # Hugging Face's
    try:
        declared = default_input_size(model)
    except UserError:
        declared = None
    given = (getattr(config, "image_size", None), getattr(model, "image_size", None))
    size = next((s for s in (*given, getattr(model, "img_size", None)) if s is not None), None)
    if size is None:
        return declared
    sides = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(config, "num_channels", 3 if declared is None else declared[0])
    return int(channels), int(sides[-2]), int(sides[-1])


def read_pictures(images: Any, model: object) -> Any:
    """Read images that are pictures, one or a list; what else they are stays as it is."""
    several = images if isinstance(images, list | tuple) else [images]
    pictures = all(isinstance(e, PICTURES) and not isinstance(e, Tensor) for e in several)
    return one_batch(images, model) if several and pictures else images


@dataclass(frozen=True, eq=False)
class CalibrationImages:
    """Images that a model is shown, normalised as in its own evaluation."""

    # a tensor ``[n, C, H, W]``, or an iterable of such batches; of a batch with more in it,
    # ``(images, labels)``, the first is taken. An iterator that runs once is kept whole.
    source: Tensor | Iterable[Any]
    batch_size: int = 32  # most images at once
    number: int | None = None  # how many are taken; all if None

    def __post_init__(self) -> None:
        if isinstance(self.source, Iterator):
            object.__setattr__(self, "source", list(self.source))

    def batches(self, model: nn.Module) -> Iterator[Tensor]:
        """Yield batches of at most ``batch_size`` images, where the model is and in its type.

        Images of another size than the model states are let through where nothing in it is known
        to be bound to that: whether it takes them shows when it runs. Others, and too few, are
        refused.
        """
        anchor = next(model.parameters())
        any_size = bool(getattr(model, "dynamic_img_size", False))  # timm's
        wanted, bound, seen = None if any_size else input_size(model), _bound(model), 0
        for given in (self.source,) if isinstance(self.source, Tensor) else self.source:
            batch = _checked(given, wanted, bound=bound)
            if self.number is not None:
                batch = batch[: self.number - seen]
            seen += len(batch)
            for start in range(0, len(batch), self.batch_size):
                part = batch[start : start + self.batch_size]
                yield part.to(anchor.device, anchor.dtype)
            if seen == self.number:
                break
        if seen < (self.number or MIN_IMAGES):
            asked = self.number not in (None, MIN_IMAGES)
            least = "were asked for" if asked else "are the least"
            raise UserError(
                f"{seen} calibration images were given and {self.number or MIN_IMAGES} {least}"
            )


def _bound(model: nn.Module) -> bool:
    """Whether a model is known to serve one image size: its patches say so, or a mixer."""
    strict = getattr(getattr(model, "patch_embed", None), "strict_img_size", False)  # timm's
    tied = any(mixer.tied_to_grid for mixer in find_mixers(model).values())
    return bool(strict) or tied


def _fits(images: Sequence[int], wanted: tuple[int, int, int], *, bound: bool) -> bool:
    """Whether images ``(channels, height, width)`` may be shown to a model made for others.

    Higher and narrower ones, or the other way round, may make as many tokens on another grid: keys
    estimated there would be of other positions, and their number would not show it.
    """
    higher, wider = images[1] - wanted[1], images[2] - wanted[2]
    if images[0] != wanted[0]:
        return False
    return higher == wider == 0 or (not bound and higher * wider >= 0)


def _checked(given: object, wanted: tuple[int, int, int] | None, *, bound: bool) -> Tensor:
    """Return a batch's images; refuse what are none, or none for a model that takes ``wanted``."""
    batch = given[0] if isinstance(given, tuple | list) and given else given
    if not isinstance(batch, Tensor):
        raise UserError(
            f"calibration images must be tensors [n, C, H, W], got {type(batch).__name__}"
        )
    if batch.ndim != 4:
        raise UserError(f"calibration images must be [n, C, H, W], got shape {tuple(batch.shape)}")
    if not batch.is_floating_point():
        raise UserError(
            f"calibration images are {batch.dtype}; give floating point numbers, normalised as in "
            "the model's evaluation"
        )
    if wanted is not None and not _fits(batch.shape[1:], wanted, bound=bound):
        raise UserError(
            "calibration images are {}x{}x{} (channels, height, width) and the model takes "
            "{}x{}x{}".format(*batch.shape[1:], *wanted)
        )
    if not batch.isfinite().all():
        raise UserError("calibration images hold NaN or infinity")
    return batch


def of_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let what fails in a hook of ours be reported as it is, not as the fault of the images."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except (*_FAILURES, RuntimeError) as error:
            setattr(error, _HOOK, True)
            raise

    return call


def run(model: nn.Module, images: Tensor) -> Tensor:
    """Call a model and return its class logits, or what it gives in their place.

    Images that it cannot take are refused.
    """
    try:
        out = model(images)
    except UserError:
        raise
    except (*_FAILURES, RuntimeError) as error:
        if hasattr(error, _HOOK) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise cannot_take(model, images, error, "calibration images") from error
    for name in ("logits", "pooler_output", "last_hidden_state"):
        named = getattr(out, name, None)
        if isinstance(named, Tensor):
            return named
    if isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor):
        raise UserError(f"{type(model).__name__} returns {type(out).__name__}, not one tensor")
    return out
