# SPDX-License-Identifier: Apache-2.0
"""Put mixers into a trained model, all or none, so that it starts near what it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from keymix.analysis.counting import run_counting
from keymix.analysis.images import Images
from keymix.arguments import Trained, checked, module_of, opened
from keymix.errors import UserError, check_positive
from keymix.hosts.base import MixerOptions, Plan, find_host, install, shadow
from keymix.hosts.layers import Layer, find_layers, unread_attention
from keymix.layers.folding import refuse_folded
from keymix.mixers.base import TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.models.swapped import keep_from_loss
from keymix.swap.calibration import (
    Estimate,
    Statistics,
    estimate_keys,
    look_beside,
    reconstruct,
    summed,
)
from keymix.swap.drift import measure, settle_norms
from keymix.swap.images import MIN_IMAGES, CalibrationImages, input_size, read_pictures
from keymix.swap.plans import (
    Layers,
    choose,
    learned_keys_of,
    plans_for,
    refuse_shared,
)
from keymix.swap.report import (
    SAYS_NOTHING,
    LayerDrift,
    LayerRow,
    OutputDrift,
    SwapReport,
    Untouched,
)
from keymix.swap.transfer import Fate, freeze_as, keep_around, parts_of, stems, transfer


@contextmanager
def rollback_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore a model's modules and the random states, of the CPU and its devices, on a failure.

    Only which modules, parameters, buffers and hooks are where is remembered, not their values: the
    body must not write into tensors that the model has already.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    drawn = torch.get_rng_state()
    drawn_there = {device: torch.cuda.get_rng_state(device) for device in devices}
    before = [(module, type(module), _attributes(module)) for module in model.modules()]
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            for module, kind, was in before:
                _restore(module, kind, was)
            torch.set_rng_state(drawn)
            for device, state in drawn_there.items():
                torch.cuda.set_rng_state(state, device)


_State = dict[str, tuple[Any, dict[Any, Any] | None]]


def _attributes(module: nn.Module) -> _State:
    """Return a module's attributes; of a dictionary, such as its children's, what is in it too."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None)
        for name, value in vars(module).items()
    }


def _restore(module: nn.Module, kind: type[nn.Module], was: _State) -> None:
    if type(module) is not kind:
        module.__class__ = kind
    vars(module).clear()
    for name, (value, content) in was.items():
        if content is not None:
            value.clear()
            value.update(content)
        vars(module)[name] = value


Init = Literal["transfer", "fresh"]


@checked
def swap(
    model: nn.Module | Trained | str | Path,
    mixer: str | Sequence[str],
    layers: Layers = None,
    *,
    mixer_options: MixerOptions = None,
    init: Init = "transfer",
    calibration: Images | Statistics | None = None,
    estimate: Estimate = "least_squares",
    batch_size: int = 32,
    drift: bool = True,
) -> SwapReport:
    """Put mixers in the place of a model's attention, in place, all of them or none.

    Everything is planned, built and estimated on a copy that shares the model's parameters; the
    model itself changes last. After a refusal or a failure it is what it was, bit for bit, and so
    are the random states. Hooks of the model run on the copy too, where it is shown images.

    Heads, their width, biases, dropouts and scale are those of the present attention unless
    ``mixer_options`` say otherwise. Copied weights train if those that they come from did, a
    projection of queries, keys and values in one if any of them did, new ones do; modes, device
    and type stay.

    Args:
        model: Any model that an adapter knows: timm's, torchvision's, Hugging Face's, or one of
            keymix's, whose mixers are swapped then; or what `keymix.load` returns, whose model is
            changed. The model of a run's folder is ``swapped`` of what is returned.
        mixer: Name of a mixer, or one per chosen layer.
        layers: None for all that attend; a number; a range ``"6-11"`` (from 0, both ends count); a
            shell-style pattern on module paths; or a sequence of these.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        init: ``"transfer"`` copies what has the same meaning and estimates keys on the calibration
            images; ``"fresh"`` starts as a new model does.
        calibration: Images ``[n, C, H, W]`` or an iterable of such batches, normalised as in the
            model's evaluation, or pictures in a list, at least 8; or the :class:`Statistics` of the
            model before any swap. Without them learned keys start at random and no drift is
            measured.
        estimate: ``"mean"`` keys by position, or ``"least_squares"`` on the original's logits,
            layer by layer: each sees what the swapped layers before it give (:class:`Statistics`
            are of the model before any swap). ``"reconstruct"`` then moves all that is new in a
            mixer towards the outputs of the layer before, which keeps a layer's inputs and outputs
            in memory.
        batch_size: Most calibration images at once.
        drift: Whether drift is measured, which takes three passes over the images.

    Returns:
        What became of every layer.

    Raises:
        UserError: If an argument is none of these, no adapter knows the model, no layer is meant, a
            mixer cannot sit where it should, a module sits at two places, or the images are not
            what the model takes.
    """
    check_positive(batch_size=batch_size)
    trained = opened(model)
    model = module_of(trained)
    refuse_folded(model, "swap")
    find_host(model)
    images_of = read_pictures(calibration, trained)
    with torch.inference_mode(False), rollback_on_failure(model):
        original, copy = shadow(model), shadow(model)
        found = find_layers(original)
        chosen = choose(found, layers)
        refuse_shared(found, chosen)
        plans = plans_for(chosen, mixer, mixer_options)
        mixers = install(copy, plans)  # refuses what cannot sit there
        statistics, images = _read(original, chosen, plans, images_of, estimate, batch_size, init)
        in_order = images is not None and statistics is not images_of and estimate != "mean"
        fates = {plan.path: Fate() for plan in plans}
        keys = {
            path: learned_keys_of(type(mixer), mixer.site, mixer.built_with)
            for path, mixer in mixers.items()
        }
        for layer in chosen if init == "transfer" else ():  # in order: each sees those before it
            path = layer.place.path
            made, fate = mixers[path], transfer(layer, mixers[path])
            fates[path] = fate
            unknown = not fate.copied.issuperset(chain.from_iterable(keys[path].values()))
            wanted = [*keys[path]] if unknown and in_order else []
            fits = estimate == "reconstruct"
            if isinstance(made, MapMixer) and unknown:  # also where this only checks sizes
                first = Fate(copied=fate.copied) if wanted else fate
                _estimate(made, keys[path], path, statistics, estimate, first)
            if images is not None and (wanted or fits):
                sums, seen = look_beside(
                    original, copy, layer, made, images, wanted=wanted, keep=fits
                )
                if isinstance(made, MapMixer) and wanted:
                    estimate_keys(made, keys[path], sums, estimate, fate)
            settle_norms(original, copy, [layer], {path: made}, images, fates)
            if images is not None and fits:
                reconstruct(copy.get_submodule(path), made, seen, fate)
        for layer in chosen:
            freeze_as(layer, mixers[layer.place.path], fates[layer.place.path])
        moved = (
            measure(original, copy, chosen, mixers, images)
            if images is not None and drift
            else None
        )
        learned = (estimate == "reconstruct" and images is not None) or any(
            not fates[path].estimated.isdisjoint(chain.from_iterable(each.values()))
            for path, each in keys.items()
        )
        used = estimate if learned else None
        report = _report(original, copy, found, plans, fates, moved, init, used)
        parameters = {id(parameter) for parameter in model.parameters()}
        hooked = {path: m for path, m in model.named_modules() if _heard(m)}
        _become(model, copy, plans)
        trained = [p for p in model.parameters() if p.requires_grad and id(p) not in parameters]
        stays = {id(module) for module in model.modules()}
        silent = tuple(path for path, module in hooked.items() if id(module) not in stays)
        return replace(report, swapped=model, new_tensors=len(trained), silent_hooks=silent)


def _read(
    model: nn.Module,
    chosen: Sequence[Layer],
    plans: Sequence[Plan],
    calibration: Tensor | Iterable[Any] | Statistics | None,
    estimate: Estimate,
    batch_size: int,
    init: Init,
) -> tuple[Statistics | None, CalibrationImages | None]:
    """Return sums in one pass and the images, of which a few do where keys are made in order."""
    if calibration is None:
        return None, None
    if isinstance(calibration, Statistics):
        calibration.check(chosen)
        return calibration, calibration.images
    images = CalibrationImages(calibration, batch_size)
    if init == "fresh":
        return None, images
    some = images if estimate == "mean" else replace(images, number=MIN_IMAGES)
    return summed(model, chosen, plans, some, estimate), images


def _estimate(
    mixer: MapMixer,
    keys: Mapping[str, tuple[str, ...]],
    path: str,
    statistics: Statistics | None,
    estimate: Estimate,
    fate: Fate,
) -> None:
    """Estimate those of the keys that a mixer learns that were not copied."""
    if statistics is None:
        fate.notes.append("keys start at random; calibration images would set them")
        return
    moments = statistics.layers.get(path)
    if moments is None:
        raise UserError(
            f"the statistics hold nothing of {path} for mixer {mixer.mixer_name!r}; gather them "
            "with the mixer and layers of the swap"
        )
    estimate_keys(mixer, keys, moments, estimate, fate)


def _heard(module: nn.Module) -> bool:
    """Whether hooks hear a module's calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _become(model: nn.Module, copy: nn.Module, plans: Sequence[Plan]) -> None:
    """Do to the model what was done to its copy."""
    install(model, plans)
    keep_from_loss(model)
    for plan in plans:
        there, here = copy.get_submodule(plan.path), model.get_submodule(plan.path)
        here.load_state_dict(there.state_dict())
        pairs = zip(here.parameters(), there.parameters(), strict=True)
        for mine, other in pairs:
            mine.requires_grad_(other.requires_grad)


def _report(
    original: nn.Module,
    copy: nn.Module,
    found: Sequence[Layer],
    plans: Sequence[Plan],
    fates: Mapping[str, Fate],
    moved: tuple[Mapping[str, LayerDrift], OutputDrift] | None,
    init: Init,
    estimate: Estimate | None,
) -> SwapReport:
    """Say what became of every layer of a model; both models run here for the last time."""
    notes = []
    drifts, output = moved if moved is not None else ({}, None)
    if output is not None and not output.varies:
        notes.append(f"drift of the output is undefined: {SAYS_NOTHING}")
    size = input_size(original) or (output.image_size if output is not None else None)
    both: tuple[dict[str, int], dict[str, int]] | None = None  # multiply-adds by path
    try:
        both = _counted(original, size), _counted(copy, size)
    except UserError as error:
        notes.append(f"multiply-adds are not counted: {error}")
    layers = {layer.place.path: layer for layer in found}
    notes += [
        f"{path} ({type(original.get_submodule(path)).__name__}) stays: no adapter reads it"
        for path in unread_attention(original, found)
    ]
    blocks = {path: number for number, path in enumerate(layers, start=1)}
    rows = tuple(
        _row(blocks, layers[plan.path], plan, original, copy, fates[plan.path], both, drifts)
        for plan in plans
    )
    touched = {row.path for row in rows}
    untouched = tuple(
        Untouched(path=path, what=_name(layer), why="not among the layers chosen")
        for path, layer in layers.items()
        if path not in touched
    )
    return SwapReport(
        model=type(original).__name__,
        host=layers[plans[0].path].host.name,
        init=init,
        estimate=estimate,
        rows=rows,
        untouched=untouched,
        params=(_params(original), _params(copy)),
        macs=None if both is None else (sum(both[0].values()), sum(both[1].values())),
        output=output,
        unread=tuple(notes),
    )


def _row(
    blocks: Mapping[str, int],
    layer: Layer,
    plan: Plan,
    original: nn.Module,
    copy: nn.Module,
    fate: Fate,
    both: tuple[dict[str, int], dict[str, int]] | None,
    drifts: Mapping[str, LayerDrift],
) -> LayerRow:
    before, after = original.get_submodule(plan.path), copy.get_submodule(plan.path)
    mixer = after.get_submodule("mixer")
    assert isinstance(mixer, TokenMixer)  # a host puts it there
    names = set(parts_of(mixer)) | keep_around(before, after, fate)
    fresh = names - fate.copied - fate.estimated
    return LayerRow(
        path=plan.path,
        block=blocks[plan.path],
        before=_name(layer),
        after=plan.mixer,
        copied=stems(fate.copied, names - fate.copied),
        estimated=stems(fate.estimated, names - fate.estimated),
        fresh=stems(fresh, names - fresh),
        dropped=stems(fate.dropped, ()),
        params=(_params(before), _params(after)),
        macs=None
        if both is None
        else (macs_within(both[0], plan.path), macs_within(both[1], plan.path)),
        drift=drifts.get(plan.path),
        notes=tuple(fate.notes),
    )


def _name(layer: Layer) -> str:
    if layer.mixer is None:
        return type(layer.module).__name__
    return layer.mixer.mixer_name or type(layer.mixer).__name__


def _params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _counted(model: nn.Module, size: tuple[int, ...] | None) -> dict[str, int]:
    """Multiply-adds of one image by module."""
    if size is None:
        raise UserError(f"{type(model).__name__} does not say which images it takes")
    anchor = next(model.parameters())
    return run_counting(model, anchor.new_zeros(1, *size)).by_path


def macs_within(counted: Mapping[str, int], path: str) -> int:
    """Add up the multiply-adds, by path, of a module and those inside it."""
    return sum(n for name, n in counted.items() if name == path or name.startswith(f"{path}."))
