# SPDX-License-Identifier: Apache-2.0
"""Peak memory of attention against the number of tokens: the options and the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from keymix.studies.memory.result import MemoryGrowth
from keymix.studies.study import Session, Study, whole_numbers


class _Memory(Study[MemoryGrowth]):
    summary = "peak memory of attention against the number of tokens"
    description = """\
Measure the peak memory of mixers' attention alone, without projections and gradients, on one
image in one time step, against the square root of the tokens, as QKFormer's Table 8 and Fig. 4 do:
Q-K token attention against spiking self-attention."""
    examples = """\
examples:
  keymix analyze memory
  keymix analyze memory --out memory
  keymix analyze memory --sides 10-200:10            the whole Table 8: 7 GB of memory
  keymix analyze memory --order linear --sides 10-200:10
  keymix analyze memory --mixers qkta,qkca,sdsa,'ssa(order=linear)',mhsa --sides 10-100:10
  keymix analyze memory --device cuda --out memory-on-gpu
What does not fit into memory is reported and left out.
"""

    def add_options(self, add: Callable[..., Any]) -> None:
        add(
            "--mixers",
            default="qkta,ssa",
            metavar="LIST",
            help="with commas, options in parentheses; the others are given as multiples of the "
            "first (default: qkta,ssa)",
        )
        add(
            "--order",
            choices=("quadratic", "linear", "auto"),
            default="quadratic",
            help="of SSA's product where a mixer names none (default: quadratic, as published)",
        )
        add(
            "--sides",
            type=whole_numbers,
            metavar="LIST",
            help="square roots of the numbers of tokens: 10,50,100 or 10-200:10 (default: "
            "10-80:10 on a CPU, else 10-200:10)",
        )
        add("--dim", type=int, default=256, metavar="C", help="width of the tokens (default: 256)")
        add("--heads", type=int, default=1, metavar="H", help="number of heads (default: 1)")
        add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, … (default: cpu)")

    def run(self, given: argparse.Namespace, session: Session) -> Iterator[MemoryGrowth]:
        from keymix.studies.memory.measure import memory_growth

        with session.working() as progress:
            yield from memory_growth(
                given.mixers,
                dim=given.dim,
                num_heads=given.heads,
                sides=given.sides,
                order=given.order,
                device=given.device,
                imports=given.imports,
                progress=progress,
            )


STUDY = _Memory()
