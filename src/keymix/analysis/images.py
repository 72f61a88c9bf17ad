# SPDX-License-Identifier: Apache-2.0
"""Images as people have them, and the batches that a model takes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keymix.analysis.counting import default_input_size
from keymix.analysis.study_record import UNNAMED, ModelOnImages
from keymix.arguments import Trained, described, module_of, unwrapped
from keymix.data.decode import fit
from keymix.data.kinds import IMAGE, InputKind
from keymix.data.pixels import prepared
from keymix.data.shown import PICTURES, Picture, image_files, picture_pixels
from keymix.errors import UserError
from keymix.models.preprocessing import check_shown

Model: TypeAlias = nn.Module | Trained | str | Path
"""A model, what `keymix.load` returns, or the folder of a run."""
Images: TypeAlias = Tensor | Picture | Iterable[Any]
"""A tensor, a picture, or batches of tensors or pictures one after another."""
_WANTED = (
    "give a tensor [B, C, H, W] as the model takes it, or pictures: files, Pillow's, uint8 arrays "
    "[H, W, C], a list of them"
)


@dataclass(frozen=True, kw_only=True)
class View:
    """How a model is shown an image: as in its evaluation."""

    size: tuple[int, int]  # height and width, pixels
    in_chans: int  # channels: 1, 3 or the slices of a stack
    mean: tuple[float, ...]  # mean of each channel, of values 0..1
    std: tuple[float, ...]  # standard deviation of each channel
    crop_pct: float  # share of the resized image's side that the centre crop keeps
    kind: InputKind = IMAGE  # kind of input that it is
    white_level: int | None = None  # 16-bit grey value that is white; None for 65,535

    @classmethod
    def of(cls, model: nn.Module) -> View:
        """Read off timm's configuration how a model is shown images."""
        from timm.data import resolve_model_data_config

        if not getattr(model, "pretrained_cfg", None):
            raise UserError(
                f"{type(model).__name__} does not say how it is shown pictures: give a tensor "
                "[B, C, H, W], normalised as in its evaluation"
            )
        config, (channels, *size) = resolve_model_data_config(model), default_input_size(model)
        if channels not in (1, 3):
            raise UserError(f"{type(model).__name__} takes {channels} channels; images have 1 or 3")
        mean, std = (tuple(float(v) for v in config[key]) for key in ("mean", "std"))
        if channels == 1 and len(mean) == 3:
            mean, std = (sum(mean) / 3,), (sum(std) / 3,)
        crop_pct = config["crop_pct"]
        check_shown(channels, mean, std, crop_pct)
        return cls(
            size=(size[0], size[1]), in_chans=channels, mean=mean, std=std, crop_pct=crop_pct
        )

    def normalised(self, pixels: Tensor) -> Tensor:
        """Turn what was read, ``[*, C, H, W]``, into what the model takes, float32."""
        return prepared(pixels, self.kind, mean=self.mean, std=self.std)

    def transform(self, picture: Any) -> Tensor:
        """Read, resize, crop and normalise a picture, as the evaluation does: ``[C, H, W]``."""
        pixels = torch.from_numpy(picture_pixels(picture, self.in_chans, self.white_level).copy())
        return self.normalised(fit(pixels, self.size, self.crop_pct))


def named(given: Model, network: nn.Module) -> ModelOnImages:
    """Name a model that is given in Python: a run's folder, timm's name of it, or its class."""
    config = getattr(network, "pretrained_cfg", None) or {}
    of_model = config.get("architecture") or type(network).__name__
    name = str(given) if isinstance(given, str | Path) else str(of_model)
    return replace(UNNAMED, label=name, name=name)


def batches_of(
    images: Images, model: object, size: int, *, frames: bool = False
) -> Iterator[Tensor]:
    """Yield batches of images, of `size` where they are one tensor or come one by one.

    Pictures are read as the model is shown them, a module or what `keymix.load` returned; other
    tensors are taken as they are. Batches may have more in them, ``(images, labels)``; where
    `frames` may be given, ``[B, T, C, H, W]`` are taken too.
    """
    if isinstance(images, bytes | dict):
        raise UserError(f"images={described(images)}: {_WANTED}")
    one = isinstance(images, PICTURES)
    several: Any = (images,) if one else images
    read: Callable[[Any], Tensor] | None = None
    waiting: list[Tensor] = []
    for given in several:
        batch = given[0] if isinstance(given, tuple | list) and given else given
        for each in _parts(batch, events=getattr(model, "takes_events", False)):
            if isinstance(each, Tensor) and each.ndim in ((4, 5) if frames else (4,)):
                yield from filter(len, torch.split(each, size) if one else (each,))
                continue
            if not isinstance(each, Tensor) or each.dtype == torch.uint8:
                if not isinstance(each, PICTURES):
                    raise UserError(f"images hold {described(each)}: {_WANTED}")
                read = read or _reader(model)
                waiting.append(read(each))
            elif each.ndim == 3:
                waiting.append(each)
            else:
                raise UserError(f"images hold {described(each)}: {_WANTED}")
            if len(waiting) == size:
                yield _stacked(waiting)
                waiting = []
    if waiting:
        yield _stacked(waiting)


def one_batch(images: Images, model: object) -> Tensor:
    """Return images as one batch; other tensors than an image are taken as they are."""
    alone = isinstance(images, Tensor) and images.ndim == 3 and _takes_images(model)
    if isinstance(images, Tensor) and images.dtype != torch.uint8 and not alone:
        found = [images] if len(images) else []
    elif isinstance(images, (*PICTURES, list, tuple)):
        found = [*batches_of(images, model, 2**20)]
    else:
        raise UserError(f"images={described(images)}: {_WANTED}")
    if not found:
        raise UserError(f"images={described(images)}: there is no image in it")
    return found[0] if len(found) == 1 else _stacked([image for batch in found for image in batch])


def _takes_images(model: object) -> bool:
    """Whether a model says which images it takes; other tensors may be its tokens."""
    try:
        default_input_size(module_of(model))
    except UserError:
        return False
    return True


def _parts(given: Any, *, events: bool) -> Iterator[Any]:
    """Yield tensors, and pictures one by one.

    Arrays of floating point numbers are tensors where channels come first.
    """
    if isinstance(given, np.ndarray) and given.dtype.kind == "f" and given.ndim >= 3:
        first = given.shape[-3] in (1, 3) or given.shape[-1] not in (1, 3, 4)
        given = torch.from_numpy(given) if first else given
    bytewise = isinstance(given, Tensor) and given.dtype == torch.uint8
    if isinstance(given, str | Path):
        yield from image_files([given], events=events)
    elif (bytewise or isinstance(given, np.ndarray)) and given.ndim == 4:
        yield from given
    else:
        yield given


def _reader(model: object) -> Callable[[Any], Tensor]:
    """Return what reads pictures for a model."""
    if isinstance(model, nn.Module):
        return View.of(unwrapped(model)).transform
    trained: Any = model
    return trained.transform  # type: ignore[no-any-return] # of what keymix.load returned


def _stacked(images: list[Tensor]) -> Tensor:
    if len({image.shape for image in images}) > 1:
        sizes = ", ".join(sorted({str(tuple(image.shape)) for image in images}))
        raise UserError(f"images are of several sizes, {sizes}: give them one size")
    return torch.stack(images)
