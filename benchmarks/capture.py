# SPDX-License-Identifier: Apache-2.0
"""What capturing attention costs next to the plain forward pass, in memory and time.

    python benchmarks/capture.py
    python benchmarks/capture.py --side 32 --queries 16 --mixers own softmax static_key

A ViT on a square grid of tokens runs plain, with the rows of some queries captured in every layer,
and with whole maps captured. All run in one process started for this, whose allocator returns
memory at once; memory is what the process grows by, the median over rounds. ``own`` is timm's
attention.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import keymix
from keymix.analysis.attention import attention_maps
from keymix.analysis.memory import cpu_growth, cpu_peak_unknown
from keymix.models import create_model

# large blocks straight from the system: their coming and going is then seen page by page
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
WAYS = ("plain", "rows", "whole")
PATCH = 8


class Captured(nn.Module):
    """A forward pass in which maps are captured.

    Args:
        model: What runs.
        queries: How many rows of each layer; None for whole maps.
    """

    def __init__(self, model: nn.Module, queries: int | None) -> None:
        super().__init__()
        self.model, self.queries = model, queries

    def forward(self, x: Tensor) -> Tensor:
        """Return the first layer's map; all stay in memory until then."""
        rows = None if self.queries is None else range(self.queries)
        return next(iter(attention_maps(self.model, x, queries=rows).values()))


def build(mixer: str, args: argparse.Namespace) -> nn.Module:
    """Make a ViT without class token whose patches number ``side`` squared."""
    options: dict[str, Any] = {} if mixer == "own" else {"mixer": mixer}
    torch.manual_seed(0)
    return create_model(
        "vit_small_patch16_224",
        img_size=args.side * PATCH,
        patch_size=PATCH,
        embed_dim=args.dim,
        num_heads=args.heads,
        depth=args.depth,
        class_token=False,
        global_pool="avg",
        **options,
    ).eval()


def measure(args: argparse.Namespace) -> None:
    """Measure all, one JSON line a mixer."""
    torch.set_num_threads(1)
    size = args.side * PATCH
    x = torch.randn(args.batch, 3, size, size)
    for mixer in args.mixers:
        model = build(mixer, args)
        ways = {
            "plain": model,
            "rows": Captured(model, args.queries),
            "whole": Captured(model, None),
        }
        memory: dict[str, list[float]] = {way: [] for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.repeats):
            for way, module in ways.items():
                memory[way].append(cpu_growth(module, x, "inference"))
                began = time.perf_counter()
                with torch.no_grad():
                    module(x)
                seconds[way].append(time.perf_counter() - began)
        found = {
            "mixer": mixer,
            "mib": {way: statistics.median(values) for way, values in memory.items()},
            "ms": {way: 1000 * statistics.median(values) for way, values in seconds.items()},
        }
        print(json.dumps(found), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Print a table: a row per mixer, ratios to its own plain forward pass."""
    parser = argparse.ArgumentParser(description="Cost of capturing attention.")
    parser.add_argument("--side", type=int, default=32, help="tokens a side; default 32")
    parser.add_argument("--queries", type=int, default=16, help="rows captured; default 16")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="rounds; default 5")
    parser.add_argument(
        "--mixers", nargs="+", default=["own", "softmax", "static_key", "conv_static_key"]
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        measure(args)
        return 0
    why = cpu_peak_unknown()
    if why is not None:
        print(f"memory is {why}")
        return 1
    words = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv), "--inside"]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **ALLOCATOR}
    )
    print(
        f"keymix {keymix.__version__}, torch {torch.__version__}, {platform.system()}, 1 thread, "
        f"float32; {args.side**2} tokens, {args.queries} queries in each of {args.depth} layers, "
        f"width {args.dim}, {args.heads} heads, batch {args.batch}"
    )
    print(
        f"{'mixer':<20}{'plain MiB':>10}{'rows MiB':>10}{'x plain':>9}{'whole MiB':>11}"
        f"{'x plain':>9}{'plain ms':>10}{'rows ms':>9}{'x plain':>9}"
    )
    for line in done.stdout.splitlines():
        row = json.loads(line)
        mib, ms = row["mib"], row["ms"]
        print(
            f"{row['mixer']:<20}{mib['plain']:>10.1f}{mib['rows']:>10.1f}"
            f"{mib['rows'] / max(mib['plain'], 0.01):>9.2f}{mib['whole']:>11.1f}"
            f"{mib['whole'] / max(mib['plain'], 0.01):>9.2f}{ms['plain']:>10.1f}{ms['rows']:>9.1f}"
            f"{ms['rows'] / ms['plain']:>9.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
