# SPDX-License-Identifier: Apache-2.0
"""Latency and peak memory of mixers against the number of tokens, measured in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from keymix.analysis.capture import inference_mode_of
from keymix.analysis.complexity_record import BASELINE, ScalingRow
from keymix.analysis.complexity_sites import (
    Counted,
    SizedMixer,
    attempt,
    counted,
    make,
    near_square,
)
from keymix.analysis.measure import Cost, measure_interleaved, with_peak
from keymix.analysis.memory import Build, Peak, available_bytes, peak_memory
from keymix.errors import UserError
from keymix.mixers.base import Grid
from keymix.mixers.map_mixer import MapMixer
from keymix.ops.attention.blocked import BLOCK

_SHARE = 0.8  # of the free memory that a mixer may take
_FLOAT = 4  # bytes
_BLOCKS = 8  # most blocks of a map at a time, with what is made of them

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done."""


def no_progress(text: str, share: float) -> None:
    """Show no progress."""


def needed_bytes(
    mixer: SizedMixer, cost: Counted, grid: Grid, batch_size: int, device: torch.device
) -> int:
    """Estimate, on the safe side, what building and training one batch takes.

    Weights three times (their making, their gradients), and what autograd keeps three times (a
    map is made in steps, and its gradient again, each as large as the map that is kept). Counted
    is what whole maps keep; where the mixer forms its maps a block of rows at a time, it keeps
    the tokens, its heads and their results instead, and some blocks.
    """
    kept, blocks = batch_size * cost.activation_bytes, 0
    made = attempt(lambda: _without_weights(mixer.arguments(grid)))[0]
    if isinstance(made, MapMixer):
        shape = (batch_size, math.prod(grid), mixer.dim)
        with torch.enable_grad():
            if made.train().choose_backend(device, shape).name == "blocked":
                heads = (len(made.roles) + 1) * made.num_heads * made.head_dim
                kept = min(kept, _FLOAT * math.prod(shape[:2]) * (2 * mixer.dim + heads))
                blocks = _BLOCKS * _FLOAT * BLOCK
    return 3 * (cost.state_bytes + kept) + blocks


def _without_weights(arguments: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return make(**arguments)


def measure_at(
    mixers: Sequence[SizedMixer],
    tokens: int,
    *,
    repeats: int,
    batch_size: int,
    device: torch.device,
    imports: Sequence[str] = (),
    progress: Progress,
) -> list[ScalingRow]:
    """Measure mixers at one number of tokens, all in turns in this process.

    Those that cannot be built, counted or run there, or would not fit into memory, get a row with
    the reason. Peak memory comes from a fresh process on a CPU, from the allocator on CUDA.
    """
    grid = near_square(tokens)
    costs: dict[str, Counted] = {}
    models: dict[str, nn.Module] = {}
    reasons: dict[str, str] = {}
    builds = {c.label: _build(c, grid, imports) for c in mixers}
    seconds = 0.0
    room = available_bytes(device)
    for i, mixer in enumerate(mixers):
        label = mixer.label
        progress(f"{tokens} tokens: trying {label}", 0.1 * i / len(mixers))
        cost, reason = attempt(lambda c=mixer: counted(c.arguments(grid)))  # type: ignore[misc]
        if cost is not None:
            costs[label] = cost
            reason = _too_large(
                needed_bytes(mixer, cost, grid, batch_size, device), batch_size, room
            )
        if reason is None:
            tried, reason = attempt(lambda b=builds[label]: _try(b, tokens, device))  # type: ignore[misc]
            if tried is not None:
                models[label], first = tried
                seconds += first
                room -= costs[label].state_bytes
        if reason is not None:
            reasons[label] = reason
    measured = _measured(
        models,
        builds,
        tokens,
        mixers,
        repeats=repeats,
        batch_size=batch_size,
        seconds=seconds,
        progress=progress,
    )
    rows = [
        _row(c.label, tokens, grid, costs.get(c.label), measured.get(c.label), reasons.get(c.label))
        for c in mixers
    ]
    base = next((row for row in rows if row.mixer == BASELINE), None)
    return rows if base is None else [_with_ratio(row, base) for row in rows]


def _build(mixer: SizedMixer, grid: Grid, imports: Sequence[str]) -> Build:
    return Build(
        factory="keymix.analysis.complexity_sites:make",
        kwargs=mixer.arguments(grid),
        imports=tuple(str(path) for path in imports),
    )


def _too_large(need: int, batch_size: int, room: float) -> str | None:
    if need <= _SHARE * room:
        return None
    return (
        f"would need up to {need / 2**30:.1f} GiB to train a batch of {batch_size}, and "
        f"{room / 2**30:.1f} GiB are free"
    )


def _try(build: Build, tokens: int, device: torch.device) -> tuple[nn.Module, float]:
    """Make a mixer and run it once: what fails, fails here; and how long that takes, seconds."""
    model = build.make().to(device)
    x = torch.zeros(1, tokens, build.kwargs["dim"], device=device)
    with inference_mode_of(model), torch.no_grad():
        start = time.perf_counter()
        y = model(x)
    if y.shape[-2:] != x.shape[-2:]:
        raise UserError(f"returns {tuple(y.shape)} for tokens {tuple(x.shape)}")
    return model, time.perf_counter() - start


def _measured(
    models: dict[str, nn.Module],
    builds: Mapping[str, Build],
    tokens: int,
    mixers: Sequence[SizedMixer],
    repeats: int,
    batch_size: int,
    seconds: float,
    progress: Progress,
) -> dict[str, Cost]:
    if not models:
        return {}
    size = (tokens, mixers[0].dim)
    start = time.perf_counter()

    def on_round(done: int) -> None:
        text = f"{tokens} tokens: latency, {len(models)} mixers in turns, round {done} of {repeats}"
        a_round = (time.perf_counter() - start) / done if done else seconds
        left = a_round * (repeats - done)
        text += f", about {left / 60:.0f} min left" if left > 90 else ""
        progress(text, 0.1 + 0.5 * done / repeats)

    on_round(0)
    costs = measure_interleaved(
        models,
        size,
        batch_size=batch_size,
        repeats=repeats,
        baseline=BASELINE,
        on_round=on_round,
    )
    if any(cost.device.startswith("cuda") for cost in costs.values()):
        return costs
    names = list(models)
    models.clear()  # their memory is the fresh process's
    progress(f"{tokens} tokens: peak memory in a fresh process", 0.6)
    peaks = _peaks({name: builds[name] for name in names}, size, batch_size)
    return {name: with_peak(costs[name], peaks[name]) for name in names}


def _peaks(builds: dict[str, Build], size: tuple[int, int], batch_size: int) -> dict[str, Peak]:
    """Measure all in one process; where it cannot make one, each in its own."""
    try:
        return peak_memory(builds, size, batch_size=batch_size)
    except UserError:
        if len(builds) == 1:  # registered here, but in no file that was named
            peak = Peak(
                inference_mib=None,
                training_mib=None,
                note="unknown: a fresh process cannot make this mixer; name its file with imports",
            )
            return dict.fromkeys(builds, peak)
    return {name: _peaks({name: build}, size, batch_size)[name] for name, build in builds.items()}


def _row(
    label: str,
    tokens: int,
    grid: Grid,
    count: Counted | None,
    cost: Cost | None,
    reason: str | None,
) -> ScalingRow:
    row = ScalingRow(mixer=label, tokens=tokens, grid=grid, reason=reason)
    if count is not None:
        row = replace(
            row, params=count.params, macs=count.macs, activation_bytes=count.activation_bytes
        )
    if cost is not None:
        row = replace(
            row,
            latency_ms=cost.latency_ms,
            latency_q1_ms=cost.latency_q1_ms,
            latency_q3_ms=cost.latency_q3_ms,
            images_per_s=cost.images_per_s,
            peak_inference_mib=cost.peak_inference_mib,
            peak_training_mib=cost.peak_training_mib,
            peak_note=cost.peak_note,
        )
        if cost.against is not None:
            row = replace(
                row,
                latency_ratio=None if cost.against.verdict == "busy" else cost.against.ratio,
                latency_p=cost.against.p,
                latency_verdict=cost.against.verdict,
            )
    return row


def _with_ratio(row: ScalingRow, base: ScalingRow) -> ScalingRow:
    row = replace(row, peak_ratio=_over(row.peak_training_mib, base.peak_training_mib))
    timed = row.mixer == BASELINE and row.latency_ms is not None
    return replace(row, latency_ratio=1.0) if timed else row


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
