# SPDX-License-Identifier: Apache-2.0
"""Time of neurons over T steps, forward and backward, beside SpikingJelly 2's LIFNode.

    python benchmarks/neurons.py
    python benchmarks/neurons.py --steps 4 --sizes 8,64,384 --backends blocked inductor

All are timed in turns in one process, on the same currents; a ratio below 1 is faster than
SpikingJelly. It is given where a paired test shows a difference (1 % for all of a shape): n.d. is
not distinguishable, busy is a machine that was too busy to tell, few is less than ten rounds.
``inductor`` compiles first, which takes some ten seconds a number of steps.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import Tensor

import keymix
from keymix.analysis.timing import Pass, Samples, Turns, compare, quartiles
from keymix.layers.neurons import LIF

BASELINE = "SpikingJelly"


def runs(backends: list[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Name the neurons that are compared; all are LIF with tau 2 and a detached reset."""
    theirs = neuron.LIFNode(
        step_mode="m", detach_reset=True, surrogate_function=surrogate.Sigmoid(4.0)
    )

    def from_rest(x: Tensor) -> Tensor:
        theirs.reset()
        return theirs(x)

    return {BASELINE: from_rest, **{name: LIF(backend=name) for name in backends}}


def once(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward and backward; spikes and the gradient of the currents."""
    x = x.detach().requires_grad_()
    spikes = run(x)
    spikes.backward(grad)
    return spikes.detach(), x.grad


def bench(shape: tuple[int, ...], backends: list[str], rounds: int) -> dict[str, Samples]:
    """Time all in turns after a round that checks them against one another."""
    torch.manual_seed(0)
    x, grad = torch.randn(shape), torch.randn(shape)
    compared = runs(backends)
    first = {name: once(run, x, grad) for name, run in compared.items()}
    for name, (spikes, back) in first.items():
        if not torch.equal(spikes, first[BASELINE][0]):
            raise SystemExit(f"{name} gives other spikes than {BASELINE}")
        if (back - first[BASELINE][1]).abs().max() > 1e-5:
            raise SystemExit(f"{name} gives other gradients than {BASELINE}")
    del first
    passes = {name: Pass(functools.partial(once, run, x, grad)) for name, run in compared.items()}
    turns = Turns(passes)
    for _ in range(rounds):
        turns.round()
    return turns.samples


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--sizes", nargs="+", default=["8,64,384", "2,96,28,28", "8,96,56,56"])
    parser.add_argument("--backends", nargs="+", default=["reference", "blocked", "inductor"])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args(argv)
    print(
        f"keymix {keymix.__version__}, torch {torch.__version__}, float32, "
        f"{torch.get_num_threads()} threads, {args.rounds} rounds\n"
    )
    line = "{:<22} {:<14} {:>10} {:>20} {:>6}"
    print(line.format("currents", "neurons", "median ms", "[quartiles]", "ratio"))
    for size in args.sizes:
        for steps in args.steps:
            shape = (steps, *(int(each) for each in size.split(",")))
            times = bench(shape, args.backends, args.rounds)
            base = times[BASELINE]
            for name, samples in times.items():
                low, middle, high = quartiles(samples.kept())
                paired = compare(base, samples, comparisons=len(args.backends))
                print(
                    line.format(
                        str(list(shape)),
                        name,
                        f"{1e3 * middle:.2f}",
                        f"[{1e3 * low:.2f}, {1e3 * high:.2f}]",
                        "1.00" if name == BASELINE else paired.ratio_text(),
                    )
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
