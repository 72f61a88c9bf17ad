# SPDX-License-Identifier: Apache-2.0
"""A training step of QKFormer at T=4 next to SpikingJelly 2's own: time and peak memory.

    python benchmarks/qkformer_step.py
    python benchmarks/qkformer_step.py --batch 8 --side 64 --depths 1 2 7

ImageNet stem, widths 96, 192 and 384, six heads. Steps take turns in one process, one thread;
ratios are medians of the rounds' ratios, with quartiles. Peak memory is the growth of a fresh
process over two steps. ``checkpointed`` recomputes activations (``set_grad_checkpointing``).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keymix.analysis.timing import quartiles
from keymix.models.qkformer import QKFormer
from measured import begin, in_turns, options, ratio, table, training_step

THEIRS, OURS, CHECKPOINTED = NAMES = ("SpikingJelly", "keymix", "keymix, checkpointed")


class FromRest(nn.Module):
    """A SpikingJelly model whose neurons start each call from rest."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Reset the neurons and run the model."""
        from spikingjelly.activation_based import functional

        functional.reset_net(self.model)
        out: Tensor = self.model(x)
        return out


def qkformer(name: str, *, side: int, depths: Sequence[int], dim: int = 384) -> nn.Module:
    """Build the model of either library."""
    sizes = (depths[0], depths[1], depths[2])
    if name == THEIRS:
        from spikingjelly.activation_based.model import qkformer as theirs

        heads = (6, 6, 6)
        return FromRest(
            theirs.QKFormer(T=4, embed_dims=dim, depths=sizes, num_heads=heads, detach_reset=True)
        )
    model = QKFormer(img_size=side, embed_dim=dim, depths=sizes, num_heads=6)
    model.set_grad_checkpointing(name == CHECKPOINTED)
    return model


def trainer(
    name: str, *, batch: int, side: int, device: str = "cpu", bfloat16: bool = False, **sizes: Any
) -> Callable[[], None]:
    """Build a model and return what takes a training step of it."""
    torch.manual_seed(0)
    model = qkformer(name, side=side, **sizes).to(device)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return training_step(model, optimizer, images, labels, bfloat16=bfloat16)


def resident() -> float:
    """Peak of this process so far, MiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def growth(step: Callable[[], None]) -> float:
    """MiB by which this process grows over two steps."""
    before = resident()
    step()
    step()
    return resident() - before


def peak(name: str, argv: list[str]) -> float:
    """Peak of a step beyond the weights in a fresh process, MiB."""
    command = [sys.executable, __file__, *argv, "--peak-of", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def rows(given: argparse.Namespace, argv: list[str]) -> Iterator[list[str]]:
    """Measure peaks, then times in turns."""
    peaks = {name: peak(name, argv) for name in NAMES}
    calls = {
        name: trainer(name, batch=given.batch, side=given.side, depths=given.depths)
        for name in NAMES
    }
    samples = in_turns(calls, rounds=given.rounds, what="training steps")
    for name in NAMES:
        low, middle, high = quartiles(samples[name].kept())
        yield [
            name,
            f"{middle:.2f} [{low:.2f}, {high:.2f}]",
            "1.00" if name == THEIRS else ratio(samples[THEIRS], samples[name]),
            f"{peaks[name]:.0f}",
            f"{peaks[name] / peaks[THEIRS]:.2f}",
        ]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--batch", type=int, default=4, help="images per step (default 4)")
    parser.add_argument("--side", type=int, default=128, help="pixels of an image (default 128)")
    parser.add_argument("--depths", type=int, nargs=3, default=(1, 1, 2), help="blocks per stage")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peak-of", choices=NAMES, help=argparse.SUPPRESS)
    given = begin(parser, argv)
    if given.peak_of:
        sizes = {"batch": given.batch, "side": given.side, "depths": given.depths}
        print(growth(trainer(given.peak_of, **sizes)))
        return 0
    heads = ("step of", "median s [quartiles]", "ratio", "peak MiB", "ratio")
    table(heads, rows(given, sys.argv[1:] if argv is None else argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
