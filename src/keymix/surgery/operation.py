# SPDX-License-Identifier: Apache-2.0
"""Swap: put mixers into a model that exists, so that it starts near what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

from torch import nn

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerOptions, find_host
from keymix.hosts.layers import Layer, find_layers
from keymix.mixers.map_mixer import MapMixer
from keymix.surgery.account import account
from keymix.surgery.choose import Layers, choose
from keymix.surgery.drift import measure, settle_norms
from keymix.surgery.images import CalibrationImages, Images
from keymix.surgery.keys import estimate_keys
from keymix.surgery.plans import (
    Plan,
    install,
    learned_keys_of,
    plans_for,
    refuse_shared,
    shadow,
)
from keymix.surgery.report import SwapReport
from keymix.surgery.saving import keep_from_loss
from keymix.surgery.statistics import Estimate, Statistics, check_estimate, summed
from keymix.surgery.transfer import Fate, freeze_as, transfer
from keymix.surgery.undo import undone_on_failure

Init = Literal["transfer", "fresh"]
INITS = ("transfer", "fresh")


def swap(
    model: nn.Module,
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
            keymix's, whose mixers are swapped then.
        mixer: Name of a mixer, or one a chosen layer.
        layers: None for all; a number; a range ``"6-11"`` (from 0, both ends count); a
            shell-style pattern on module paths; or a sequence of these.
        mixer_options: One dict for all, one a mixer name, or a list as long as ``mixer``.
        init: ``"transfer"`` copies what has the same meaning and estimates keys on the calibration
            images; ``"fresh"`` starts as a new model does.
        calibration: Images ``[n, C, H, W]`` or an iterable of such batches, normalised as in the
            model's evaluation, at least 8; or the :class:`Statistics` of the model before any
            swap. Without them learned keys start at random and no drift is measured.
        estimate: How learned keys are estimated: least squares on the model's logits, or its mean
            keys by position. Keys of all layers are those of the model as it is handed in, not of
            one whose layers are partly swapped.
        batch_size: Most calibration images at once.
        drift: Whether drift is measured, which takes three passes over the images.

    Returns:
        What became of every layer.

    Raises:
        UserError: If no adapter knows the model, a name is unknown, no layer is meant, a mixer
            cannot sit where it should, a module sits at two places, or the images are not what
            the model takes.
    """
    if init not in INITS:
        raise unknown("init", init, INITS)
    check_estimate(estimate)
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    find_host(model)
    with undone_on_failure(model):
        original, copy = shadow(model), shadow(model)
        found = find_layers(original)
        chosen = choose(found, layers)
        refuse_shared(found, chosen)
        plans = plans_for(chosen, mixer, mixer_options)
        mixers = install(copy, plans)  # refuses what cannot sit there
        statistics, images = _read(
            original, chosen, plans, calibration, estimate, batch_size, needed=init == "transfer"
        )
        fates = {plan.path: Fate() for plan in plans}
        keys = {
            path: learned_keys_of(type(mixer), mixer.site, mixer.built_with)
            for path, mixer in mixers.items()
        }
        for layer in chosen if init == "transfer" else ():
            path = layer.place.path
            fates[path] = transfer(layer, mixers[path])
            made = mixers[path]
            if isinstance(made, MapMixer) and keys[path]:
                _estimate(made, keys[path], path, statistics, estimate, fates[path])
        if init == "transfer":
            settle_norms(original, copy, chosen, mixers, images, fates)
        for layer in chosen:
            freeze_as(layer, mixers[layer.place.path], fates[layer.place.path])
        moved = (
            measure(original, copy, chosen, mixers, images)
            if images is not None and drift
            else None
        )
        learned = any(
            not fates[path].estimated.isdisjoint(chain.from_iterable(each.values()))
            for path, each in keys.items()
        )
        report = SwapReport(
            model=type(model).__name__,
            host=chosen[0].host.name,
            init=init,
            estimate=estimate if learned else None,
            **account(original, copy, found, plans, fates, moved),
        )
        _become(model, copy, plans)
        return report


def _read(
    model: nn.Module,
    chosen: Sequence[Layer],
    plans: Sequence[Plan],
    calibration: Images | Statistics | None,
    estimate: Estimate,
    batch_size: int,
    *,
    needed: bool,
) -> tuple[Statistics | None, CalibrationImages | None]:
    """Return sums of the chosen layers and the images that they are of."""
    if calibration is None:
        return None, None
    if isinstance(calibration, Statistics):
        calibration.check(chosen)
        return calibration, calibration.images
    images = CalibrationImages(calibration, batch_size)
    return summed(model, chosen, plans, images, estimate) if needed else None, images


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
        if not fate.copied.issuperset(chain.from_iterable(keys.values())):
            fate.notes.append("keys start at random; calibration images would set them")
        return
    moments = statistics.layers.get(path)
    if moments is None:
        raise UserError(
            f"the statistics hold nothing of {path} for mixer {mixer.mixer_name!r}; gather them "
            "with the mixer and layers of the swap"
        )
    estimate_keys(mixer, keys, moments, estimate, fate)


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
