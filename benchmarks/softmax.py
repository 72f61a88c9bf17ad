# SPDX-License-Identifier: Apache-2.0
"""keymix's softmax mixer next to timm's Attention of the installed version.

    python benchmarks/softmax.py

Both, and a second timm Attention that shows the machine's own spread, take turns in one process,
forward and in a training step. Times are those of the processor in one thread; the ratio is the
median over rounds, with quartiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from timm.layers import Attention
from torch import Tensor, nn

from keymix import create_mixer
from keymix.analysis.timing import quartiles
from measured import begin, in_turns, options, ratio, table

WIDTHS = {"ViT-Ti": (192, 3), "ViT-S": (384, 6), "ViT-B": (768, 12)}
BATCH = 8


def forward(module: nn.Module, x: Tensor) -> None:
    """Run forward alone."""
    with torch.inference_mode():
        module(x)


def training(module: nn.Module, x: Tensor) -> None:
    """Take a training step without an update."""
    module.zero_grad(set_to_none=True)
    y = module(x.requires_grad_())
    y.backward(torch.ones_like(y))


def rows(side: int, rounds: int) -> Iterator[list[str]]:
    """Time each width in both directions."""
    for name, (dim, heads) in WIDTHS.items():
        site = {"dim": dim, "num_heads": heads, "grid": (side, side), "num_prefix_tokens": 1}
        modules = {
            "timm": Attention(dim, heads, qkv_bias=True),
            "again": Attention(dim, heads, qkv_bias=True),
            "keymix": create_mixer("softmax", **site),
        }
        for run in (forward, training):
            x = torch.randn(BATCH, 1 + side**2, dim)
            calls = {
                key: partial(run, each.train(run is training), x) for key, each in modules.items()
            }
            found = in_turns(calls, rounds=rounds, processor=True)
            ms = 1e3 * quartiles(found["timm"].wall)[1]
            ratios = [ratio(found["timm"], found[key], 3) for key in ("keymix", "again")]
            yield [name, run.__name__, f"{ms:.1f}", *ratios]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--side", type=int, default=14, help="side of the grid (default 14)")
    parser.add_argument("--rounds", type=int, default=21, help="rounds (default 21)")
    given = begin(parser, argv)
    heads = ("width", "pass", "ms", "keymix / timm", "timm / timm")
    table(heads, rows(given.side, given.rounds), names=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
