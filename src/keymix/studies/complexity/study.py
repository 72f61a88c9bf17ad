# SPDX-License-Identifier: Apache-2.0
"""What token mixers cost, counted, and measured against tokens: the options and the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from keymix.studies.complexity.result import Complexity, Setting
from keymix.studies.study import Session, Study, whole_numbers


class _Complexity(Study[Complexity]):
    summary = "what mixers cost: counts, latency and memory against the number of tokens"
    description = """\
Count what token mixers cost: multiply-adds per parameter (SKA Fig. 4), and which weights the image
shares or computes (SKA Table 7). Measure latency and peak memory against the number of tokens, all
mixers in turns. Every registered mixer is in."""
    examples = """\
examples:
  keymix analyze complexity
  keymix analyze complexity --out cost
  keymix analyze complexity --tokens none --json             counts alone, in seconds
  keymix analyze complexity --mixers mhsa,ska,cska --tokens 196,784,3136 --repeats 20
  keymix analyze complexity --dim 768 --heads 12 --at 196 --tokens none
  keymix analyze complexity --import my_mixer.py
"""

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--dim", type=int, default=256, metavar="C", help="width of the tokens (default: 256)")
        add("--heads", type=int, default=8, metavar="H", help="number of heads (default: 8)")
        add("--at", type=int, default=256, metavar="N", help="tokens of the tables (default: 256)")
        add(
            "--tokens",
            type=lambda text: () if text == "none" else whole_numbers(text),
            default="49,196,784",
            metavar="LIST",
            help="numbers of tokens for latency and memory, each on the grid nearest to a "
            "square; none measures nothing (default: 49,196,784)",
        )
        add(
            "--mixers",
            metavar="LIST",
            help="with commas, options in parentheses: mhsa,'ska(activation=relu)' (default: all)",
        )
        add("--repeats", type=int, default=16, metavar="N", help="rounds of timing (default: 16)")
        add(
            "--batch-size",
            type=int,
            default=1,
            metavar="B",
            help="images per batch, for memory; latency is of one image (default: 1)",
        )
        add("--time-steps", type=int, default=4, metavar="T", help="of spiking mixers (default: 4)")
        add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, … (default: cpu)")

    def run(self, given: argparse.Namespace, session: Session) -> Iterator[Complexity]:
        from keymix.studies.complexity.measure import complexity_parts

        setting = Setting(
            dim=given.dim,
            num_heads=given.heads,
            at=given.at,
            tokens=given.tokens,
            repeats=given.repeats,
            batch_size=given.batch_size,
            device=given.device,
            time_steps=given.time_steps,
        )
        with session.working() as progress:
            yield from complexity_parts(
                given.mixers, setting, imports=given.imports, progress=progress
            )


STUDY = _Complexity()
