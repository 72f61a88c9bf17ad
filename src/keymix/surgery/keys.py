# SPDX-License-Identifier: Apache-2.0
r"""Learned keys estimated from what a model's own keys do on calibration images.

The mean key of position m is :math:`\bar K_m = E[k_m]`. Least squares asks for the logits: with
:math:`\phi` what the key meets (the query, or its unfolded neighbourhood) and s the scale, each
head's

.. math:: \min_K \sum_{images, n} \lVert s\, \phi_n K^\top - L_n \rVert^2
          + \lambda s^2 \lVert K - \bar K \rVert^2

is solved by its normal equations. The ridge draws to the mean key, so that the fit is never worse
than it on the same images, and is the mean key exactly where keys do not depend on the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.ops import resample
from keymix.surgery.plans import PREFIX
from keymix.surgery.statistics import Estimate, Moments, unfolded
from keymix.surgery.transfer import Fate

RIDGE = 1e-4
"""The ridge, relative to the mean square of a feature summed over all queries."""


def estimate_keys(
    mixer: MapMixer,
    keys: Mapping[str, tuple[str, ...]],
    moments: Moments,
    estimate: Estimate,
    fate: Fate,
) -> None:
    """Set what a mixer learns in place of keys, where it was not copied, and note it in ``fate``.

    Raises:
        UserError: If the sums are those of another mixer.
    """
    if fate.copied.issuperset(chain.from_iterable(keys.values())):
        return
    if moments.why_not is not None or moments.keys is None:
        fate.notes.append(f"keys start afresh: {moments.why_not}")
        return
    if moments.keys.shape[-3] != mixer.num_heads or moments.keys.shape[-1] != mixer.head_dim:
        return  # told already: other heads
    with torch.no_grad():
        for queries, names in keys.items():
            if fate.copied.isdisjoint(names):
                rows = _solve(mixer, moments, queries, estimate).flatten(0, -2)  # one a key
                targets = [mixer.get_parameter(name) for name in names]
                widths = [target.numel() // len(rows) for target in targets]
                for target, part in zip(targets, torch.split(rows, widths, -1), strict=True):
                    target.copy_(part.reshape(target.shape))
                fate.estimated |= set(names)
    if estimate == "least_squares":
        fate.notes += _thin(mixer, moments)


def _thin(mixer: MapMixer, moments: Moments) -> list[str]:
    """Say where there are fewer queries than unknowns, so that a fit says little of others."""
    told = []
    for name, gram in moments.gram.items():
        windows = gram.shape[0] if gram.ndim > 3 and mixer.site.windows == 1 else 1
        rows, unknowns = moments.rows[name] * windows, gram.shape[-1]
        if rows < unknowns:
            told.append(
                f"{rows} {'queries' if name != PREFIX else PREFIX} of {moments.images} images set "
                f"{unknowns} unknowns a key, so the drift on these images says little of others: "
                f"give {math.ceil(moments.images * unknowns / rows)} or more"
            )
    return told


def _solve(mixer: MapMixer, moments: Moments, name: str, estimate: Estimate) -> Tensor:
    """Return the weights of a set of features for every key, ``[*, h, M, F]``."""
    gain = mixer.gain()
    gain = gain.double() if isinstance(gain, Tensor) else gain
    mean = _laid(mixer, moments, _mean(mixer, moments)) * (moments.scale / gain)
    start = _embedded(mean, name)
    if estimate == "mean":
        return start
    if name not in moments.gram:
        raise UserError(
            f"the statistics hold no least squares of {name} for mixer {mixer.mixer_name!r}; "
            "gather them with mixer= and estimate= as in the swap"
        )
    gram, cross = (_shared(mixer, t[name]) for t in (moments.gram, moments.cross))
    cross = _laid(mixer, moments, cross.mT).mT / gain
    size = gram.shape[-1]
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridge = torch.where(ridge > 0, ridge, torch.ones_like(ridge))[..., None, None]
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    change: Tensor = torch.linalg.solve(gram + ridge * eye, cross - gram @ start.mT)
    return start + change.mT


def _embedded(mean: Tensor, name: str) -> Tensor:
    """Write mean keys as weights of a set of features: the centre of a window, and no bias."""
    side = unfolded(name)
    if side is None:
        return mean
    filters = mean.new_zeros(*mean.shape, side * side)
    filters[..., side * side // 2] = mean
    flat = filters.flatten(-2)
    return torch.cat((flat, flat.new_zeros(*flat.shape[:-1], 1)), -1)


def _mean(mixer: MapMixer, moments: Moments) -> Tensor:
    """Mean key by position, ``[(nW,) h, M, d]``, as the mixer's windows are."""
    keys = moments.keys
    assert keys is not None  # asked by estimate_keys
    windows = keys.shape[0] if keys.ndim > 3 and mixer.site.windows == 1 else 1
    return _shared(mixer, keys) / (moments.images * windows)


def _shared(mixer: MapMixer, sums: Tensor) -> Tensor:
    """Sum over windows where the mixer's windows share their keys."""
    return sums.sum(0) if sums.ndim > 3 and mixer.site.windows == 1 else sums


def _laid(mixer: MapMixer, moments: Moments, rows: Tensor) -> Tensor:
    """Average rows, one a key, onto the grid of the mixer's keys, where it is another.

    Logits are linear in the keys, so those of an averaged key are the averaged logits.
    """
    old, new = moments.key_grid, mixer.site.key_grid or mixer.site.grid or (1, 1)
    windows = rows.shape[0] if rows.ndim > 3 else 1
    made, there = (windows, rows.shape[-2]), (mixer.site.windows, moments.prefix + old[0] * old[1])
    if made != there:
        raise UserError(
            "calibration images make {} windows of {} keys and the model is laid for {} of {}; "
            "give images of its size, or say it where the model does not know it "
            "(model.image_size = height, width)".format(*made, *there)
        )
    return resample.pool(rows, moments.prefix, old, new)
