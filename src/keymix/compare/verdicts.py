# SPDX-License-Identifier: Apache-2.0
"""Intervals in words: what may be claimed of a mixer, and what may not."""

from __future__ import annotations

from dataclasses import dataclass

from keymix.analysis.statistics import LEVEL, VERDICT_SEEDS, Interval, Verdict

_ALPHA = 1 - LEVEL


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict and the sentences that go with it.

    Args:
        verdict: ``better``, ``worse`` or ``no difference shown`` from five pairs of runs up, else
            ``no verdict``.
        headline: One sentence that can stand alone.
        detail: The evidence of both questions, one or two sentences.
    """

    verdict: Verdict
    headline: str
    detail: str


def points(value: float, *, sign: bool = True) -> str:
    """Write a difference of fractions in percentage points, e.g. ``+1.2`` or ``−0.4``."""
    text = f"{abs(value) * 100:.1f}"
    if not sign or text == "0.0":
        return text
    return ("−" if value < 0 else "+") + text


def span(interval: Interval) -> str:
    """Write an interval's ends, e.g. ``−0.4 to +1.2``."""
    if interval.low is None or interval.high is None:
        return "no interval"
    return f"{points(interval.low)} to {points(interval.high)}"


def _p(value: float) -> str:
    return (
        "p < 0.001" if value < 0.001 else f"p = {value:.3f}" if value < 0.1 else f"p = {value:.2f}"
    )


def _clear(interval: Interval | None) -> bool:
    return interval is not None and interval.p_holm is not None and interval.p_holm < _ALPHA


def _size(difference: float) -> str:
    return f"{points(difference, sign=False)} points"


def _direction(difference: float) -> str:
    return "better" if difference > 0 else "worse"


def _images_sentence(images: Interval | None, unit: str, *, narrow: bool) -> str:
    if images is None:
        return f"There is no pair of runs to compare {unit} by {unit}."
    over = f"the {images.n} test {unit}s" if images.n > 1 else f"the one test {unit}"
    text = f"Over {over} the difference is {points(images.difference)} points"
    if images.low is None:
        return f"{text}: {images.note}."
    rough = "; few cases, so it is rough" if unit == "case" and images.note else ""
    too = f"; too narrow, as {unit}s belong together" if narrow else ""
    text += f" (95\u00a0% interval {span(images)}{rough}{too})"
    if narrow:
        return f"{text}."
    if _clear(images):
        return f"{text}, more than the choice of {unit}s explains."
    if images.low is not None and images.high is not None and images.low * images.high > 0:
        return (
            f"{text}; the interval leaves out zero by itself, but not after correction for the "
            "number of mixers."
        )
    return f"{text}, which the choice of {unit}s alone could explain."


def _seeds_sentence(seeds: Interval) -> str:
    text = f"Over {seeds.n} seeds the difference is {points(seeds.difference)} points"
    if seeds.low is None or seeds.p_holm is None:
        return f"{text}: {seeds.note}."
    text += f" (95\u00a0% interval {span(seeds)}, Holm-corrected {_p(seeds.p_holm)})"
    if seeds.note:
        text += f"; {seeds.note}"
    return f"{text}."


def judge(
    mixer: str,
    baseline: str,
    seeds: Interval | None,
    images: Interval | None,
    *,
    planned: int,
    unit: str = "image",
    narrow: bool = False,
) -> Judgement:
    """Say in words how a mixer stands to the baseline.

    A mixer is called better or worse when both questions agree after Holm's correction: it would
    hold if retrained, and on more images. Below five pairs of runs no verdict is given.

    Args:
        mixer: The mixer's label.
        baseline: The baseline's label.
        seeds: The paired difference over seeds, ``None`` if no pair of runs finished.
        images: The paired difference over test images, or cases.
        planned: Seeds that the comparison asked for.
        unit: What the second question is of: ``image`` or ``case``.
        narrow: Whether these belong together, so that the interval over them is too narrow.
    """
    if seeds is None:
        return Judgement(
            verdict="no verdict",
            headline=f"{mixer}: nothing can be said, no seed finished for both it and {baseline}.",
            detail="",
        )
    if seeds.n < VERDICT_SEEDS:
        about = _images_sentence(images, unit, narrow=narrow)
        trusted = None if narrow else images
        return _no_verdict(mixer, baseline, seeds, trusted, planned=planned, about=about)
    both = f"{_seeds_sentence(seeds)} {_images_sentence(images, unit, narrow=narrow)}"
    retrained, more_images = _clear(seeds), _clear(images) and not narrow
    agree = images is not None and seeds.difference * images.difference > 0
    if retrained and more_images and agree:
        word: Verdict = "better" if seeds.difference > 0 else "worse"
        return Judgement(
            verdict=word,
            headline=f"{mixer} is {word} than {baseline} by {_size(seeds.difference)}.",
            detail=both,
        )
    if retrained:
        why = (
            f"retrained models would again be {_direction(seeds.difference)} on these test {unit}s,"
            f" but other test {unit}s might not show it"
        )
    elif more_images and images is not None:
        why = (
            f"these trained models are {_direction(images.difference)}, but models trained again "
            "might not be"
        )
    elif seeds.low is not None and seeds.high is not None:
        why = f"it may lie anywhere from {span(seeds)} points"
    else:
        why = "the seeds do not vary"
    return Judgement(
        verdict="no difference shown",
        headline=f"No difference shown between {mixer} and {baseline}: {why}.",
        detail=both,
    )


def _no_verdict(
    mixer: str,
    baseline: str,
    seeds: Interval,
    images: Interval | None,
    *,
    planned: int,
    about: str,
) -> Judgement:
    count = "1 seed" if seeds.n == 1 else f"{seeds.n} seeds"
    if seeds.n < planned:
        count += f" of {planned} finished"
    if _clear(images) and images is not None:
        headline = (
            f"{mixer}, as trained here, is {_direction(images.difference)} than {baseline} by "
            f"{_size(images.difference)}; whether it would hold if retrained cannot be said "
            f"({count})."
        )
    else:
        headline = (
            f"{mixer} cannot be told from {baseline} here ({points(seeds.difference)} points, "
            f"{count})."
        )
    seeds_text = f"{count}: whether it would hold if retrained cannot be said"
    if seeds.low is not None:
        seeds_text += f" (the interval over seeds, {span(seeds)}, rests on too few)"
    seeds_text += "."
    if seeds.note and "one seed has" not in seeds.note:
        seeds_text += f" Note: {seeds.note}."
    return Judgement(
        verdict="no verdict",
        headline=headline,
        detail=f"{seeds_text} {about}",
    )
