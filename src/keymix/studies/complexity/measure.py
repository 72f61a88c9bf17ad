# SPDX-License-Identifier: Apache-2.0
"""What token mixers cost: counts, and measurements against the number of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from keymix.analysis.complexity_record import MixerRow, RatioPoint, Setting, WeightRow
from keymix.analysis.complexity_scaling import Progress, measure_at, no_progress
from keymix.analysis.complexity_sites import (
    TIME_STEPS,
    Counted,
    SizedMixer,
    attempt,
    check_site,
    counted,
    near_square,
    sized_mixers,
    usable_device,
)
from keymix.analysis.complexity_weights import weight_facts
from keymix.arguments import checked
from keymix.errors import UserError, check_positive
from keymix.mixers.registry import get_mixer_class, import_file
from keymix.studies.complexity.result import Complexity

TOKENS = (49, 196, 784)
"""Where latency and memory are measured: the last three stages of a 224-pixel image."""

SWEEP = (16, 36, 64, 144, 256, 576, 1024, 2304, 4096)
"""Tokens of the figure of multiply-adds per parameter."""

HEAD_DIMS = (4, 8, 16, 32, 64, 96, 128)
"""Channels per head of the widths in the figure."""


def _part(progress: Progress, number: int, of: int) -> Progress:
    """Make the progress of one part of several."""
    return lambda text, share: progress(text, (number + share) / of)


class Ledger:
    """Counts of mixers at sites, each counted once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Counted | None, str | None]] = {}

    def look(
        self, mixer: SizedMixer, tokens: int, *, dim: int | None = None, biases: bool = False
    ) -> tuple[Counted | None, str | None]:
        """Return the count of a mixer, without biases unless asked for, or None and the reason."""
        arguments = mixer.arguments(near_square(tokens), dim=dim, biases=biases)
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._known:
            self._known[key] = attempt(lambda: counted(arguments))
        return self._known[key]


def complexity_parts(
    mixers: str | Sequence[str] | None = None,
    *,
    dim: int = 256,
    num_heads: int = 8,
    at: int = 256,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 16,
    batch_size: int = 1,
    device: str | torch.device = "cpu",
    time_steps: int = TIME_STEPS,
    imports: Sequence[str | Path] = (),
    progress: Progress = no_progress,
) -> Iterator[Complexity]:
    """Study mixers part by part; see :func:`complexity`.

    Yields:
        What is known so far: first all that is counted, then once more for each number of tokens
        measured. The last is complete.
    """
    where = usable_device(device)
    _check_numbers(dim, num_heads, at, tokens, repeats, batch_size, time_steps)
    for path in imports:
        import_file(path)
    chosen = sized_mixers(mixers, dim=dim, num_heads=num_heads, time_steps=time_steps)
    setting = Setting(
        dim=dim,
        num_heads=num_heads,
        at=at,
        tokens=tuple(dict.fromkeys(tokens)),
        sweep_tokens=SWEEP,
        sweep_dims=tuple(num_heads * width for width in HEAD_DIMS),
        repeats=repeats,
        batch_size=batch_size,
        device=str(where),
        threads=torch.get_num_threads(),
        time_steps=time_steps,
    )
    steps = len(setting.tokens) + 1
    known = _counted(setting, chosen, _part(progress, 0, steps))
    yield known
    for i, number in enumerate(setting.tokens, 1):
        rows = measure_at(
            chosen,
            number,
            repeats=repeats,
            batch_size=batch_size,
            device=where,
            imports=[*map(str, imports)],
            progress=_part(progress, i, steps),
        )
        last = number == setting.tokens[-1]
        known = replace(known, scaling=(*known.scaling, *rows), complete=last)
        yield known


def _counted(setting: Setting, chosen: Sequence[SizedMixer], progress: Progress) -> Complexity:
    ledger = Ledger()
    entries = []
    for mixer in chosen:
        traits = get_mixer_class(mixer.name).traits
        _, reason = ledger.look(mixer, setting.at)
        entry = MixerRow(
            label=mixer.label,
            name=mixer.name,
            domain=traits.domain,
            control=traits.control,
            reason=reason,
        )
        entries.append(entry)
    by_tokens: list[RatioPoint] = []
    by_dim: list[RatioPoint] = []
    for i, mixer in enumerate(chosen):
        progress(f"counting {mixer.label}", i / len(chosen))
        by_tokens += ratio_points(ledger, mixer, [(n, setting.dim) for n in setting.sweep_tokens])
        by_dim += ratio_points(ledger, mixer, [(setting.at, d) for d in setting.sweep_dims])
    return Complexity(
        setting=setting,
        mixers=tuple(entries),
        by_tokens=tuple(by_tokens),
        by_dim=tuple(by_dim),
        weights=weight_rows(ledger, chosen, setting),
        complete=not setting.tokens,
    )


def ratio_points(
    ledger: Ledger, mixer: SizedMixer, sites: Sequence[tuple[int, int]]
) -> list[RatioPoint]:
    """Count a mixer along one axis of the figure."""
    points = []
    for n, d in sites:
        found, reason = ledger.look(mixer, n, dim=d)
        if found is not None and found.ratio is None:
            reason = "it has no parameters"
        points.append(
            RatioPoint(
                mixer=mixer.label,
                tokens=n,
                dim=d,
                params=None if found is None else found.params,
                macs=None if found is None else found.macs,
                ratio=None if found is None else found.ratio,
                reason=reason,
            )
        )
    return points


def weight_rows(
    ledger: Ledger, chosen: Sequence[SizedMixer], sizes: Setting
) -> tuple[WeightRow, ...]:
    """Read Table 7 off every mixer."""
    return tuple(_weight_row(ledger, mixer, sizes.sweep_tokens) for mixer in chosen)


def _weight_row(ledger: Ledger, mixer: SizedMixer, tokens: Sequence[int]) -> WeightRow:
    facts, reason = attempt(lambda: weight_facts(mixer))
    row = WeightRow(
        mixer=mixer.label,
        params_a_token=_a_token(ledger, mixer, tokens[0], tokens[-1]),
        reason=reason,
    )
    if facts is not None:
        row = replace(row, sharing=facts.sharing, kernels=facts.kernels, dynamic=facts.dynamic)
    return row


def _a_token(ledger: Ledger, mixer: SizedMixer, few: int, many: int) -> float | None:
    small, large = (ledger.look(mixer, tokens)[0] for tokens in (few, many))
    if small is None or large is None:
        return None
    grown, tokens = large.params - small.params, many - few
    return grown / tokens if grown % tokens else grown // tokens


@checked
def complexity(
    mixers: str | Sequence[str] | None = None,
    *,
    dim: int = 256,
    num_heads: int = 8,
    at: int = 256,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 16,
    batch_size: int = 1,
    device: str | torch.device = "cpu",
    time_steps: int = TIME_STEPS,
    imports: Sequence[str | Path] = (),
    progress: Progress = no_progress,
) -> Complexity:
    """Count what token mixers cost, and measure them against the number of tokens.

    Every mixer comes from the registry. One that cannot be built, counted or run at some size is
    listed with the reason. ``benchmarks/paper_costs.py`` puts the papers' formulas next to it.

    Args:
        mixers: Names with options, as ``keymix compare`` takes them; all registered if None.
        dim: Width D of the tokens, a multiple of the heads.
        num_heads: Heads.
        at: Tokens N of the tables; 256, with ``dim=256``, is that of SKA Fig. 4.
        tokens: Where latency and memory are measured, each on the grid nearest to a square;
            nothing is measured if empty.
        repeats: Rounds in which all mixers take turns; twelve are the fewest that can call
            latencies of 14 mixers different. With fewer the verdict is ``"too few rounds"``.
        batch_size: Images per batch, for memory and images per second; latency is of one image.
        device: ``"cpu"``, ``"cuda"``, ….
        time_steps: Steps T of spiking mixers.
        imports: Files of your own mixers.
        progress: Called with what is being done and the share of all that is done.

    Returns:
        Tables and measurements.

    Example:
        >>> study = complexity("mhsa,ska", dim=32, num_heads=2, tokens=())
        >>> [(row.mixer, row.dynamic) for row in study.weights]
        [('softmax', 2), ('static_key', 1)]

    Raises:
        UserError: If a number, a name or the device is bad.
    """
    parts = complexity_parts(
        mixers,
        dim=dim,
        num_heads=num_heads,
        at=at,
        tokens=tokens,
        repeats=repeats,
        batch_size=batch_size,
        device=device,
        time_steps=time_steps,
        imports=imports,
        progress=progress,
    )
    *_, last = parts
    return last


def _check_numbers(
    dim: int,
    num_heads: int,
    at: int,
    tokens: Sequence[int],
    repeats: int,
    batch_size: int,
    time_steps: int,
) -> None:
    check_positive(
        dim=dim,
        num_heads=num_heads,
        at=at,
        repeats=repeats,
        batch_size=batch_size,
        time_steps=time_steps,
    )
    check_site(dim=dim, time_steps=time_steps)
    if dim % num_heads:
        raise UserError(
            f"{dim=} does not divide into {num_heads=} heads; give a multiple of {num_heads}"
        )
    for number in (at, *tokens):
        near_square(number)
