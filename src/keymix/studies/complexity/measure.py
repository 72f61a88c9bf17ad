# SPDX-License-Identifier: Apache-2.0
"""What token mixers cost: counts, and measurements in turns against the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keymix.analysis.capture import inference_mode_of
from keymix.analysis.counting import Count
from keymix.analysis.measure import Cost, measure_interleaved, with_peak
from keymix.analysis.memory import Build, available_bytes, peak_memory
from keymix.analysis.mixer_alone import (
    TIME_STEPS,
    Progress,
    SizedMixer,
    attempt,
    check_site,
    counted,
    make,
    near_square,
    no_progress,
    sized_mixers,
    too_large,
    usable_device,
    weight_facts,
)
from keymix.arguments import checked
from keymix.errors import UserError, check_positive
from keymix.mixers.base import Grid
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class, import_file
from keymix.ops.attention.blocked import BLOCK
from keymix.studies.complexity.result import (
    BASELINE,
    Complexity,
    MixerRow,
    RatioPoint,
    ScalingRow,
    Setting,
    WeightRow,
)

TOKENS = (49, 196, 784)
"""Where latency and memory are measured: the last three stages of a 224-pixel image."""

SWEEP = (16, 36, 64, 144, 256, 576, 1024, 2304, 4096)
"""Tokens of the figure of multiply-adds per parameter."""

HEAD_DIMS = (4, 8, 16, 32, 64, 96, 128)
"""Channels per head of the widths in the figure."""

_FLOAT = 4  # bytes
_BLOCKS = 8  # most blocks of a map at a time, with what is made of them


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
    setting = Setting(
        dim=dim,
        num_heads=num_heads,
        at=at,
        tokens=tuple(tokens),
        repeats=repeats,
        batch_size=batch_size,
        device=str(device),
        time_steps=time_steps,
    )
    *_, last = complexity_parts(mixers, setting, imports=imports, progress=progress)
    return last


def complexity_parts(
    mixers: str | Sequence[str] | None,
    setting: Setting,
    *,
    imports: Sequence[str | Path] = (),
    progress: Progress = no_progress,
) -> Iterator[Complexity]:
    """Yield what is known: all that is counted, then more for each number of tokens measured."""
    where = _checked(setting)
    for path in imports:
        import_file(path)
    dim, heads = setting.dim, setting.num_heads
    chosen = sized_mixers(mixers, dim=dim, num_heads=heads, time_steps=setting.time_steps)
    setting = replace(
        setting,
        tokens=tuple(dict.fromkeys(setting.tokens)),
        device=str(where),
        threads=torch.get_num_threads(),
        sweep_tokens=SWEEP,
        sweep_dims=tuple(heads * width for width in HEAD_DIMS),
    )
    steps = len(setting.tokens) + 1
    known = _counted(setting, chosen, lambda text, share: progress(text, share / steps))
    yield known
    for i, number in enumerate(setting.tokens, 1):

        def part(text: str, share: float, i: int = i, number: int = number) -> None:
            progress(f"{number} tokens: {text}", (i + share) / steps)

        rows = _measured_at(number, setting, chosen, where, [*map(str, imports)], part)
        last = number == setting.tokens[-1]
        known = replace(known, scaling=(*known.scaling, *rows), complete=last)
        yield known


def _checked(setting: Setting) -> torch.device:
    """Refuse sizes that cannot be; return the device."""
    where, dim, num_heads = usable_device(setting.device), setting.dim, setting.num_heads
    names = ("dim", "num_heads", "at", "repeats", "batch_size", "time_steps")
    check_positive(**{name: getattr(setting, name) for name in names})
    check_site(dim=dim, time_steps=setting.time_steps)
    if dim % num_heads:
        raise UserError(
            f"{dim=} does not divide into {num_heads=} heads; give a multiple of {num_heads}"
        )
    for number in (setting.at, *setting.tokens):
        near_square(number)
    return where


# ---- counted ------------------------------------------------------------------------------------


def _counted(setting: Setting, chosen: Sequence[SizedMixer], progress: Progress) -> Complexity:
    entries, by_tokens, by_dim, weights = [], [], [], []
    for i, mixer in enumerate(chosen):
        progress(f"counting {mixer.label}", i / len(chosen))
        along = [ratio_point(mixer, n, setting.dim) for n in setting.sweep_tokens]
        by_tokens += along
        by_dim += [ratio_point(mixer, setting.at, d) for d in setting.sweep_dims]
        weights.append(_weight_row(mixer, along[0], along[-1]))
        here = ratio_point(mixer, setting.at, setting.dim)
        traits = get_mixer_class(mixer.name).traits
        entries.append(
            MixerRow(
                label=mixer.label,
                name=mixer.name,
                domain=traits.domain,
                control=traits.control,
                reason=here.reason if here.macs is None else None,
            )
        )
    return Complexity(
        setting=setting,
        mixers=tuple(entries),
        by_tokens=tuple(by_tokens),
        by_dim=tuple(by_dim),
        weights=tuple(weights),
        complete=not setting.tokens,
    )


def ratio_point(mixer: SizedMixer, tokens: int, dim: int) -> RatioPoint:
    """Count a mixer without biases at one point of the figure."""
    arguments = mixer.arguments(near_square(tokens), dim=dim, biases=False)
    found, reason = attempt(counted, arguments)
    point = RatioPoint(mixer=mixer.label, tokens=tokens, dim=dim, reason=reason)
    if found is None:
        return point
    ratio = found.macs / found.params if found.params else None
    reason = None if found.params else "it has no parameters"
    return replace(point, params=found.params, macs=found.macs, ratio=ratio, reason=reason)


def _weight_row(mixer: SizedMixer, few: RatioPoint, many: RatioPoint) -> WeightRow:
    """Read Table 7 off a mixer; `few` and `many` tokens say what one more costs."""
    facts, reason = attempt(weight_facts, mixer)
    row = WeightRow(mixer=mixer.label, reason=reason)
    if few.params is not None and many.params is not None:
        grown, tokens = many.params - few.params, many.tokens - few.tokens
        row = replace(row, params_a_token=round(grown / tokens))
    if facts is not None:
        row = replace(row, sharing=facts.sharing, kernels=facts.kernels, dynamic=facts.dynamic)
    return row


# ---- measured -----------------------------------------------------------------------------------


def _measured_at(
    tokens: int,
    setting: Setting,
    chosen: Sequence[SizedMixer],
    device: torch.device,
    imports: Sequence[str],
    progress: Progress,
) -> list[ScalingRow]:
    """Measure mixers at one number of tokens, all in turns in this process.

    Those that cannot be built, counted or run there, or would not fit into memory, get a row with
    the reason.
    """
    grid, room, batch_size = near_square(tokens), available_bytes(device), setting.batch_size
    rows: dict[str, ScalingRow] = {}
    builds: dict[str, Build] = {}
    models: dict[str, nn.Module] = {}
    for i, mixer in enumerate(chosen):
        progress(f"trying {mixer.label}", 0.1 * i / len(chosen))
        arguments = mixer.arguments(grid)
        row = ScalingRow(mixer=mixer.label, tokens=tokens, grid=grid)
        count, reason = attempt(counted, arguments)
        if count is not None:
            row = replace(row, **_picked(count, "params", "macs", "activation_bytes"))
            need = needed_bytes(mixer, count, grid, batch_size, device)
            reason = too_large(need, room, f" to train a batch of {batch_size}")
        if reason is None:
            factory = "keymix.analysis.mixer_alone:make"
            build = Build(factory=factory, kwargs=arguments, imports=tuple(imports))
            model, reason = attempt(_tried, build, tokens, device)
            if model is not None:
                builds[mixer.label], models[mixer.label] = build, model
                room -= _state_bytes(model)
        rows[mixer.label] = replace(row, reason=reason)
    for label, cost in _costs(models, builds, tokens, setting, progress).items():
        rows[label] = replace(rows[label], **_from_cost(cost))
    if base := rows.get(BASELINE):
        if base.latency_ms is not None:
            rows[BASELINE] = replace(base, latency_ratio=1.0)
        for label, row in rows.items():
            if row.peak_training_mib is not None and base.peak_training_mib:
                ratio = row.peak_training_mib / base.peak_training_mib
                rows[label] = replace(row, peak_ratio=ratio)
    return [*rows.values()]


def _picked(source: object, *keys: str) -> dict[str, Any]:
    return {key: getattr(source, key) for key in keys}


def _from_cost(cost: Cost) -> dict[str, Any]:
    """Return what a row says of a mixer that was measured."""
    times = _picked(cost, "latency_ms", "latency_q1_ms", "latency_q3_ms", "images_per_s")
    found = times | _picked(cost, "peak_inference_mib", "peak_training_mib", "peak_note")
    if cost.against is not None:
        found |= {"latency_p": cost.against.p, "latency_verdict": cost.against.verdict}
        if cost.against.verdict != "busy":
            found["latency_ratio"] = cost.against.ratio
    return found


def _state_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def needed_bytes(
    mixer: SizedMixer, count: Count, grid: Grid, batch_size: int, device: torch.device
) -> int:
    """Estimate, on the safe side, what building and training one batch takes.

    Weights three times (their making, their gradients), and what autograd keeps three times (a
    map is made in steps, and its gradient again, each as large as the map that is kept). Counted
    is what whole maps keep; where the mixer forms its maps a block of rows at a time, it keeps
    the tokens, its heads and their results instead, and some blocks.
    """
    kept, blocks = batch_size * count.activation_bytes, 0
    made = attempt(_without_weights, mixer.arguments(grid))[0]
    state = _FLOAT * count.params if made is None else _state_bytes(made)
    if isinstance(made, MapMixer):
        shape = (batch_size, prod(grid), mixer.dim)
        with torch.enable_grad():
            if made.train().choose_backend(device, shape).name == "blocked":
                heads = (len(made.roles) + 1) * made.num_heads * made.head_dim
                kept = min(kept, _FLOAT * prod(shape[:2]) * (2 * mixer.dim + heads))
                blocks = _BLOCKS * _FLOAT * BLOCK
    return 3 * (state + kept) + blocks


def _without_weights(arguments: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return make(**arguments)


def _tried(build: Build, tokens: int, device: torch.device) -> nn.Module:
    """Make a mixer and run it once: what fails, fails here."""
    model = build.make().to(device)
    x = torch.zeros(1, tokens, build.kwargs["dim"], device=device)
    with inference_mode_of(model), torch.no_grad():
        y = model(x)
    if y.shape[-2:] != x.shape[-2:]:
        raise UserError(f"returns {tuple(y.shape)} for tokens {tuple(x.shape)}")
    return model


def _costs(
    models: dict[str, nn.Module],
    builds: Mapping[str, Build],
    tokens: int,
    setting: Setting,
    progress: Progress,
) -> dict[str, Cost]:
    """Measure models in turns; peak memory in a fresh process, on CUDA by the allocator."""
    if not models:
        return {}
    size, rounds = (tokens, setting.dim), setting.repeats

    def on_round(done: int) -> None:
        text = f"latency, {len(models)} mixers in turns, round {done} of {rounds}"
        progress(text, 0.1 + 0.5 * done / rounds)

    on_round(0)
    costs = measure_interleaved(
        models,
        size,
        batch_size=setting.batch_size,
        repeats=rounds,
        baseline=BASELINE,
        on_round=on_round,
    )
    if setting.device.startswith("cuda"):
        return costs
    models.clear()  # their memory is the fresh process's
    progress("peak memory in a fresh process", 0.6)
    peaks = peak_memory(builds, size, batch_size=setting.batch_size)
    return {name: with_peak(cost, peaks[name]) for name, cost in costs.items()}
