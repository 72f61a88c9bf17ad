# SPDX-License-Identifier: Apache-2.0
"""The model that ``keymix swap`` changes, and the images that calibrate and judge it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.data.kinds import IMAGE, InputKind
from keymix.data.specs import kind_of_spec, task_name
from keymix.errors import UserError, unknown
from keymix.studies.inputs import RANDOM, evenly, is_run, load_models
from keymix.task import Task, get_task

if TYPE_CHECKING:
    from torch import Tensor, nn

    from keymix.data.dataset import ImageData, Split
    from keymix.data.record import DataRecord
    from keymix.train.recipe import Recipe
    from keymix.train.runs import Run

HELD_OUT = 1000
"""Most held-out images where nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A trained model in eval mode on this machine's device, with the data that it is used with.

    `seen` is the record of its data, and `weights` says where its weights come from, with a digest
    of their file if there is one.
    """

    name: str
    model: nn.Module
    recipe: Recipe
    seen: DataRecord
    data: ImageData
    weights: str
    run: Run | None

    def images(self, which: str, count: int | None, option: str) -> tuple[Tensor, Tensor]:
        """Return evenly spaced images ``[n, C, H, W]`` of a split, normalised, and their classes.

        All, but at most `HELD_OUT`, if `count` is None; too few are refused, naming the `option`.
        """
        import torch

        split: Split = getattr(self.data, which)
        number = min(HELD_OUT, len(split)) if count is None else count
        if not 1 <= number <= len(split):
            words = {"train": "training", "val": "validation"}[which]
            raise UserError(
                f"{option} {number}: take 1 to {len(split)} images, as many as the {words} split "
                f"of {self.data.spec} has"
            )
        rows = evenly(len(split), number)
        pixels = torch.stack([split.read(i) for i in rows])
        return self.data.prepared(pixels), split.labels[rows]


def load_source(given: argparse.Namespace) -> Source:
    """Load what ``MODEL``, ``--data``, ``--weights`` and ``--pretrained`` name, or refuse it."""
    from keymix.train.pushed import is_pushed

    if not is_run(given.model) and not is_pushed(given.model):
        return _by_name(given)
    for option, value in (
        ("--pretrained", given.pretrained),
        ("--weights", given.weights),
        ("--image-size", given.image_size),
    ):
        if value:
            raise UserError(
                f"{option} is of models given by name; {given.model!r} is trained, and has its own"
            )
    return _trained(given.model, given.data)


def _trained(name: str, spec: str | None) -> Source:
    """Load a run, or what was pushed."""
    from keymix.train.evaluation import data_for
    from keymix.train.exported import Shipped
    from keymix.train.model import digest_of
    from keymix.train.predict import load
    from keymix.train.recipe import DataConfig, Recipe

    trained = load(name)
    seen, config = trained.data, trained.model_config
    _refuse_others(f"the model {name!r}", seen.task_kind, seen.kind)
    run = None if isinstance(trained.source, Shipped) else trained.source
    if run is not None:
        recipe = run.recipe
    elif spec is not None:
        channels: Any = seen.in_chans
        shown = DataConfig(spec=spec, channels=channels)
        recipe = Recipe(name=config.name, data=shown, model=config)
    else:
        raise UserError(f"{name!r} brings no images: give --data, such as folder:PATH")
    own = replace(recipe.data, spec=seen.spec)
    data = data_for(own, seen, spec, trained.image_size)
    return Source(
        name=name,
        model=trained.model,
        recipe=recipe,
        seen=seen if run is not None else data.record(),
        data=data,
        weights=f"{name}, sha256 {digest_of(trained.model)[:16]}",
        run=run,
    )


def _refuse_others(what: str, task: Task, kind: InputKind) -> None:
    """Refuse models that no swap can be calibrated for, and say what their task does instead."""
    again = "Train again with another --model.mixer"
    if kind.noun != IMAGE.noun:
        raise UserError(
            f"{what} takes {kind.holds}, and a swap is calibrated and judged on images. {again}."
        )
    if "swap" not in task.rooms:
        raise UserError(
            f"{what} {task.does}, and a swap is calibrated and judged on classes. {again}, or swap "
            "in Python: keymix.swap(model, …)."
        )


def _by_name(given: argparse.Namespace) -> Source:
    import timm

    from keymix.cli.console import parse_size
    from keymix.models import load_weights
    from keymix.models.factory import list_models
    from keymix.train.model import (
        device_of_this_machine,
        digest_of,
        load_data,
        model_for,
        start_from,
    )
    from keymix.train.recipe import DataConfig, ModelConfig, Recipe

    name = given.model
    if name not in list_models() and not timm.is_model(name):
        raise unknown("run folder or model", name, [*list_models(), *timm.list_models()])
    if given.data is None:
        raise UserError(
            f"{name!r} is a model by name and brings no images: give --data, such as cifar10 or "
            "folder:PATH"
        )
    if not given.pretrained and given.weights is None:
        raise UserError(
            f"{given.model!r} is a model by name and has no trained weights, which a swap starts "
            "from: give --weights FILE, --pretrained, or the folder of a run"
        )
    if given.pretrained and given.weights:
        raise UserError("--pretrained and --weights exclude each other: give one")
    _refuse_others(
        f"a model of data {given.data!r}",
        get_task(task_name(given.data)),
        kind_of_spec(given.data),
    )
    size = None if given.image_size is None else parse_size(given.image_size)
    shown = load_models([name], pretrained=True)[0] if given.pretrained else None
    if shown is not None:
        size = size or shown.view.size
    recipe = Recipe(
        name=name,
        data=DataConfig(spec=given.data, image_size=size),
        model=ModelConfig(name=name),
    )
    data = load_data(recipe.data, crop_pct=None if shown is None else shown.view.crop_pct)
    model = model_for(recipe, data.record())
    weights = RANDOM
    if shown is not None:
        theirs = getattr(shown.model, "num_classes", None)
        if theirs != len(data.classes):
            raise UserError(
                f"{name!r} was trained for {theirs} classes, and {given.data} has "
                f"{len(data.classes)}: fine-tune it first (keymix train), and swap the run"
            )
        data = replace(data, mean=shown.view.mean, std=shown.view.std)
        loaded = load_weights(model, shown.model.state_dict(), img_size=shown.view.size)
        if loaded.missing:
            raise UserError(f"weights of {name!r} lack {loaded.missing[0]} at this image size")
        weights = f"pretrained {name}"
    elif given.weights is not None:
        path = Path(given.weights).expanduser()
        if not path.is_file():
            raise UserError(f"--weights {given.weights!r}: there is no such file")
        start_from(model, path)
        weights = f"{given.weights}, sha256 {digest_of(model)[:16]}"
    return Source(
        name=name,
        model=model.eval().to(device_of_this_machine()),
        recipe=recipe,
        seen=data.record(),
        data=data,
        weights=weights,
        run=None,
    )
