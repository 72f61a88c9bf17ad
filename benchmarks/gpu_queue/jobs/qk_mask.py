# SPDX-License-Identifier: Apache-2.0
"""Q-K attention's neurons, sum and mask in one kernel, next to the parts and to SpikingJelly's.

Paper: QKFormer, https://arxiv.org/abs/2403.16552, Eq. 9 to 11. From the queries' currents and the
keys on, all in turns, forward and backward: the fused kernel, keymix's own neurons with a sum and a
product (each a kernel and a trip to memory), and SpikingJelly's neurons with the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from gpu_queue.job import Context, Job, Result, Step, table

AXES: Mapping[str, int] = {"token": -1, "channel": -3}
SHAPES: Mapping[str, tuple[int, ...]] = {  # [T, B, N, heads, width of a head]
    "first": (4, 32, 3136, 6, 16),  # ImageNet's first stage, 384 wide in the end
    "second": (4, 32, 784, 6, 32),
}
DTYPES = ("float32", "bfloat16")
THEIRS, PARTS, FUSED = "SpikingJelly", "parts", "fused"
ROUNDS = 12


def _runs(context: Context, axis: int) -> dict[str, Callable[[Any, Any], Any]]:
    """What is compared; all neurons are LIF with tau 2, a detached reset and QKFormer's slope."""
    from spikingjelly.activation_based import neuron, surrogate

    from keymix.layers.neurons import LIF
    from keymix.ops.qk_mask import reference
    from keymix.ops.qk_mask.reference import Neuron

    slope = surrogate.Sigmoid(4.0)
    theirs = [
        neuron.LIFNode(v_threshold=v, step_mode="m", detach_reset=True, surrogate_function=slope)
        for v in (1.0, 0.5)
    ]
    ours = [LIF(v_threshold=v) for v in (1.0, 0.5)]

    def of(queries: Any, attention: Any) -> Callable[[Any, Any], Any]:
        def run(x: Any, keys: Any) -> Any:
            return attention(queries(x).sum(axis, keepdim=True)) * keys

        return run

    def from_rest(x: Any, keys: Any) -> Any:
        for each in theirs:
            each.reset()
        return of(*theirs)(x, keys)

    def fused(x: Any, keys: Any) -> Any:
        pair = (Neuron(*each.coefficients(), each.dynamics) for each in ours)
        if context.tiny:  # Triton is for CUDA
            return reference.masked_keys(x, keys, *pair, axis)
        from keymix.ops.qk_mask import triton

        return triton.masked_keys(x, keys, *pair, axis)

    return {THEIRS: from_rest, PARTS: of(*ours), FUSED: fused}


def _once(run: Callable[[Any, Any], Any], x: Any, keys: Any, grad: Any) -> tuple[Any, Any, Any]:
    """Run forward and backward: masked keys, and the gradients of currents and keys."""
    x, keys = (each.detach().requires_grad_() for each in (x, keys))
    masked = run(x, keys)
    masked.backward(grad)
    return masked.detach(), x.grad, keys.grad


def _measure(context: Context, place: str, name: str, dtype: str) -> Result:
    """Compare what the three give at one shape, then their times and memory."""
    import torch

    from keymix.analysis.measure import timed
    from keymix.analysis.memory import MIB
    from keymix.analysis.memory_growth import peak_bytes
    from keymix.analysis.timing import Turns, compare, quartiles

    device, axis = torch.device(context.device), AXES[name]
    shape, rounds = SHAPES[place], ROUNDS
    if context.tiny:
        shape, rounds = (2, 2, 9, 3, 5), 2
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(2))
    keys = (torch.rand(shape, device=device) < 0.2).to(x.dtype)
    calls = {
        each: functools.partial(_once, run, x, keys, grad)
        for each, run in _runs(context, axis).items()
    }
    outcomes = {each: call() for each, call in calls.items()}
    same = outcomes[PARTS]
    found: Result = {"shape": list(shape), "axis": name, "dtype": dtype, "runs": {}}
    turns = Turns({each: timed(call, device) for each, call in calls.items()})
    for _ in range(rounds):
        turns.round()
    for each, samples in turns.samples.items():
        masked, grad_x, _ = outcomes[each]
        low, middle, high = (1e3 * value for value in quartiles(samples.kept()))
        largest = float(same[1].float().abs().max()) or 1.0
        row: Result = {
            **{"ms": middle, "ms_q1": low, "ms_q3": high},
            "peak_mib": peak_bytes(calls[each], device) / MIB,
            "differ": float((masked != same[0]).float().mean()),
            "error": float((grad_x.float() - same[1].float()).abs().max()) / largest,
        }
        if each != THEIRS:
            base = turns.samples[THEIRS]
            row["paired"] = asdict(compare(base, samples, comparisons=2))
        found["runs"][each] = row
    return found


def _section(results: Mapping[str, Result]) -> str:
    rows = []
    for found in results.values():
        for name, row in found["runs"].items():
            paired = row.get("paired")
            ratio = "1" if paired is None else str(paired["verdict"])
            if paired is not None and paired["verdict"] == "different":
                ratio = (
                    f"{paired['ratio']:.2f} [{paired['ratio_q1']:.2f}, {paired['ratio_q3']:.2f}]"
                )
            rows.append(
                (
                    f"{found['axis']}, {found['shape']}",
                    found["dtype"],
                    name,
                    f"{row['ms']:.3f} [{row['ms_q1']:.3f}, {row['ms_q3']:.3f}]",
                    ratio,
                    f"{row['peak_mib']:.0f}",
                    f"{1e6 * row['differ']:.2f}",
                    f"{row['error']:.1e}",
                )
            )
    heads = ("sum over, [T, B, N, h, d]", "dtype", "what", "ms [quartiles]", "ratio", "peak MiB")
    heads = (*heads, "numbers per million not those of the parts", "gradients' distance from them")
    how = (
        "Forward and backward from the queries' currents and the keys on, in turns; ratios of "
        "times over SpikingJelly's in the same round, below 1 is faster. `parts` are keymix's "
        "neurons, a sum and a product; `fused` is one kernel for each pass. Distances are over "
        "the largest."
    )
    return f"{table(heads, rows)}\n\n{how}"


def _steps(tiny: bool) -> list[Step]:
    """Each starts in 8 s; two compilations of 2 s, 12 rounds of three passes of at most 50 ms."""
    places = [(place, axis, dtype) for place in SHAPES for axis in AXES for dtype in DTYPES]
    return [
        Step(
            name="/".join(each),
            seconds=25,
            measure=functools.partial(_measure, place=each[0], name=each[1], dtype=each[2]),
            packages=("spikingjelly", "loguru"),
            gpu_gib=12,
        )
        for each in (places[:3:2] if tiny else places)
    ]


JOB = Job(
    number=10,
    name="qk_mask",
    title="Q-K attention in one kernel",
    purpose=(
        "Is the kernel that fuses the neurons, sum and mask of Q-K attention at least 1.5 times as "
        "fast as SpikingJelly's neurons with a sum and a product?"
    ),
    form={"*": "by what ran: ms with quartiles, ratio to SpikingJelly's, MiB, differences"},
    steps=_steps,
    section=_section,
)
