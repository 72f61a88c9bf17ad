# SPDX-License-Identifier: Apache-2.0
"""What a study of attention collapse found, in words, with the evidence. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keymix.analysis.study_record import numbers
from keymix.studies.collapse.readings import Readings

FEW = 16
"""Images below which the verdict says that they are few."""

EVEN = 0.95
"""Entropy over ln M from which maps are called nearly even."""

SINK = 0.3
"""Share of attention on one token from which it is called a sink."""

PATTERN = 0.5
"""Centred cosine from which blocks are said to share a map.

Columns of a softmax have no negative entry, so that even attention alone gives them a high cosine
(Eq. 2) whatever else they hold. With each column's mean taken off, patterns that have nothing in
common have a cosine near 0, so what DeepViT asks of whole columns, a cosine above 0.5, says there
that it is the patterns that agree.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found, in words.

    Attributes:
        collapsed: Whether neighbouring blocks are alike both by Eq. 7 and, from
            :data:`PATTERN` on, in their centred cosine; None where that cannot be said.
        headline: The finding.
        evidence: What it rests on, a sentence each.
        caveats: What it does not say.
    """

    collapsed: bool | None
    headline: str
    evidence: tuple[str, ...]
    caveats: tuple[str, ...]


@dataclass(frozen=True)
class _Run:
    """Blocks that follow one another, each similar to the one before."""

    paths: tuple[str, ...]
    least: float  # share of similar columns of the two that are least alike
    mean: float  # mean share over every two
    cosine: float  # mean cosine, of the same two as `centred`
    centred: float  # mean cosine with each column's mean off, nan if no two have one: of every two
    # where all are alike, else of neighbours

    @property
    def one_pattern(self) -> bool:
        """Whether its maps agree beyond even attention, or are nothing but even."""
        return math.isnan(self.centred) or self.centred >= PATTERN


def verdict_of(study: Readings) -> Verdict:
    """Put a study into words."""
    tokens = _tokens(study)
    if not study.with_maps:
        headline = "No block has an attention map, so nothing can be said about collapse"
        return Verdict(
            collapsed=None,
            headline=headline,
            evidence=(*tokens,),
            caveats=(*_missing(study), *_few(study)),
        )
    if not study.pairs:
        headline = "No two blocks can be compared, so nothing can be said about collapse"
        return Verdict(
            collapsed=None,
            headline=headline,
            evidence=(*_sinks(study), *tokens),
            caveats=(*_apart(study), *_missing(study), *_few(study)),
        )
    runs = _runs(study)
    evidence = [_run_evidence(study, run) for run in runs] or [_most_alike(study)]
    return Verdict(
        collapsed=any(run.one_pattern for run in runs),
        headline=_headline(study, runs),
        evidence=(
            *evidence,
            *_advice(study, runs),
            _counts(study),
            *_rule(study, runs),
            *_sinks(study),
            *tokens,
        ),
        caveats=(*_caveats(study, runs), *_apart(study), *_missing(study), *_few(study)),
    )


def _runs(study: Readings) -> list[_Run]:
    """Find the longest stretches of blocks each of which is similar to the one before."""
    runs = []
    for group in study.groups:
        start = 0
        for i in range(1, len(group) + 1):
            similar = (
                i < len(group)
                and study.pair(group[i - 1], group[i]).similar_fraction > study.similar
            )
            if similar:
                continue
            if i - start > 1:
                paths = group[start:i]
                pairs = [study.pair(p, q) for p, q in itertools.combinations(paths, 2)]
                shares = [pair.similar_fraction for pair in pairs]
                least = min(shares)
                if not least > study.similar:
                    pairs = [study.pair(p, q) for p, q in itertools.pairwise(paths)]
                of = [pair.centred for pair in pairs if not math.isnan(pair.centred)]
                centred = sum(of) / len(of) if of else math.nan
                cosine = sum(pair.mean for pair in pairs) / len(pairs)
                runs.append(_Run(paths, least, sum(shares) / len(shares), cosine, centred))
            start = i
    return sorted(runs, key=lambda run: (-len(run.paths), study.blocks[run.paths[0]]))


def _headline(study: Readings, runs: Sequence[_Run]) -> str:
    """Say in one sentence, without a full stop, whether blocks repeat their attention."""
    if not runs:
        means = [pair.mean for pair in study.neighbours if not math.isnan(pair.mean)]
        most = f": similarity at most {_span([max(means)])}" if means else ""
        return f"No block repeats the attention of the one before{most}"
    same = [run for run in runs if run.one_pattern]
    one = [run for run in same if run.least > study.similar]
    drifting = [run for run in same if run not in one]
    apart = [run for run in runs if run not in same]
    parts = []
    if one:
        even = all((_entropy(study, run) or 0.0) >= EVEN for run in one)
        alike = (
            "attend nearly evenly, and so alike" if even else "compute nearly the same attention"
        )
        each = "each " if len(one) > 1 else ""
        parts.append(
            f"{_where(study, one)} {each}{alike}: similarity {_span([run.cosine for run in one])}"
        )
    if drifting:
        parts.append(
            f"{_where(study, drifting)} change their attention only little by little: similarity "
            f"{_span([run.cosine for run in drifting])} from block to block"
        )
    if apart:
        parts.append(
            f"{_where(study, apart)} look alike only because their attention is spread out: "
            f"similarity {_span([run.cosine for run in apart])}, without its even part "
            f"{_span([run.centred for run in apart])}"
        )
    return _capital("; ".join(parts))


def _where(study: Readings, runs: Sequence[_Run]) -> str:
    return _and([_blocks(study, run.paths).replace("–", " to ") for run in runs])


def _advice(study: Readings, runs: Sequence[_Run]) -> list[str]:
    """Say what blocks that share a pattern could have instead, or what they have against it."""
    same = [run for run in runs if run.one_pattern]
    if not same:
        return []
    remedies = [study.remedies.get(path, "") for run in same for path in run.paths[1:]]
    if all(remedies):
        return [f"They are alike though they have {' or '.join(dict.fromkeys(remedies))}."]
    one = any(run.least > study.similar for run in same)
    return [f"Re-attention{' or map sharing' if one else ''} could pay there."]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _span(values: Sequence[float]) -> str:
    low, high = (f"{round(end, 2) + 0.0:.2f}" for end in (min(values), max(values)))  # no -0.00
    return low if low == high else f"{low} to {high}"


def _entropy(study: Readings, run: _Run) -> float | None:
    """Return the mean entropy over ln M of a run's maps, None where they have none."""
    found = [
        layer.entropy_normalised
        for layer in study.layers
        if layer.path in run.paths and layer.entropy_normalised is not None
    ]
    return sum(found) / len(found) if found else None


def _run_evidence(study: Readings, run: _Run) -> str:
    where = _blocks(study, run.paths)
    if len(run.paths) == 2:
        text = f"The maps of {where} are alike in {_percent(run.least)} of their columns"
    elif run.least > study.similar:
        text = (
            f"Every two maps of {where} are alike in at least {_percent(run.least)} of their "
            f"columns, {_percent(run.mean)} on average"
        )
    else:
        text = (
            f"In {where} each map is like the one before in over {_percent(study.similar)} of its "
            f"columns, but the two least alike in {_percent(run.least)} only"
        )
    text += f" (cosine above {study.threshold:g})"
    entropy = _entropy(study, run)
    if entropy is not None and entropy >= EVEN:
        text += (
            f". They are nearly even (entropy {entropy:.3f} of ln M): they are alike because each "
            "attends to everything"
        )
    if math.isnan(run.centred):
        text += "; nothing is left when each column's mean is taken off"
    else:
        text += (
            f"; what is left when each column's mean is taken off has a cosine of "
            f"{_span([run.centred])} on average (one map: {PATTERN:g} or more)"
        )
    return text + "."


def _most_alike(study: Readings) -> str:
    pair = max(study.neighbours, key=lambda p: (p.similar_fraction == p.similar_fraction, p.mean))
    first, second = study.blocks[pair.first], study.blocks[pair.second]
    return (
        f"The most alike neighbours are blocks {first} and {second}: "
        f"{_percent(pair.similar_fraction)} of their columns have a cosine above "
        f"{study.threshold:g} (mean {pair.mean:.2f}), and it would take over "
        f"{_percent(study.similar)}."
    )


def _counts(study: Readings) -> str:
    of = len(study.with_maps)
    similar, near = len(study.similar_blocks), len(study.blocks_like_nearest)
    return (
        f"{similar} of {of} blocks ({_percent(similar / of)}) are similar to the one before, in "
        f"over {_percent(study.similar)} of their columns (DeepViT, appendix D); {near} of {of} "
        f"({_percent(near / of)}) to their {study.nearest} nearest blocks, in over "
        f"{_percent(study.unique)} (as in its Fig. 3a)."
    )


def _rule(study: Readings, runs: Sequence[_Run]) -> list[str]:
    """Say which block the rule for sharing takes, and how to share if a pattern is shared."""
    sentences = []
    shared = any(run.one_pattern for run in runs)
    take = "could take its map" if shared else "would take its map"
    for unique in study.unique_blocks:
        if not unique.sharing:
            continue
        rule = f"By the {_percent(study.unique)} rule block {unique.block} is the last unique one"
        count = len(unique.sharing)
        text = f"{rule}: {numbers('block', unique.sharing)} {take}"
        if count > 1 and unique.least is not None:
            text += f", with which theirs agree in at least {_percent(unique.least)} of columns"
            if unique.least <= study.unique:
                text += " (the rule looks at neighbours alone)"
        sentences.append(text + ".")
    if not sentences:
        sentences.append(
            f"By the {_percent(study.unique)} rule the last block is unique itself, so that the "
            "rule shares nothing."
        )
    if study.shared_from is not None and shared:
        options = f"--model.options.shared_from {study.shared_from}"
        sentences.append(
            f"To train it so: keymix train RECIPE {options}, or keymix.create_model(NAME, "
            f"shared_from={study.shared_from})"
            + ("." if study.takes_shared_from else ", with a model of keymix's DeepViT family.")
        )
    return sentences


def _sinks(study: Readings) -> list[str]:
    found = [
        layer
        for layer in study.with_maps
        if layer.sink is not None and layer.keys and layer.sink > max(SINK, 2 / layer.keys)
    ]
    if not found:
        return []
    worst = max(found, key=lambda layer: layer.sink or 0.0)
    where = numbers("block", [layer.block for layer in found])
    text = (
        f"Attention sinks in {where}: in block {worst.block} one token gets "
        f"{_percent(worst.sink or 0.0)} of a head's attention"
    )
    if worst.sink_in_prefix is not None:
        share = _percent(worst.sink_in_prefix)
        text += f", and it is a prefix token in {share} of heads and images"
    return [f"{text}."]


def _tokens(study: Readings) -> list[str]:
    sentences = []
    for stage in sorted({layer.stage for layer in study.layers}):
        found = [
            layer
            for layer in study.layers
            if layer.stage == stage and layer.effective_rank is not None
        ]
        if len(found) < 2:
            continue
        first, last = found[0], found[-1]
        sentences.append(
            f"The tokens' effective rank goes from {first.effective_rank:.1f} after block "
            f"{first.block} to {last.effective_rank:.1f} after block {last.block}, of at most "
            f"{last.full_rank}{_halfway(found)}."
        )
    return sentences


def _halfway(found: Sequence[Any]) -> str:
    middle = found[len(found) // 2 - 1]
    if middle.feature_similarity is None or middle is found[-1]:
        return ""
    return (
        f"; after block {middle.block}, half-way, they have a cosine of "
        f"{middle.feature_similarity:.2f} with those after the last"
    )


def _caveats(study: Readings, runs: Sequence[_Run]) -> list[str]:
    if not runs:
        return []
    cosine = [
        f"A cosine above {study.threshold:g} is what even attention alone gives: without a common "
        "pattern it is no sign that blocks could share a map."
    ]
    return (cosine if any(not run.one_pattern for run in runs) else []) + [
        "That maps are alike does not say what another attention brings: train both to know, as "
        "keymix compare does."
    ]


def _missing(study: Readings) -> list[str]:
    reasons: dict[str, list[int]] = {}
    for layer in study.layers:
        if layer.missing is not None:
            reasons.setdefault(layer.missing, []).append(layer.block)
    return [f"Without a map: {numbers('block', b)} ({why})." for why, b in reasons.items()]


def _apart(study: Readings) -> list[str]:
    return [f"Not compared: {each}." for each in study.apart]


def _few(study: Readings) -> list[str]:
    if study.images >= FEW:
        return []
    images = "1 image" if study.images == 1 else f"{study.images} images"
    return [f"Read on {images} only: take more before you act on it."]


def _blocks(study: Readings, paths: Iterable[str]) -> str:
    return numbers("block", [study.blocks[path] for path in paths])


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _percent(share: float) -> str:
    """Write a share without claiming a whole that it is not."""
    value = 100 * share
    if value in (0, 100) or 0.05 <= value < 99.95:
        return f"{value:.1f}".removesuffix(".0") + " %"
    return "under 0.1 %" if value < 1 else "over 99.9 %"
