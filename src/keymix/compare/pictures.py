# SPDX-License-Identifier: Apache-2.0
"""What the trained models see: attention maps, how alike layers are, and a task's own pictures."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from keymix.analysis.answers import Answers
from keymix.analysis.attention import attention_maps, masks_tokens, on_image, token_masks
from keymix.analysis.collapse import map_similarity
from keymix.compare.question import Plan
from keymix.compare.runs import Finished, Reading
from keymix.data.dataset import ImageData, Split
from keymix.data.record import SameImages
from keymix.errors import FAILURES, UserError, reason
from keymix.hosts import find_host, find_mixers
from keymix.records import from_json
from keymix.report.gallery import Gallery, Pictures
from keymix.report.part import ImageOutputs, Page, page_of
from keymix.report.pictures import image_uri
from keymix.report.record import Attention, Collapse, MapImage, PackedMaps
from keymix.train.files import read_json, weights_file, write_json
from keymix.train.model import load_data
from keymix.train.runs import load_run

T = TypeVar("T")
FloatArray = npt.NDArray[np.float64]

PICTURES_FILE = "pictures.json"
PICTURES, COLLAPSE_IMAGES = 4, 64
MOST_LAYERS = 12
"""Layers of which attention maps are kept at most."""
FEWEST_LAYERS = 2
"""... and at least, before single heads are left out."""
MOST_BYTES = 1_200_000
"""Of all maps as they are packed, so that a page stays below 3 MB."""


@dataclass(frozen=True, kw_only=True)
class Maps:
    """A model's maps of a stage, ``[image, layer, 1 + heads, H, W]``, the mean over heads first."""

    weights: FloatArray
    kind: Literal["mask"] | None = None

    @property
    def layer_bytes(self) -> float:
        """Size of one layer as it is packed: two bytes per weight, in base64."""
        return self.weights[:, 0].size * 2 * 4 / 3


Stage = tuple[list[int], dict[str, Maps], dict[str, str]]
"""What was read of a stage: its blocks, and maps and reasons by mixer's label."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The content of ``pictures.json``: what it was read off, and what was seen."""

    weights: Mapping[str, str]  # the hash of each finished run's, by its folder
    data: SameImages
    images: bool  # whether it has pictures of the data
    pictures: Pictures


def kept_pictures(
    plan: Plan,
    runs: Sequence[Reading],
    data: ImageData | None,
    same: SameImages,
    *,
    images: bool,
) -> Pictures:
    """Return what the folder keeps of these runs' weights, or look into the models and keep it.

    `data` are the images if they are loaded already, and else loaded where they are needed: they
    must be the `same`. With `images` there are pictures of the data.
    """
    path = plan.out / PICTURES_FILE
    folders = [each.run.folder for each in runs if isinstance(each, Finished)]
    weights = {name: weights_hash(plan.out / name) for name in folders}
    kept = None
    with suppress(UserError):
        kept = from_json(Kept, read_json(path), where=repr(str(path)))
    if kept is not None and (kept.weights, kept.data) != (weights, same):
        kept = None
    if kept is None or (images and not kept.images):
        try:
            looked = pictures(plan, runs, data or _loaded(plan, same), images=images)
            kept = Kept(weights=weights, data=same, images=images, pictures=looked)
            write_json(path, kept)
        except FAILURES as error:  # the images, the weights or a mixer may be elsewhere
            if kept is None:
                return Pictures(notes=(f"attention maps are left out: {reason(error)}",))
            note = f"pictures of the data are left out: {reason(error)}"
            return replace(kept.pictures, notes=(*kept.pictures.notes, note))
    elif kept.images and not images:
        kept = replace(kept, images=False, pictures=kept.pictures.bare())
        write_json(path, kept)
    return kept.pictures


def _loaded(plan: Plan, same: SameImages) -> ImageData:
    data = load_data(plan.recipe.data)
    if SameImages.of(data.record()) != same:
        raise UserError(f"the data {data.spec!r} has changed since")
    return data


def weights_hash(folder: Path) -> str:
    """Return the hash of a run's last weights; empty where they were moved away."""
    try:
        return hashlib.sha256((folder / weights_file("last")).read_bytes()).hexdigest()
    except OSError:
        return ""


def pictures(plan: Plan, runs: Sequence[Reading], data: ImageData, *, images: bool) -> Pictures:
    """Look into every mixer's model of one seed, last epoch; with pictures of the data or without.

    Attention is read where images have one size, so that maps of several images can be compared.
    """
    seed, models = trained_models(plan, runs)
    task = data.record().task_kind
    page, notes = page_of(task), list[str]()
    done = [each for each in runs if isinstance(each, Finished)]
    answers = done[0].answers["last"]
    galleries: dict[str, Gallery] = {}
    if images:
        galleries |= _drawn(page, models, data, answers, seed=seed, notes=notes)
        galleries |= page.gallery(data, [each.tested for each in _to_show(plan, done)])
    if task.whole_images:
        return Pictures(galleries=galleries, notes=tuple(notes))
    chosen = page.chosen(answers, PICTURES)
    seen = attention(
        models,
        data,
        pooling=plan.pooling,
        seed=seed,
        chosen=chosen,
        label=page.label,
        notes=notes,
    )
    said = {
        each.run.mixer: tuple(page.said(each.answers["last"], chosen))
        for each in done
        if each.run.seed == seed and each.run.mixer in models
    }
    looked = Pictures(
        attention=replace(seen, said={m: each for m, each in said.items() if each} or None),
        collapse=collapse(models, data, seed=seed, notes=notes),
        galleries=galleries,
        notes=tuple(dict.fromkeys(notes)),  # of every stage that was tried
    )
    return looked if images else looked.bare()


def _to_show(plan: Plan, done: Sequence[Finished]) -> list[Finished]:
    """Leave out controls and points of reference, unless fewer than two mixers are left."""
    mixed = {each.label for each in plan.mixed}
    tried = {each.label for each in plan.mixed if not each.control}
    shown = tried if len({r.run.mixer for r in done} & tried) > 1 else mixed
    return [each for each in done if each.run.mixer in shown]


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
    page: Page,
    models: Mapping[str, nn.Module],
    data: ImageData,
    answers: Answers,
    *,
    seed: int,
    notes: list[str],
) -> Mapping[str, Gallery]:
    """Let the task draw what each model answers to the test images that it chose."""
    chosen = page.drawn(answers)
    if not chosen:
        return {}
    images: Tensor | list[Tensor]
    if data.record().task_kind.whole_images:  # which keep their own sizes
        images = [normalised(data, data.test, [i])[0] for i in chosen]
    else:
        images = normalised(data, data.test, chosen)
    with torch.inference_mode():
        outputs, missing = _of_each(
            models, lambda model: model.eval()(images), what="answers", notes=notes
        )
    given = ImageOutputs(chosen=chosen, outputs=outputs, missing=missing, seed=seed)
    return page.draw(data, given)


def _of_each(
    models: Mapping[str, nn.Module],
    look: Callable[[nn.Module], T],
    *,
    what: str,
    notes: list[str],
) -> tuple[dict[str, T], dict[str, str]]:
    """Look into each model; what was found, and why nothing was, by mixer's label.

    What nobody foresaw is a plain sentence there, and in words among the notes.
    """
    found: dict[str, T] = {}
    missing: dict[str, str] = {}
    for label, model in models.items():
        try:
            found[label] = look(model)
        except FAILURES as error:  # UserError included
            missing[label] = _foreseen(error) or f"its {what} could not be read"
            if not _foreseen(error):
                notes.append(f"the {what} of {label} could not be read: {reason(error)}")
    return found, missing


def _foreseen(error: BaseException) -> str:
    """Return the sentence that says why a model cannot be read; empty where none was written.

    Which method of a mixer to call instead is for whoever calls, and not for a page.
    """
    while isinstance(error, UserError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("; mixer.")[0] if isinstance(error, UserError) else ""


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
    notes: list[str],
) -> Attention:
    """Record where every mixer's trained model looks on the same few test images.

    The map is that after the softmax, head by head and averaged over heads: the row of the class
    token where the model reads out by it and it passes through the mixers, else the mean of the
    rows of all patch tokens. Prefix keys are left out, and windows are put back on the image. Of
    a model in stages one is shown: that in which most mixers have maps, and of those the one with
    the finest. `chosen` says which test images, `label` what one of them is, and `notes` takes
    what failed.
    """
    images = normalised(data, data.test, chosen)
    found = [list(find_mixers(model).values()) for model in models.values()]
    depth = max(map(len, found), default=0)
    # CaiT's class token is not there yet where its mixers sit
    present = all(mixer.site.num_prefix_tokens for mixers in found for mixer in mixers)
    by_class_token = pooling == "token" and present
    read = [_read(models, images, stage, by_class_token, notes) for stage in _stages(models)]
    layers, maps, missing = max(read, key=_worth)
    layers, maps = thinned(layers, maps)
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
        maps={mixer: packed(each.weights, kind=each.kind) for mixer, each in maps.items()},
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
    models: Mapping[str, nn.Module],
    images: Tensor,
    stage: Sequence[int],
    by_class_token: bool,
    notes: list[str],
) -> Stage:
    """Read every model's maps in some blocks: the blocks, maps and reasons by label."""
    layers = chosen_layers(stage)
    maps, missing = _of_each(
        models,
        lambda model: _maps(model, images, layers, by_class_token),
        what="attention maps",
        notes=notes,
    )
    return layers, maps, missing


def _worth(read: Stage) -> tuple[int, int, int]:
    """How much a stage shows: mixers with maps, then positions of a map, then blocks."""
    layers, maps, _ = read
    finest = max((math.prod(found.weights.shape[-2:]) for found in maps.values()), default=0)
    return len(maps), finest, len(layers)


def chosen_layers(blocks: Sequence[int], most: int = MOST_LAYERS) -> list[int]:
    """Return all of some blocks, or a number of them evenly, first and last included."""
    last = len(blocks) - 1
    if last < most:
        return list(blocks)
    return [blocks[round(i * last / (most - 1))] for i in range(most)]


def thinned(layers: list[int], maps: dict[str, Maps]) -> tuple[list[int], dict[str, Maps]]:
    """Leave out layers, and then single heads, of maps that would make the page too large."""
    each = sum(of_mixer.layer_bytes for of_mixer in maps.values())
    if each * len(layers) <= MOST_BYTES:
        return layers, maps
    positions = chosen_layers(range(len(layers)), max(FEWEST_LAYERS, int(MOST_BYTES // each)))
    heads = slice(None) if each * len(positions) <= MOST_BYTES else slice(1)
    less = {m: replace(of, weights=of.weights[:, positions, heads]) for m, of in maps.items()}
    return [layers[i] for i in positions], less


def packed(weights: FloatArray, *, kind: Literal["mask"] | None = None) -> PackedMaps:
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
        kind=kind,
    )


def _maps(model: nn.Module, images: Tensor, layers: Sequence[int], by_class_token: bool) -> Maps:
    """Read the maps of some layers, or the masks of tokens of mixers that have these instead.

    A `UserError` says that a layer has neither, or that maps of different layers differ in shape.
    """
    if masks_tokens(model, layers):
        masks = token_masks(model, images, layers=layers)
        return Maps(weights=_stacked([_with_mean(each) for each in masks.values()]), kind="mask")
    query: Any = "cls" if by_class_token else "mean"
    rows = attention_maps(model, images, layers=layers, queries=query, windows="image")
    if lost := [path for path in rows if path not in rows.layouts]:
        raise UserError(f"where the tokens of layer {lost[0]} are on the image is not known")
    pictures = [
        _with_mean(on_image(maps, rows.layouts[path])[:, :, 0]) for path, maps in rows.items()
    ]
    return Maps(weights=_stacked(pictures))


def _stacked(pictures: Sequence[FloatArray]) -> FloatArray:
    """Put the maps of layers into one array, the layer behind the image."""
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


def collapse(
    models: Mapping[str, nn.Module], data: ImageData, *, seed: int, notes: list[str]
) -> Collapse:
    """Record how alike the maps of neighbouring blocks are (DeepViT, Eq. 2).

    Maps of different stages have different sizes and are not compared: of a model in stages that
    is taken in which most mixers can be read, and of those the deepest.
    """
    images = normalised(data, data.test, evenly(data.test, COLLAPSE_IMAGES))
    stages = [stage for stage in _stages(models) if len(stage) > 1] or _stages(models)[:1]
    look = partial(_of_each, models, what="similarity of blocks", notes=notes)
    read = [(stage, *look(partial(_likeness, images=images, stage=stage))) for stage in stages]
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
