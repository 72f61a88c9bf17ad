# SPDX-License-Identifier: Apache-2.0
"""A training step of QKFormer at T=4 beside SpikingJelly 2's own: time and peak memory.

    python benchmarks/qkformer_step.py
    python benchmarks/qkformer_step.py --batch 8 --rounds 12

ImageNet stem, widths 96, 192 and 384, blocks 1, 1 and 2. Times are taken in turns in one process,
and a ratio of times is given where a paired test shows a difference (1 % for both): n.d. is not
distinguishable, busy is a machine that was too busy to tell, few is less than ten rounds. Peak
memory is the growth of a fresh process over two steps. ``one by one`` is ours with the parts of a
step called one after the other, which keeps what PyTorch keeps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import keymix
from keymix.analysis.timing import Pass, Turns, compare, quartiles
from keymix.layers.spiking_block import plain_steps
from keymix.models.qkformer import QKFormer

THEIRS, OURS, PARTS = "SpikingJelly", "keymix", "keymix, one by one"


def trainer(name: str, batch: int, side: int) -> Callable[[], None]:
    """Build a model and return what takes a training step of it."""
    torch.manual_seed(0)
    model: nn.Module
    reset: Callable[[], None] | None = None
    if name == THEIRS:
        from spikingjelly.activation_based import functional
        from spikingjelly.activation_based.model import qkformer

        model = qkformer.QKFormer(
            T=4, embed_dims=384, depths=(1, 1, 2), num_heads=(6, 6, 6), detach_reset=True
        )

        reset = functools.partial(functional.reset_net, model)
    else:
        model = QKFormer(img_size=side, embed_dim=384, depths=(1, 1, 2), num_heads=6)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        if reset is not None:
            reset()
        optimizer.zero_grad()
        with plain_steps() if name == PARTS else contextlib.nullcontext():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def resident() -> float:
    """Peak of this process so far, MiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak(name: str, batch: int, side: int) -> float:
    """Growth of a fresh process over two steps, MiB."""
    sizes = ["--batch", str(batch), "--side", str(side)]
    command = [sys.executable, __file__, *sizes, "--peak-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4, help="images a step (default 4)")
    parser.add_argument("--side", type=int, default=128, help="pixels of an image (default 128)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peak-of", choices=(THEIRS, OURS, PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peak_of:
        step = trainer(args.peak_of, args.batch, args.side)
        before = resident()
        step()
        step()
        print(resident() - before)
        return 0
    names = (THEIRS, OURS, PARTS)
    print(
        f"keymix {keymix.__version__}, torch {torch.__version__}, float32, "
        f"{torch.get_num_threads()} threads, batch {args.batch}, {args.side} pixels, "
        f"{args.rounds} rounds\n"
    )
    peaks = {name: peak(name, args.batch, args.side) for name in names}
    steps = {name: trainer(name, args.batch, args.side) for name in names}
    turns = Turns({name: Pass(step) for name, step in steps.items()})
    for _ in range(args.rounds):
        turns.round()
    line = "{:<20} {:>9} {:>16} {:>6} {:>9} {:>6}"
    print(line.format("step of", "median s", "[quartiles]", "ratio", "peak MiB", "ratio"))
    base = turns.samples[THEIRS]
    for name in names:
        low, middle, high = quartiles(turns.samples[name].kept())
        paired = compare(base, turns.samples[name], comparisons=2)
        print(
            line.format(
                name,
                f"{middle:.2f}",
                f"[{low:.2f}, {high:.2f}]",
                "1.00" if name == THEIRS else paired.ratio_text(),
                f"{peaks[name]:.0f}",
                f"{peaks[name] / peaks[THEIRS]:.2f}",
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
