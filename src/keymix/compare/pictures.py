# SPDX-License-Identifier: Apache-2.0
"""What trained weights show: attention maps, how alike layers are, spikes, a task's own pictures.

``pictures.json`` is a cache of it, with the hash of the weights that it was read off.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from keymix.analysis.attention import attention_maps, masks_tokens, on_image, token_masks
from keymix.analysis.capture import shown_layers
from keymix.analysis.similarity import map_similarity
from keymix.analysis.spikes import read_spikes
from keymix.compare.question import Plan
from keymix.compare.runs import Finished, Reading
from keymix.data.dataset import ImageData
from keymix.data.record import SameImages
from keymix.errors import FAILURES, UserError, reason
from keymix.hosts import find_host, find_mixers
from keymix.records import from_json
from keymix.report.gallery import NO_PICTURES, Gallery, Pictures
from keymix.report.part import ImageOutputs, Page, RunAnswers, packed_shares, page_of
from keymix.report.pictures import image_uri
from keymix.report.record import Attention, Collapse, MapImage, PackedMaps, RunSpikes
from keymix.train.files import read_json, weights_file, write_json
from keymix.train.model import device_of_this_machine, load_data
from keymix.train.parts import answers_of
from keymix.train.runs import load_run

T = TypeVar("T")
FloatArray = npt.NDArray[np.float64]

PICTURES_FILE = "pictures.json"
FORMAT = 2
"""Of this file; one of another is made again."""
PICTURES, COLLAPSE_IMAGES = 4, 64
SPIKE_IMAGES, SPIKE_BATCH = 32, 8
"""Validation images of which spikes are counted, and how many at a time."""
MOST_BYTES = 1_200_000
"""Of all maps as they are packed, so that a page stays below 3 MB; else single heads go."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The content of ``pictures.json``: what it was read off, and what was seen."""

    format: int
    weights: Mapping[str, str]  # the hash of each finished run's, by its folder
    data: SameImages
    images: bool  # whether it has pictures of the data
    pictures: Pictures
    spikes: Mapping[str, RunSpikes]  # of spiking runs, likewise


def look(
    plan: Plan,
    runs: Sequence[Reading],
    data: ImageData | None,
    same: SameImages,
    *,
    images: bool,
) -> Kept:
    """Return what the folder keeps of these runs' weights, or look into the models and keep it.

    `data` are the images if they are loaded already, and else loaded where they are needed: they
    must be the `same`. With `images` there are pictures of the data.
    """
    path = plan.out / PICTURES_FILE
    folders = [each.run.folder for each in runs if isinstance(each, Finished)]
    weights = {name: _hash(plan.out / name) for name in folders}
    kept = Kept(format=FORMAT, weights={}, data=same, images=False, pictures=NO_PICTURES, spikes={})
    with suppress(UserError):
        there = from_json(Kept, read_json(path), where=repr(str(path)))
        kept = there if (there.format, there.data) == (FORMAT, same) else kept
    if kept.images and not images:
        kept = replace(kept, images=False, pictures=Pictures(collapse=kept.pictures.collapse))
        write_json(path, kept)
    if (kept.weights, kept.images) == (weights, images):
        return kept
    known = {n: row for n, row in kept.spikes.items() if kept.weights.get(n) == weights.get(n)}
    try:
        data = data or _loaded(plan, same)
        seen = pictures(plan, runs, data, images=images)
        rows = spikes(plan, runs, data, known)
    except FAILURES as error:  # the images, the weights or a mixer may be elsewhere
        seen = kept.pictures if kept.weights == weights else NO_PICTURES
        note = f"what needs the images is left out: {reason(error)}"
        return replace(kept, pictures=replace(seen, notes=(*seen.notes, note)), spikes=known)
    kept = replace(kept, weights=weights, images=images, pictures=seen, spikes=rows)
    write_json(path, kept)
    return kept


def _loaded(plan: Plan, same: SameImages) -> ImageData:
    data = load_data(plan.recipe.data)
    if SameImages.of(data.record()) != same:
        raise UserError(f"the data {data.spec!r} has changed since")
    return data


def _hash(folder: Path) -> str:
    """Return the hash of a run's last weights; empty where they were moved away."""
    try:
        return hashlib.sha256((folder / weights_file("last")).read_bytes()).hexdigest()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Every mixer's model of one seed, last epoch, by label; `notes` take what failed."""

    models: Mapping[str, nn.Module]
    data: ImageData
    seed: int
    notes: list[str] = field(default_factory=list)

    def each(
        self, look: Callable[[nn.Module], T], what: str
    ) -> tuple[dict[str, T], dict[str, str]]:
        """Look into each model; what was found, and why nothing was, by mixer's label.

        What nobody foresaw is a plain sentence there, and in words among the notes.
        """
        found: dict[str, T] = {}
        missing: dict[str, str] = {}
        for label, model in self.models.items():
            try:
                found[label] = look(model)
            except FAILURES as error:  # UserError included
                missing[label] = _foreseen(error) or f"its {what} could not be read"
                if not _foreseen(error):
                    note = f"the {what} of {label} could not be read: {reason(error)}"
                    self.notes.append(note)
        return found, missing


def _foreseen(error: BaseException) -> str:
    """Return the sentence that says why a model cannot be read; empty where none was written.

    Which method of a mixer to call instead is for whoever calls, and not for a page.
    """
    while isinstance(error, UserError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("; mixer.")[0] if isinstance(error, UserError) else ""


def pictures(plan: Plan, runs: Sequence[Reading], data: ImageData, *, images: bool) -> Pictures:
    """Look into every mixer's model of the first seed that is done, with pictures or without.

    Attention is read where images have one size, so that maps of several images can be compared.
    """
    labels = {each.label for each in plan.mixed}
    tried = {each.label for each in plan.mixed if not each.control}
    done = [each for each in runs if isinstance(each, Finished) and each.run.mixer in labels]
    if not done:
        return NO_PICTURES
    seed = min(each.run.seed for each in done)
    shown = [each for each in done if each.run.seed == seed]
    models = {r.run.mixer: load_run(plan.out / r.run.folder).model("last") for r in shown}
    trained = Trained(models=models, data=data, seed=seed)
    task = data.record().task_kind
    page = page_of(task)
    galleries: dict[str, Gallery] = {}
    if images:
        chosen = tried if len({each.run.mixer for each in done} & tried) > 1 else labels
        tested = [each.tested for each in done if each.run.mixer in chosen]
        galleries |= _drawn(page, trained, tested)
        galleries |= page.gallery(data, tested)
    if task.whole_images:
        return Pictures(galleries=galleries, notes=tuple(trained.notes))
    seen = None
    if images:
        at = page.chosen(done[0].answers["last"], PICTURES)
        said = {r.run.mixer: tuple(page.said(r.answers["last"], at)) for r in shown}
        seen = attention(trained, at, pooling=plan.pooling, label=page.label)
        seen = replace(seen, said={m: each for m, each in said.items() if each} or None)
    return Pictures(
        attention=seen,
        collapse=collapse(trained),
        galleries=galleries,
        notes=tuple(dict.fromkeys(trained.notes)),  # of every stage that was tried
    )


def spikes(
    plan: Plan, runs: Sequence[Reading], data: ImageData, known: Mapping[str, RunSpikes]
) -> dict[str, RunSpikes]:
    """Count the spikes of every finished run of a spiking model, unless they are known."""
    spiking = {each.label for each in plan.mixed if plan.spiking and not each.ann_of}
    done = [r.run for r in runs if isinstance(r, Finished) and r.run.mixer in spiking]
    if not done:
        return {}
    images = torch.stack(data.some(data.val, SPIKE_IMAGES))
    return {r.folder: known.get(r.folder) or _spikes(plan.out / r.folder, images) for r in done}


def _spikes(folder: Path, images: Tensor) -> RunSpikes:
    """Read what the spikes of a run's last weights cost; where that fails, a note says why."""
    try:
        model = load_run(folder).model("last").to(device_of_this_machine())
        with torch.random.fork_rng(devices=[]):
            found = read_spikes(model, torch.split(images, SPIKE_BATCH))
    except FAILURES as error:  # a mixer of the user's may do what none does
        return RunSpikes(notes=(reason(error),))
    low, middle, high, dense = (1e-6 * pj for pj in (*found.energy, found.ann_energy))  # µJ
    return RunSpikes(
        images=found.images,
        firing_rate=found.rate,
        silent=found.silent,
        sops=found.sops,
        macs=found.macs,
        energy_uj=middle,
        energy_low_uj=low,
        energy_high_uj=high,
        dense_energy_uj=dense,
    )


def _drawn(page: Page, trained: Trained, tested: Sequence[RunAnswers]) -> Mapping[str, Gallery]:
    """Let the task draw what each model answers to the test images that it chose."""
    chosen, data = page.drawn(tested), trained.data
    if not chosen:
        return {}
    record, test = data.record(), data.test
    read = test.own if test.view.mode == "window" else test.read
    each = [data.prepared(read(i)[None])[0] for i in chosen]
    part, device = answers_of(record.task_kind), device_of_this_machine()
    each = [one.to(device) for one in each]
    images = each if record.listed else torch.stack(each)

    def answered(model: nn.Module) -> Any:
        outputs = part.answering(model.eval().to(device), record, data.image_size)(images)
        model.cpu()
        return tree_map_only(Tensor, Tensor.cpu, outputs)

    with torch.inference_mode():
        outputs, missing = trained.each(answered, "answers")
    given = ImageOutputs(chosen=chosen, outputs=outputs, missing=missing, seed=trained.seed)
    return page.draw(data, given)


def attention(
    trained: Trained,
    chosen: Sequence[int],
    *,
    pooling: str,
    label: Callable[[ImageData, int], str],
) -> Attention:
    """Record where every mixer's trained model looks on the same few test images.

    The map is that after the softmax, head by head and averaged over heads: the row of the class
    token where the model reads out by it and it passes through the mixers, else the mean of the
    rows of all patch tokens. Prefix keys are left out, and windows are put back on the image. Of
    a model in stages one is shown: the first, whose maps are the finest, of those in which most
    mixers have maps. `chosen` says which test images, and `label` what one of them is.
    """
    data, models = trained.data, trained.models
    images = data.prepared(torch.stack([data.test.read(i) for i in chosen]))
    found = [list(find_mixers(model).values()) for model in models.values()]
    # CaiT's class token is not there yet where its mixers sit
    present = all(mixer.site.num_prefix_tokens for mixers in found for mixer in mixers)
    by_class_token = pooling == "token" and present
    read = []
    for stage in _stages(models):
        layers = shown_layers(stage)
        maps = partial(_maps, images=images, layers=layers, by_class_token=by_class_token)
        read.append((layers, *trained.each(maps, "attention maps")))
    layers, weights, missing = max(read, key=lambda stage: len(stage[1]))
    depth = max(map(len, found), default=0)
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
        class_token=by_class_token,
        seed=trained.seed,
        maps={
            mixer: packed(each, kind="mask" if masks_tokens(models[mixer], layers) else None)
            for mixer, each in without_heads(weights).items()
        },
        missing=missing,
    )


def _stages(models: Mapping[str, nn.Module]) -> list[list[int]]:
    """Return the blocks of each stage, by their numbers in the model's order."""
    model = next(iter(models.values()))
    stages: dict[int, list[int]] = {}
    for i, place in enumerate(find_host(model).places(model)):
        stages.setdefault(place.stage, []).append(i)
    return list(stages.values())


def without_heads(maps: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Leave single heads out of maps that would make the page too large."""
    size = sum(each.size for each in maps.values()) * 2 * 4 / 3  # two bytes each, in base64
    return {mixer: each[:, :, :1] if size > MOST_BYTES else each for mixer, each in maps.items()}


def packed(weights: FloatArray, *, kind: Literal["mask"] | None = None) -> PackedMaps:
    """Pack weights ``[image, layer, 1 + heads, H, W]``, as shares of ``scale``, the largest."""
    scale = float(weights.max())
    return PackedMaps(
        heads=weights.shape[2] - 1,
        grid=(weights.shape[3], weights.shape[4]),
        weights=packed_shares(weights / scale if scale > 0 else weights),
        scale=scale,
        kind=kind,
    )


def _maps(
    model: nn.Module, images: Tensor, layers: Sequence[int], by_class_token: bool
) -> FloatArray:
    """Read the maps of some layers, ``[image, layer, 1 + heads, H, W]``, or the masks of tokens.

    A `UserError` says that a layer has neither.
    """
    if masks_tokens(model, layers):
        seen = [_with_mean(each) for each in token_masks(model, images, layers=layers).values()]
    else:
        query: Any = "cls" if by_class_token else "mean"
        rows = attention_maps(model, images, layers=layers, queries=query, windows="image")
        seen = [
            _with_mean(on_image(maps, rows.layouts[path])[:, :, 0]) for path, maps in rows.items()
        ]
    stacked = np.stack(seen, axis=1)
    if not np.isfinite(stacked).all():
        raise UserError("its attention is not finite")
    return stacked


def _with_mean(heads: Tensor) -> FloatArray:
    """Put the mean over heads before them: ``[B, h, H, W]`` to ``[B, 1 + h, H, W]``."""
    heads = heads.double()
    found: FloatArray = np.concatenate([heads.mean(1, keepdim=True), heads], axis=1)
    return found


def collapse(trained: Trained) -> Collapse:
    """Record how alike the maps of neighbouring blocks are (DeepViT, Eq. 2).

    Maps of different stages have different sizes and are not compared: of a model in stages that
    is taken in which most mixers can be read, and of those the deepest.
    """
    data, every = trained.data, _stages(trained.models)
    images = torch.stack(data.some(data.test, COLLAPSE_IMAGES))
    read = []
    for stage in [stage for stage in every if len(stage) > 1] or every[:1]:
        alike = partial(_likeness, images=images, stage=stage)
        read.append((stage, *trained.each(alike, "similarity of blocks")))
    blocks, similarity, missing = max(read, key=lambda r: (len(r[1]), len(r[0])))
    return Collapse(
        pairs=tuple(f"{i + 1}–{i + 2}" for i in blocks[:-1]),
        images=len(images),
        seed=trained.seed,
        similarity=similarity,
        missing=missing,
    )


def _likeness(model: nn.Module, images: Tensor, stage: Sequence[int]) -> tuple[float, ...]:
    """Compare the maps of neighbours in a stage: the mean of each pair."""
    values = [pair.mean for pair in map_similarity(model, images, layers=list(stage)).adjacent]
    if any(math.isnan(v) for v in values):
        raise UserError("a block's map is zero throughout")
    return tuple(round(v, 6) for v in values)
