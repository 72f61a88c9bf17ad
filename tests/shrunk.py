# SPDX-License-Identifier: Apache-2.0
"""Every registered model, made small enough to run in a test: one line a family."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from timm.models import get_pretrained_cfg
from torch import nn

from each import each
from keymix.models import create_model, list_models
from keymix.models.factory import task_of_model
from keymix.task import get_task


@dataclass(frozen=True)
class Family:
    """How a family's models are made small, and what is known of them then.

    Attributes:
        options: Arguments that make any model of the family small.
        wide: Options of a mixer that stand for those of a ``_wide`` row.
        blocks: Blocks that host a mixer in the small model.
        image: Height and width in pixels of its images; the model's own if None.
        path: Pattern of the paths of its mixers, which checkpoints rely on.
        head: Path of the last layer.
        names: Pattern of the models it stands for, where a family has several lines.
        spiking: Whether its tokens are spikes. Its norms are then given the statistics of a
            batch, without which nothing fires in evaluation.
        dense: Whether it answers for every pixel.
    """

    options: dict[str, Any]
    wide: dict[str, Any]
    blocks: int
    image: tuple[int, int] | None = None
    path: str = r"blocks\.\d+\.attn\.mixer"
    head: str = "head"
    names: str = "*"
    spiking: bool = False
    dense: bool = False


_SETR = {"embed_dim": 16, "depth": 2, "num_heads": 2, "decoder_widths": (8, 8, 4, 4)}

FAMILIES: dict[str, Family] = {
    "deepvit": Family(
        options={"embed_dim": 16, "depth": 2, "num_heads": 2},
        wide={},
        blocks=2,
        image=(32, 48),
    ),
    "vit": Family(
        options={"embed_dim": 16, "depth": 4, "num_heads": 2},
        wide={"num_heads": 3, "head_dim": 8},
        blocks=4,
    ),
    "cait": Family(
        options={
            "embed_dim": 16,
            "depth": 4,
            "num_heads": 2,
            "class_heads": 3,
            "class_head_dim": 7,
        },
        wide={"num_heads": 3, "head_dim": 7},
        blocks=4,
    ),
    "swin": Family(
        options={
            "embed_dim": 12,
            "depths": (1, 2, 2),
            "num_heads": (1, 2, 3),
            "merging": (2, 1),
            "patch_size": 4,
        },
        wide={"head_dim": 7},
        blocks=5,
        path=r"layers\.\d+\.blocks\.\d+\.attn\.mixer",
        head="head.fc",
    ),
    "cvt": Family(
        options={"embed_dims": (8, 12, 24), "num_heads": (1, 3, 6), "depths": (1, 1, 2)},
        wide={"head_dim": 7},
        blocks=4,
        path=r"stages\.\d+\.blocks\.\d+\.attn\.mixer",
    ),
    "metaformer": Family(
        options={"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32), "head_dim": 8},
        wide={},
        blocks=5,
        image=(64, 64),
        path=r"stages\.\d+\.blocks\.\d+\.token_mixer\.mixer",
        head="head.fc",
    ),
    "qkformer of two stages": Family(
        options={"embed_dim": 32, "num_heads": 2, "time_steps": 2},
        wide={},
        blocks=2,
        image=(32, 48),
        path=r"stages\.[01]\.blocks\.\d+\.attn\.mixer",
        names="*_256",
        spiking=True,
    ),
    "qkformer": Family(
        options={"embed_dim": 32, "num_heads": 2, "depths": (1, 1, 2), "time_steps": 2},
        wide={},
        blocks=4,
        image=(32, 48),
        path=r"stages\.[012]\.blocks\.\d+\.attn\.mixer",
        spiking=True,
    ),
    "spikformer": Family(
        options={"embed_dim": 32, "num_heads": 2, "depth": 2, "time_steps": 2},
        wide={},
        blocks=2,
        image=(32, 48),
        path=r"stages\.0\.blocks\.\d+\.attn\.mixer",
        spiking=True,
    ),
    "plain_convnet": Family(
        options={"width": 8, "depth": 1},
        wide={},
        blocks=0,
        image=(32, 48),
        path="no attention",
        head="fc",
    ),
    "plain_unet": Family(
        options={"width": 8, "depth": 1},
        wide={},
        blocks=0,
        image=(32, 48),
        path="no attention",
        head="decoder.head",
        dense=True,
    ),
    "trans_unet": Family(
        options={"width": 8, "blocks": 2, "num_heads": 2},
        wide={},
        blocks=2,
        image=(32, 48),
        path=r"transformer\.blocks\.\d+\.attn\.mixer",
        head="decoder.head",
        dense=True,
    ),
    "multi_scale": Family(
        options={
            "backbone": "cvt_micro_32",
            "backbone_options": {
                "embed_dims": (8, 12, 24, 24),
                "num_heads": (1, 3, 6, 6),
                "depths": (1, 1, 1, 1),
                "embeds": ((3, 2, 1),) * 4,
            },
            "decoder_width": 64,
        },
        wide={},
        blocks=4,
        image=(32, 48),
        path=r"encoder\.model\.stages\.\d+\.blocks\.\d+\.attn\.mixer",
        head="decoder.head",
        dense=True,
    ),
    "setr behind a ResNet": Family(
        options={**_SETR, "stem_depths": (1, 1, 1)},
        wide={},
        blocks=2,
        image=(32, 48),
        path=r"encoder\.blocks\.\d+\.attn\.mixer",
        head="decoder.head",
        names="*_ce",
        dense=True,
    ),
    "setr on a CvT": Family(
        options={
            "embed_dims": (8, 12, 24),
            "num_heads": (1, 3, 6),
            "depths": (1, 1, 2),
            "decoder_widths": (8, 8, 4, 4),
        },
        wide={},
        blocks=4,
        image=(32, 48),
        path=r"encoder\.stages\.\d+\.blocks\.\d+\.attn\.mixer",
        head="decoder.head",
        names="*_cvt",
        dense=True,
    ),
    "setr on a backbone": Family(
        options={
            "backbone": "vit_micro_p4_32",
            "backbone_options": {"embed_dim": 16, "depth": 4, "num_heads": 2},
            "decoder_widths": (8, 4),
        },
        wide={},
        blocks=4,
        image=(32, 48),
        path=r"encoder\.model\.blocks\.\d+\.attn\.mixer",
        head="decoder.head",
        names="setr",
        dense=True,
    ),
    "setr": Family(
        options=_SETR,
        wide={},
        blocks=2,
        image=(32, 48),
        path=r"encoder\.blocks\.\d+\.attn\.mixer",
        head="decoder.head",
        dense=True,
    ),
}


def of_tensors() -> list[str]:
    """All models but those whose images keep their own sizes, which take a list of them."""
    return [name for name in list_models() if not get_task(task_of_model(name)).whole_images]


def family_of(name: str) -> Family:
    """The family a model belongs to: that of the module whose table of variants names it."""
    for line, family in FAMILIES.items():
        variants = sys.modules[f"keymix.models.{line.split()[0]}"].VARIANTS
        if name in variants and fnmatch.fnmatch(name, family.names):
            return family
    pytest.fail(f"{name} has no line in tests/shrunk.py")


def arguments(name: str, **options: Any) -> dict[str, Any]:
    """What makes the model of this name small."""
    family = family_of(name)
    size = {"img_size": family.image} if family.image else {}
    wide = {"mixer_options": family.wide} if name.endswith("_wide") else {}
    return {**family.options, **size, **wide, **options}


def shrunk(name: str, **options: Any) -> nn.Module:
    """The model as named, but small."""
    model = create_model(name, **arguments(name, **options))
    if family_of(name).spiking and not next(model.parameters()).is_meta:
        wake(model, images(name))
    return model


def wake(model: nn.Module, x: torch.Tensor) -> None:
    """Give all norms of a model the statistics that a batch has there."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for norm in norms:
        norm.momentum = 0.1


def images(name: str, count: int = 2, seed: int = 1) -> torch.Tensor:
    """Images for the small model of this name."""
    cfg = get_pretrained_cfg(name)
    assert cfg is not None
    channels, *own = cfg.input_size
    height, width = family_of(name).image or own
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, height, width, generator=noise)


def answer(name: str, width: int, count: int = 2) -> tuple[int, ...]:
    """Shape of what the small model of this name answers to so many images."""
    size = images(name).shape[2:] if family_of(name).dense else ()
    return (count, width, *size)


@cache
def different() -> dict[str, nn.Module]:
    """Models that stay different when made small, on ``meta``: one for each form there is."""
    forms: dict[Any, tuple[str, nn.Module]] = {}
    for name in of_tensors():
        with torch.device("meta"):
            model = shrunk(name)
        state = tuple((key, tuple(t.shape)) for key, t in model.state_dict().items())
        forms.setdefault((type(model), repr(model), state), (name, model))
    return dict(forms.values())


def models_of(line: str) -> dict[str, tuple[str]]:
    """Every model that a line of ``FAMILIES`` stands for."""
    return {name: (name,) for name in of_tensors() if family_of(name) is FAMILIES[line]}


def forms_of(line: str) -> dict[str, tuple[str]]:
    """The models of a line of ``FAMILIES`` that stay different when made small."""
    return {name: case for name, case in models_of(line).items() if name in different()}


QUICK = ("deepvit", "swin", "spikformer", "setr on a backbone")
"""Families of a quick run: with time steps or a decoder or neither, of one stage or of several."""


def by_family(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with each ``family``, slow but for a few: all of them together take their time."""
    rows = [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES]
    return pytest.mark.parametrize("family", rows)(test)


def every_model(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of a model's ``name`` with all models, family by family."""
    return by_family(each("name", models_of, of="family")(test))


def every_form(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of a model's ``name`` with each form of a small model, family by family."""
    return by_family(each("name", forms_of, of="family")(test))
