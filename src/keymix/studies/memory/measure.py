# SPDX-License-Identifier: Apache-2.0
"""Peak memory of mixers' attention alone against the number of tokens: QKFormer's Table 8."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import profiler

from keymix.analysis.memory import MIB, available_bytes, cuda_peak
from keymix.analysis.mixer_alone import (
    AttentionOperation,
    Progress,
    SizedMixer,
    attempt,
    attention_operation,
    check_site,
    no_progress,
    sized_mixers,
    too_large,
    usable_device,
    work,
)
from keymix.errors import UserError, check_positive
from keymix.mixers.base import Site
from keymix.mixers.registry import build, get_mixer_class, import_file, option_hints
from keymix.mixers.spiking_self import Order
from keymix.studies.memory.result import GrowthRow, MemoryGrowth

MIXERS = "qk_token,spiking_self"
SIDES = tuple(range(10, 201, 10))
"""Square roots of the numbers of tokens of Table 8."""
CPU_SIDES = tuple(range(10, 81, 10))
"""Those measured on a CPU where none are named: the process stays within 1 GiB."""


def memory_growth(
    mixers: str | Sequence[str] = MIXERS,
    *,
    dim: int = 256,
    num_heads: int = 1,
    sides: Sequence[int] | None = None,
    order: Order = "quadratic",
    device: str | torch.device = "cpu",
    imports: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Iterator[MemoryGrowth]:
    """Measure the peak memory of mixers' attention against the square root of the tokens.

    Yields what is known after each number of tokens, the last complete.

    The attention runs alone on one image in one time step, float32, without gradients: for
    ``qk_token`` QKFormer's Eq. 10, for ``spiking_self`` its Eq. 7, for mixers with a map the map
    times the values. What counts is memory allocated beyond queries, keys and values at any one
    moment: what is formed on the way and what comes out. On a CPU PyTorch's allocator is read;
    buffers that a library for matrix products holds to itself are not seen. Without `sides` those
    of Table 8 are measured, on a CPU up to 80, which stays within 1 GiB.

    Example:
        >>> *_, study = memory_growth(sides=(10, 20))
        >>> [row.mixer for row in study.rows]
        ['qk_token', 'spiking_self', 'qk_token', 'spiking_self']
    """
    for path in imports:
        import_file(path)
    where = usable_device(device)
    if sides is None:
        sides = CPU_SIDES if where.type == "cpu" else SIDES
    check_positive(dim=dim, num_heads=num_heads, sides=min(sides, default=1))
    check_site(dim=dim)
    if not sides:
        raise UserError("sides= names no number of tokens")
    chosen = [_ordered(c, order) for c in sized_mixers(mixers, dim=dim, num_heads=num_heads)]
    for mixer in chosen:
        _operation(mixer, 1, "meta")  # what has no attention is refused before any work
    known = MemoryGrowth(
        mixers=tuple(mixer.label for mixer in chosen),
        dim=dim,
        num_heads=num_heads,
        sides=tuple(sorted(set(sides))),
        order=order,
        device=str(where),
        how="peak of PyTorch's CPU allocations"
        if where.type == "cpu"
        else "torch.cuda.max_memory_allocated",
    )
    whole = sum(side**4 for side in known.sides) * len(chosen)
    done = 0
    for side in known.sides:
        rows = []
        for mixer in chosen:
            progress(f"sqrt(N) = {side}: {mixer.label}", done / whole)
            rows.append(_row(mixer, side, where))
            done += side**4
        last = side == known.sides[-1]
        known = replace(known, rows=(*known.rows, *_with_ratios(rows)), complete=last)
        yield known


def _ordered(mixer: SizedMixer, order: Order) -> SizedMixer:
    """Give a mixer with a choice of orders the one asked for, unless it names one."""
    if "order" in mixer.options or option_hints(mixer.name).get("order") != Order:
        return mixer
    return replace(mixer, options={**mixer.options, "order": order})


def _operation(
    mixer: SizedMixer, tokens: int, device: torch.device | str
) -> tuple[AttentionOperation, dict[str, Tensor]]:
    """Make a mixer's attention and its inputs."""
    site = Site(dim=mixer.dim, num_heads=mixer.num_heads, grid=(1, tokens))
    built = build(mixer.name, site, mixer.options, device=device).eval()
    operation = attention_operation(built, tokens)
    return operation, operation.inputs(device, torch.float32)


def _row(mixer: SizedMixer, side: int, device: torch.device) -> GrowthRow:
    tokens = side * side
    row = GrowthRow(mixer=mixer.label, side=side, tokens=tokens)
    reason = _too_large(mixer, tokens, device)
    if reason is None:
        found, reason = attempt(_measured, mixer, tokens, device)
        if found is not None:
            return replace(row, mib=found[0] / MIB, seconds=found[1])
    return replace(row, reason=reason)


def _too_large(mixer: SizedMixer, tokens: int, device: torch.device) -> str | None:
    found, _ = attempt(work, mixer.name, mixer.options, tokens, mixer.dim, mixer.num_heads)
    if found is None:
        return None
    roles = len(getattr(get_mixer_class(mixer.name), "roles", ()))
    need = 4 * (found.formed + (roles + 4) * tokens * mixer.dim)
    return too_large(need, available_bytes(device))


def _measured(mixer: SizedMixer, tokens: int, device: torch.device) -> tuple[float, float]:
    """Return the peak of a pass in bytes, and its time in seconds."""
    operation, parts = _operation(mixer, tokens, device)
    start = time.perf_counter()
    with torch.no_grad():
        peak = peak_bytes(lambda: operation.run(parts), device)
    return peak, time.perf_counter() - start


def peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Return the most bytes that PyTorch allocated at once for a call, beyond those before.

    On CUDA as `cuda_peak` has it.
    """
    if device.type == "cuda":
        return float(cuda_peak(call, device))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports missing GPUs on standard error
    with profiler.profile(profile_memory=True) as watched:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    events = [event for event in trace["traceEvents"] if event["name"] == "[memory]"]
    in_use = peak = 0
    for event in sorted(events, key=lambda event: event["args"]["Ev Idx"]):
        if event["args"]["Device Type"] == 0:
            in_use += event["args"]["Bytes"]
            peak = max(peak, in_use)
    return float(peak)


def _with_ratios(rows: Sequence[GrowthRow]) -> list[GrowthRow]:
    """Give the others as multiples of the first."""
    base = rows[0].mib
    return [
        replace(row, ratio=None if row.mib is None or not base or i == 0 else row.mib / base)
        for i, row in enumerate(rows)
    ]
