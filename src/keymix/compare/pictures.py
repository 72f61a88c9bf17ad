# SPDX-License-Identifier: Apache-2.0
"""What the trained models see: attention maps, how alike layers are, and a task's own pictures."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from keymix.analysis.answers import Answers
from keymix.analysis.attention import attention_maps, on_image
from keymix.analysis.collapse import map_similarity
from keymix.compare.executor import FAILURES, reason
from keymix.compare.plan import Plan
from keymix.compare.runs import Finished, Reading
from keymix.data.dataset import ImageData, Split
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts import find_host, find_mixers
from keymix.records import Own
from keymix.report.part import Page, page_of
from keymix.report.pictures import image_uri
from keymix.report.record import Attention, Collapse, MapImage, PackedMaps
from keymix.train.runs import load_run

T = TypeVar("T")
FloatArray = npt.NDArray[np.float64]
Stage = tuple[list[int], dict[str, PackedMaps], dict[str, str]]
"""What was read of a stage: its blocks, and maps and reasons by mixer's label."""

PICTURES, COLLAPSE_IMAGES = 4, 64
MOST_LAYERS = 12
"""Layers of which attention maps are kept at most."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """What was read off the models and the images; None where it could not be."""

    attention: Attention | None = None
    collapse: Collapse | None = None
    own: Own = field(default_factory=Own)  # the task's pictures of the models' answers


def pictures(plan: Plan, runs: Sequence[Reading], data: ImageData) -> Pictures:
    """Look into every mixer's model of one seed, last epoch.

    Attention is read where images have one size, so that maps of several images can be compared.
    """
    seed, models = trained_models(plan, runs)
    task = data.record().task_kind
    page = page_of(task)
    answers = next(r.answers["last"] for r in runs if isinstance(r, Finished))
    own = Own.of(_drawn(page, models, data, answers, seed=seed))
    if task.whole_images:
        return Pictures(own=own)
    return Pictures(
        attention=attention(
            models,
            data,
            pooling=plan.pooling,
            seed=seed,
            chosen=page.chosen(answers, PICTURES),
            label=page.label,
        ),
        collapse=collapse(models, data, seed=seed),
        own=own,
    )


def trained_models(plan: Plan, runs: Sequence[Reading]) -> tuple[int, dict[str, nn.Module]]:
    """Load every mixer's model of the first seed at which any run is done, last epoch.

    Returns that seed, and the models by label; a mixer without that run is absent.
    """
    done = {(r.run.mixer, r.run.seed): r.run.folder for r in runs if isinstance(r, Finished)}
    labels = [each.label for each in plan.mixed]
    seed = next((s for s in plan.seeds if any((m, s) in done for m in labels)), plan.seeds[0])
    models = {
        label: load_run(plan.out / done[label, seed]).model("last")
        for label in labels
        if (label, seed) in done
    }
    return seed, models


def _drawn(
    page: Page, models: Mapping[str, nn.Module], data: ImageData, answers: Answers, *, seed: int
) -> object:
    """Let the task draw what each model answers to the test images that it chose."""
    chosen = page.drawn(answers)
    if not chosen:
        return None
    images: Tensor | list[Tensor]
    if data.record().task_kind.whole_images:  # which keep their own sizes
        images = [normalised(data, data.test, [i])[0] for i in chosen]
    else:
        images = normalised(data, data.test, chosen)
    with torch.inference_mode():
        outputs, missing = _of_each(models, lambda model: model.eval()(images))
    return page.draw(data, chosen, outputs, missing, seed=seed)


def _of_each(
    models: Mapping[str, nn.Module], look: Callable[[nn.Module], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Look into each model; what was found, and why nothing was, by mixer's label."""
    found: dict[str, T] = {}
    missing: dict[str, str] = {}
    for label, model in models.items():
        try:
            found[label] = look(model)
        except FAILURES as error:  # UserError included
            cause = error.__cause__
            missing[label] = reason(cause if isinstance(cause, NoAttentionMap) else error)
    return found, missing


def evenly(split: Split, number: int) -> list[int]:
    """Return indices of images at equal distances over a split."""
    n = len(split)
    return sorted({i * n // min(number, n) for i in range(min(number, n))})


def normalised(data: ImageData, split: Split, chosen: Sequence[int]) -> Tensor:
    """Read images as the models see them in evaluation, ``[B, C, H, W]`` or frames."""
    return data.prepared(torch.stack([split.read(i) for i in chosen]))


def attention(
    models: Mapping[str, nn.Module],
    data: ImageData,
    *,
    pooling: str,
    seed: int,
    chosen: Sequence[int],
    label: Callable[[ImageData, int], str],
) -> Attention:
    """Record where every mixer's trained model looks on the same few test images.

    The map is that after the softmax, head by head and averaged over heads: the row of the class
    token where the model reads out by it and it passes through the mixers, else the mean of the
    rows of all patch tokens. Prefix keys are left out, and windows are put back on the image. Of
    a model in stages one is shown: that in which most mixers have maps, and of those the one with
    the finest. `chosen` says which test images, `label` what one of them is.
    """
    images = normalised(data, data.test, chosen)
    found = [list(find_mixers(model).values()) for model in models.values()]
    depth = max(map(len, found), default=0)
    # CaiT's class token is not there yet where its mixers sit
    present = all(mixer.site.num_prefix_tokens for mixers in found for mixer in mixers)
    by_class_token = pooling == "token" and present
    read = [_read(models, images, stage, by_class_token) for stage in _stages(models)]
    layers, maps, missing = max(read, key=_worth)
    query = (
        "Attention of the class token to the patches"
        if by_class_token
        else "Attention that the patches receive, averaged over all patch tokens"
    )
    return Attention(
        images=tuple(
            MapImage(
                png=image_uri(data.test.picture(i).numpy()),
                label=label(data, i),
                id=data.test.ids(i),
            )
            for i in chosen
        ),
        layers=tuple(f"Block {i + 1} of {depth}" for i in layers),
        query=f"{query}, after the softmax, weights of the last epoch, seed {seed}.",
        maps=maps,
        missing=missing,
    )


def _stages(models: Mapping[str, nn.Module]) -> list[list[int]]:
    """Return the blocks of each stage, by their numbers in the model's order."""
    model = next(iter(models.values()))
    stages: dict[int, list[int]] = {}
    for i, place in enumerate(find_host(model).places(model)):
        stages.setdefault(place.stage, []).append(i)
    return list(stages.values())


def _read(
    models: Mapping[str, nn.Module], images: Tensor, stage: Sequence[int], by_class_token: bool
) -> Stage:
    """Read every model's maps in some blocks: the blocks, maps and reasons by label."""
    layers = chosen_layers(stage)
    maps, missing = _of_each(
        models, lambda model: packed(_weights(model, images, layers, by_class_token))
    )
    return layers, maps, missing


def _worth(read: Stage) -> tuple[int, int, int]:
    """How much a stage shows: mixers with maps, then positions of a map, then blocks."""
    layers, maps, _ = read
    finest = max((math.prod(found.grid) for found in maps.values()), default=0)
    return len(maps), finest, len(layers)


def chosen_layers(blocks: Sequence[int]) -> list[int]:
    """Return all of some blocks, or `MOST_LAYERS` of them evenly, first and last included."""
    last = len(blocks) - 1
    if last < MOST_LAYERS:
        return list(blocks)
    return [blocks[round(i * last / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]


def packed(weights: FloatArray) -> PackedMaps:
    """Pack weights ``[image, layer, 1 + heads, H, W]`` as base64 of little-endian uint16.

    A weight is its number / 65535 * ``scale``, the largest weight of all.
    """
    scale = float(weights.max())
    numbers = np.round(weights / scale * 65535) if scale > 0 else np.zeros_like(weights)
    return PackedMaps(
        heads=weights.shape[2] - 1,
        grid=(weights.shape[3], weights.shape[4]),
        weights=base64.b64encode(numbers.astype("<u2").tobytes()).decode("ascii"),
        scale=scale,
    )


def _weights(
    model: nn.Module, images: Tensor, layers: Sequence[int], by_class_token: bool
) -> FloatArray:
    """Read the maps of some layers, ``[image, layer, 1 + heads, H, W]``; slice 0 is the mean.

    A `UserError` says that a layer has no map, or that maps of different layers differ in shape.
    """
    query: Any = "cls" if by_class_token else "mean"
    rows = attention_maps(model, images, layers=layers, queries=query, windows="image")
    if lost := [path for path in rows if path not in rows.layouts]:
        raise UserError(f"where the tokens of layer {lost[0]} are on the image is not known")
    pictures = [
        _with_mean(on_image(maps, rows.layouts[path])[:, :, 0]) for path, maps in rows.items()
    ]
    for which, shapes in (
        ("heads", {picture.shape[1] - 1 for picture in pictures}),
        ("grids", {picture.shape[2:] for picture in pictures}),
    ):
        if len(shapes) > 1:
            listed = ", ".join(
                "×".join(map(str, s)) if isinstance(s, tuple) else str(s) for s in sorted(shapes)
            )
            raise UserError(f"its layers differ in {which} ({listed})")
    stacked = np.stack(pictures, axis=1)
    if not np.isfinite(stacked).all():
        raise UserError("its attention is not finite")
    return stacked


def _with_mean(heads: Tensor) -> FloatArray:
    """Put the mean over heads before them: ``[B, h, H, W]`` to ``[B, 1 + h, H, W]``."""
    heads = heads.double()
    found: FloatArray = np.concatenate([heads.mean(1, keepdim=True), heads], axis=1)
    return found


def collapse(models: Mapping[str, nn.Module], data: ImageData, *, seed: int) -> Collapse:
    """Record how alike the maps of neighbouring blocks are (DeepViT, Eq. 2).

    Maps of different stages have different sizes and are not compared: of a model in stages that
    is taken in which most mixers can be read, and of those the deepest.
    """
    images = normalised(data, data.test, evenly(data.test, COLLAPSE_IMAGES))
    stages = [stage for stage in _stages(models) if len(stage) > 1] or _stages(models)[:1]
    read = [
        (stage, *_of_each(models, partial(_likeness, images=images, stage=stage)))
        for stage in stages
    ]
    blocks, similarity, missing = max(read, key=lambda r: (len(r[1]), len(r[0])))
    return Collapse(
        pairs=tuple(f"{i + 1}–{i + 2}" for i in blocks[:-1]),
        images=len(images),
        seed=seed,
        similarity=similarity,
        missing=missing,
    )


def _likeness(model: nn.Module, images: Tensor, stage: Sequence[int]) -> tuple[float, ...]:
    """Compare the maps of neighbours in a stage: the mean of each pair."""
    values = [pair.mean for pair in map_similarity(model, images, layers=list(stage)).adjacent]
    if any(math.isnan(v) for v in values):
        raise UserError("a block's map is zero throughout")
    return tuple(round(v, 6) for v in values)
