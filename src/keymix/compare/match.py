# SPDX-License-Identifier: Apache-2.0
"""Equal parameters: widen a mixer's inner width until the model counts as the baseline's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keymix.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from keymix.mixers.spec import MixerSpec

MOST_TIMES = 8
"""Search up to so many times the mixer's own heads."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """What a search chose.

    Args:
        spec: The mixer with its chosen width.
        params: Trainable parameters of the model with it.
        note: The choice in words.
    """

    spec: MixerSpec
    params: int
    note: str


def nearest(target: int, count: Callable[[int], int], start: int, stop: int, step: int = 1) -> int:
    """Return the width in range(start, stop, step) whose count is nearest, ties to the smaller.

    Args:
        target: The count to come near to.
        count: Parameters by width; growing with the width.
        start: First width tried.
        stop: First width not tried any more.
        step: Negative to search downwards.
    """
    best, best_gap = start, abs(count(start) - target)
    for width in range(start + step, stop, step):
        found = count(width)
        gap = abs(found - target)
        if gap < best_gap or (gap == best_gap and width < best):
            best, best_gap = width, gap
        if (found - target) * step > 0:  # past the target; it only gets worse from here
            break
    return best


def matched(
    spec: MixerSpec, target: int, build: Callable[[MixerSpec], nn.Module], model: nn.Module
) -> Match:
    """Widen a mixer to the parameters of the baseline: heads of the same width first, then width.

    A mixer never gets fewer heads than the model gives it. One that already has the baseline's
    parameters or more stays as it is, and the note says so.

    Args:
        spec: The mixer.
        target: Trainable parameters of the baseline's model.
        build: Builds the model with a mixer, on the meta device.
        model: That model with the mixer as it is.

    Raises:
        UserError: If the blocks of the model differ in heads or width, so that no one number fits.
    """
    from keymix.compare.plan import trainable
    from keymix.hosts import find_mixers
    from keymix.mixers.registry import mixer_options

    own = trainable(model)
    if any("head_dim" not in mixer_options(name) for name in spec.names):
        return Match(spec=spec, params=own, note="it has no inner width to match.")
    given = {key for pairs in spec.options for key, _ in pairs}
    if given & {"num_heads", "head_dim"}:
        return Match(spec=spec, params=own, note="its width was set by hand and stays.")
    if own >= target:
        return Match(
            spec=spec,
            params=own,
            note=f"not widened: with {own:,} parameters it is not smaller than the baseline.",
        )
    sites = {(m.site.num_heads, m.site.dim) for m in find_mixers(model).values()}
    if len(sites) != 1:
        raise UserError(
            f"--match params: the blocks of this model differ in heads or width ({spec.label}). "
            "Compare without --match, or set num_heads in the mixer's options."
        )
    heads, dim = sites.pop()
    width = dim // heads

    def sized(num_heads: int, head_dim: int) -> MixerSpec:
        return spec.with_options(num_heads=num_heads, head_dim=head_dim)

    def count(num_heads: int, head_dim: int) -> int:
        return trainable(build(sized(num_heads, head_dim)))

    more = nearest(target, lambda h: count(h, width), heads, MOST_TIMES * heads + 1)
    if count(more, width) > target:
        least = 1 if more > heads else width
        wide = nearest(target, lambda d: count(more, d), width, least - 1, -1)
    else:
        wide = nearest(target, lambda d: count(more, d), width, 2 * width + 1)
    if (more, wide) == (heads, width):
        note = f"kept: no inner width comes nearer to the baseline's {target:,} parameters."
        return Match(spec=spec, params=own, note=note)
    chosen = sized(more, wide)
    params = count(more, wide)
    return Match(
        spec=chosen,
        params=params,
        note=(
            f"inner width matched to the baseline's {target:,} parameters: {more} heads of {wide} "
            f"instead of {heads} of {width}, {params:,} parameters."
        ),
    )
