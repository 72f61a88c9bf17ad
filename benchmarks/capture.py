# SPDX-License-Identifier: Apache-2.0
"""What capturing attention costs next to the plain forward pass, in memory.

    python benchmarks/capture.py

ViT-S on a square grid of 1,024 tokens runs plain, with the rows of 16 queries captured in every
layer, and with whole maps captured. Memory is what a fresh process grows by, beyond weights and
input. ``own`` is timm's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from keymix.analysis.attention import attention_maps
from keymix.analysis.memory import Build, peak_memory
from keymix.models import create_model
from measured import begin, options, table

MIXERS = ("own", "softmax", "static_key", "conv_static_key")
WAYS = ("plain", "rows", "whole")
PATCH, QUERIES = 8, 16


class Captured(nn.Module):
    """A forward pass in which maps are captured, whole or the rows of some queries."""

    def __init__(self, model: nn.Module, queries: range | None) -> None:
        super().__init__()
        self.model, self.queries = model, queries

    def forward(self, x: Tensor) -> Tensor:
        """Return the first layer's map; all stay in memory until then."""
        return next(iter(attention_maps(self.model, x, queries=self.queries).values()))


def build(mixer: str, way: str, side: int, depth: int) -> nn.Module:
    """Make a ViT without class token whose patches number ``side`` squared."""
    options: dict[str, Any] = {} if mixer == "own" else {"mixer": mixer}
    size = {"img_size": side * PATCH, "patch_size": PATCH, "depth": depth}
    model = create_model(
        "vit_small_patch16_224", **size, class_token=False, global_pool="avg", **options
    )
    if way == "plain":
        return model
    return Captured(model, range(QUERIES) if way == "rows" else None)


def rows(mixers: Sequence[str], side: int, depth: int) -> Iterator[list[str]]:
    """Measure each mixer; ratios are to its own plain forward pass."""
    for mixer in mixers:
        how = {"mixer": mixer, "side": side, "depth": depth}
        builds = {way: Build(factory="capture:build", kwargs={**how, "way": way}) for way in WAYS}
        size = (3, side * PATCH, side * PATCH)
        peaks = peak_memory(builds, size, batch_size=1, phases=("inference",))
        plain, *others = (peaks[way].inference_mib for way in WAYS)
        if plain is None:
            yield [mixer, peaks["plain"].note]
            continue
        cells = [f"{plain:.1f}"]
        for mib in others:
            cells += [f"{mib:.1f}", f"{mib / plain:.2f}"]
        yield [mixer, *cells]


def main(argv: list[str] | None = None) -> int:
    """Print a table, a row per mixer."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--side", type=int, default=32, help="tokens a side (default 32)")
    parser.add_argument("--depth", type=int, default=12, help="layers (default 12)")
    parser.add_argument("--mixers", nargs="+", default=MIXERS, help="default: all of the table")
    given = begin(parser, argv)
    heads = ("mixer", "plain, MiB", "rows, MiB", "× plain", "whole maps, MiB", "× plain")
    table(heads, rows(given.mixers, given.side, given.depth))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
