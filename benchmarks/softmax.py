# SPDX-License-Identifier: Apache-2.0
"""keymix's softmax mixer next to timm's Attention of the installed version.

    python benchmarks/softmax.py

Both, and a second timm Attention that shows the machine's own spread, take turns in one process, in
random order within a round, forward and in a training step. Times are those of the processor in
one thread; the ratio is the median over rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial

import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

from keymix import create_mixer

WIDTHS = {"ViT-Ti": (192, 3), "ViT-S": (384, 6), "ViT-B": (768, 12)}


def step(module: nn.Module, x: Tensor) -> None:
    """Take a training step without an update."""
    module.zero_grad(set_to_none=True)
    y = module(x)
    y.backward(torch.ones_like(y))


def ratio(ones: list[float], bases: list[float]) -> str:
    """Write the median of the rounds' ratios, with quartiles."""
    found = sorted(one / base for one, base in zip(ones, bases, strict=True))
    low, median, high = (found[round(part * (len(found) - 1) / 4)] for part in (1, 2, 3))
    return f"{median:.3f} [{low:.3f}, {high:.3f}]"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="images per batch (default 8)")
    parser.add_argument("--side", type=int, default=14, help="side of the grid (default 14)")
    parser.add_argument("--rounds", type=int, default=21, help="rounds (default 21)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, timm {timm.__version__}, float32, batch {args.batch}")
    print("| width | pass | ms | keymix / timm | timm / timm |")
    print("|---|---|--:|--:|--:|")
    grid = (args.side, args.side)
    for name, (dim, heads) in WIDTHS.items():
        modules = {
            "timm": Attention(dim, heads, qkv_bias=True),
            "again": Attention(dim, heads, qkv_bias=True),
            "keymix": create_mixer(
                "softmax", dim=dim, num_heads=heads, grid=grid, num_prefix_tokens=1
            ),
        }
        for what in ("forward", "training"):
            training = what == "training"
            x = torch.randn(args.batch, 1 + args.side**2, dim, requires_grad=training)
            seconds: dict[str, list[float]] = {key: [] for key in modules}
            for turn in range(args.rounds + 2):  # the first two warm up
                for key in random.sample(list(modules), len(modules)):
                    module = modules[key].train(training)
                    run = partial(step, module, x) if training else partial(module, x)
                    with torch.inference_mode(not training):
                        start = time.process_time()
                        run()
                        took = time.process_time() - start
                    if turn > 1:
                        seconds[key].append(took)
            base = seconds["timm"]
            ms = 1e3 * statistics.median(base)
            cells = [ratio(seconds[key], base) for key in ("keymix", "again")]
            print(f"| {name} | {what} | {ms:.1f} | {cells[0]} | {cells[1]} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
