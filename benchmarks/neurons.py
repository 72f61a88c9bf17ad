# SPDX-License-Identifier: Apache-2.0
"""Time of neurons over T steps, forward and backward, beside SpikingJelly 2's LIFNode.

    python benchmarks/neurons.py
    python benchmarks/neurons.py --steps 4 --sizes 8,64,384 --backends blocked
    python benchmarks/neurons.py --device cuda --dtype bfloat16 --backends reference triton

All are timed in turns in one process, on the same currents; a ratio of forward and backward below
1 is faster than SpikingJelly. It is given where a paired test shows a difference (1 % for all of a
shape): n.d. is not distinguishable, busy is a machine that was too busy to tell, few is less than
ten rounds.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import keymix
from keymix.analysis.measure import timed
from keymix.analysis.memory import MIB
from keymix.analysis.timing import Samples, Turns, compare, quartiles
from keymix.layers.neurons import LIF
from keymix.studies.memory.measure import peak_bytes
from measured import device_name

BASELINE = "SpikingJelly"


def runs(backends: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Name the neurons that are compared; all are LIF with tau 2 and a detached reset."""
    from spikingjelly.activation_based import neuron, surrogate

    theirs = neuron.LIFNode(
        step_mode="m", detach_reset=True, surrogate_function=surrogate.Sigmoid(4.0)
    )

    def from_rest(x: Tensor) -> Tensor:
        theirs.reset()
        return theirs(x)

    return {BASELINE: from_rest, **{name: LIF(backend=name) for name in backends}}


def forward(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run forward alone, without gradients."""
    with torch.no_grad():
        return run(x)


def once(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward and backward; spikes and the gradient of the currents."""
    x = x.detach().requires_grad_()
    spikes = run(x)
    spikes.backward(grad)
    return spikes.detach(), x.grad


@dataclass(frozen=True)
class Bench:
    """What was measured at one shape, by the name of the neurons.

    Attributes:
        forward: Times of a forward pass without gradients.
        both: Times of forward and backward.
        peaks: Peak memory of forward and backward beyond currents and gradients of spikes, bytes.
        flips: Share of the spikes that are not the baseline's.
        gaps: Largest distance of the currents' gradients from the baseline's, over neurons all of
            whose spikes are the baseline's.
    """

    forward: dict[str, Samples]
    both: dict[str, Samples]
    peaks: dict[str, float]
    flips: dict[str, float]
    gaps: dict[str, float]


def inputs(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Make currents, and the gradients of their spikes."""
    torch.manual_seed(0)
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]


def differences(
    outcome: tuple[Tensor, Tensor], baseline: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """Share of spikes that differ, and the largest distance of gradients where none does."""
    apart = outcome[0] != baseline[0]
    gap = (outcome[1].float() - baseline[1].float()).abs()
    gap = gap.masked_fill(apart.any(0), 0)
    return float(apart.float().mean()), float(gap.max())


def check(measured: Bench) -> None:
    """Refuse neurons that are others than the baseline's, which rounds the charge otherwise."""
    for name, flips in measured.flips.items():
        if flips > 1e-5:
            raise SystemExit(f"{name} gives other spikes than {BASELINE}")
        if measured.gaps[name] > 1e-5:
            raise SystemExit(f"{name} gives other gradients than {BASELINE}")


def timed_in_turns(
    calls: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, Samples]:
    """Time calls in turns."""
    turns = Turns({name: timed(call, device) for name, call in calls.items()})
    for _ in range(rounds):
        turns.round()
    return turns.samples


def bench(
    shape: tuple[int, ...],
    backends: Sequence[str],
    rounds: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Bench:
    """Time all in turns after a round that compares what they give."""
    device = torch.device(device)
    x, grad = inputs(shape, device, dtype)
    compared = runs(backends)
    baseline = once(compared[BASELINE], x, grad)
    flips, gaps = {}, {}
    for name, run in compared.items():
        flips[name], gaps[name] = differences(once(run, x, grad), baseline)
    del baseline
    both = {name: functools.partial(once, run, x, grad) for name, run in compared.items()}
    alone = {name: functools.partial(forward, run, x) for name, run in compared.items()}
    return Bench(
        forward=timed_in_turns(alone, rounds, device),
        both=timed_in_turns(both, rounds, device),
        peaks={name: peak_bytes(call, device) for name, call in both.items()},
        flips=flips,
        gaps=gaps,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--sizes", nargs="+", default=["8,64,384", "2,96,28,28", "8,96,56,56"])
    parser.add_argument("--backends", nargs="+", default=["reference", "blocked"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", type=device_name, default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    args = parser.parse_args(argv)
    print(
        f"keymix {keymix.__version__}, torch {torch.__version__}, {args.dtype}, {args.device}, "
        f"{torch.get_num_threads()} threads, {args.rounds} rounds\n"
    )
    line = "{:<22} {:<14} {:>10} {:>10} {:>20} {:>8} {:>6}"
    heads = ("currents", "neurons", "forward ms", "both ms", "[quartiles]", "peak MiB", "ratio")
    print(line.format(*heads))
    for size in args.sizes:
        for steps in args.steps:
            shape = (steps, *(int(each) for each in size.split(",")))
            dtype = getattr(torch, args.dtype)
            measured = bench(shape, args.backends, args.rounds, args.device, dtype)
            if dtype == torch.float32:  # of fewer bits, SpikingJelly's potentials are as few on CPU
                check(measured)
            base = measured.both[BASELINE]
            for name, samples in measured.both.items():
                low, middle, high = quartiles(samples.kept())
                paired = compare(base, samples, comparisons=len(args.backends))
                print(
                    line.format(
                        str(list(shape)),
                        name,
                        f"{1e3 * quartiles(measured.forward[name].kept())[1]:.2f}",
                        f"{1e3 * middle:.2f}",
                        f"[{1e3 * low:.2f}, {1e3 * high:.2f}]",
                        f"{measured.peaks[name] / MIB:.0f}",
                        "1.00" if name == BASELINE else paired.ratio_text(),
                    )
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
