# SPDX-License-Identifier: Apache-2.0
"""Equal parameters: widen a mixer's inner width until the model counts as the baseline's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from keymix.hosts.base import find_host, find_mixers
from keymix.mixers.head_mixer import HeadMixer
from keymix.mixers.registry import mixer_options
from keymix.mixers.spec import MixerSpec
from keymix.mixers.spiking import SpikingMixer

Builder = Callable[[MixerSpec], nn.Module]

MOST_TIMES = 8
"""Multiple of the mixer's own heads up to which is searched."""
WITH_HEADS = (HeadMixer, SpikingMixer)
"""Mixers whose inner width is heads of some width."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """What a search chose: the mixer with its width, the model's trainable parameters, in words."""

    spec: MixerSpec
    params: int
    note: str


def trainable(model: nn.Module) -> int:
    """Count the trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def nearest(target: int, count: Callable[[int], int], start: int, stop: int, step: int = 1) -> int:
    """Return the width in range(start, stop, step) whose count is nearest, ties to the smaller.

    ``count`` gives parameters by width and grows with it; a negative step searches downwards.
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
    spec: MixerSpec,
    target: int,
    build: Builder,
    model: nn.Module,
    baseline: MixerSpec | None = None,
) -> Match:
    """Widen a mixer to the parameters of the baseline.

    Where all blocks have the same heads of the same width: more heads first, then their width.
    Where stages differ (Swin, CvT, MetaFormer) the heads stay and all become wider by the same
    number. With one mixer per stage, those that the baseline has at the same place stay as they
    are. A mixer never gets fewer heads than the model gives it. One that already has the
    baseline's parameters or more stays as it is, and the note says so.

    ``target`` counts the trainable parameters of the baseline's model. ``build`` builds the model
    with a mixer, on the meta device; ``model`` has the mixer as it is. ``baseline`` has its mixers,
    one for all or one per stage, where they are known.
    """
    own = trainable(model)
    given = {key for pairs in spec.options for key, _ in pairs}
    if given & {"num_heads", "head_dim"}:
        return Match(spec=spec, params=own, note="its width was set by hand and stays.")
    chosen = _to_widen(spec, baseline)
    if not any(chosen):
        return Match(spec=spec, params=own, note="it has no inner width to match.")
    if own >= target:
        return Match(
            spec=spec,
            params=own,
            note=f"not widened: with {own:,} parameters it is not smaller than the baseline.",
        )
    mixers = [m for m in find_mixers(model).values() if isinstance(m, WITH_HEADS)]
    sizes = {(m.num_heads, m.head_dim) for m in mixers}
    if len(sizes) == 1 and all(chosen):
        found = _one_width(spec, target, build, *sizes.pop())
    else:
        found = _all_wider(spec, chosen, target, build, model)
    if found is None:
        note = f"kept: no inner width comes nearer to the baseline's {target:,} parameters."
        return Match(spec=spec, params=own, note=note)
    wide, words = found
    params = trainable(build(wide))
    note = (
        f"inner width matched to the baseline's {target:,} parameters: {words}, "
        f"{params:,} parameters."
    )
    return Match(spec=wide, params=params, note=note)


def _to_widen(spec: MixerSpec, baseline: MixerSpec | None) -> list[bool]:
    """Say for each mixer of a spec whether its width may change."""
    able = ["head_dim" in mixer_options(name) for name in spec.names]
    if baseline is None or len(spec.names) == 1:
        return able
    own = list(zip(spec.names, spec.options, strict=True))
    theirs = list(zip(baseline.names, baseline.options, strict=True))
    theirs = theirs * len(own) if len(theirs) == 1 else theirs
    if len(theirs) != len(own):
        return able
    return [can and mine != other for can, mine, other in zip(able, own, theirs, strict=True)]


def _one_width(
    spec: MixerSpec, target: int, build: Builder, heads: int, width: int
) -> tuple[MixerSpec, str] | None:
    """Search more heads, then another width of a head, the same in all blocks."""

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
        return None
    return sized(more, wide), f"{more} heads of {wide} instead of {heads} of {width}"


def _all_wider(
    spec: MixerSpec, chosen: Sequence[bool], target: int, build: Builder, model: nn.Module
) -> tuple[MixerSpec, str] | None:
    """Search one number by which the heads of every widened stage become wider."""
    own = _widths(spec, model)
    if len(spec.names) == 1 and len(set(own)) > 1:  # one mixer, but heads differ between stages
        spec = MixerSpec(spec.names * len(own), spec.options * len(own))
        chosen = list(chosen) * len(own)

    def sized(more: int) -> MixerSpec:
        options = tuple(
            tuple(sorted({**dict(pairs), "head_dim": width + more}.items())) if wide else pairs
            for pairs, width, wide in zip(spec.options, own, chosen, strict=False)
        )
        return MixerSpec(spec.names, options)

    most = MOST_TIMES * max(own)
    more = nearest(target, lambda m: trainable(build(sized(m))), 0, most)
    if more == 0:
        return None
    widened = sorted({width for width, wide in zip(own, chosen, strict=False) if wide})
    return sized(more), " and ".join(f"heads of {w + more} instead of {w}" for w in widened)


def _widths(spec: MixerSpec, model: nn.Module) -> list[int]:
    """The width of a head where each mixer of the spec stands, or in each stage for one mixer."""
    mixers = find_mixers(model)
    places = find_host(model).places(model)
    stages: dict[int, int] = {}
    blocks: list[int] = []
    for place in places:
        mixer = mixers[f"{place.path}.mixer"]
        width = mixer.head_dim if isinstance(mixer, WITH_HEADS) else 0
        blocks.append(width)
        stages.setdefault(place.stage, width)
    if len(spec.names) == len(blocks) != len(stages):
        return blocks
    return [stages[stage] for stage in sorted(stages)]
