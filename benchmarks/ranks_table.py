# SPDX-License-Identifier: Apache-2.0
"""How far a training on two devices is from one: 20 steps of each model, in float64.

    python benchmarks/ranks_table.py                # one core is enough, some minutes
    python benchmarks/ranks_table.py vit:ska swin:mhsa

Two gloo processes train half of each batch, one process trains all of it, from the same weights by
SGD; then both answer the same images. "Difference" is the largest one of the answers, relative to
the largest answer. Dropout and what else ranks draw for themselves is off.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import Tensor, nn

from keymix import create_model
from keymix.errors import UserError
from keymix.mixers.registry import list_mixers
from keymix.train import ranks
from keymix.train.step import make_fabric
from measured import begin, options, table

STEPS, BATCH, SIDE, CLASSES, RATE = 20, 8, 32, 10, 0.05
MODELS = {
    "vit": "vit_micro_p4_32",
    "swin": "swin_micro_p2_32",
    "cait": "cait_micro_p4_32",
    "caformer": "caformer_micro_32",
    "deepvit": "deepvit_micro_p4_32",
    "cvt": "cvt_micro_32",
}


def answers(model: str, mixer: str) -> Tensor:
    """Train a model on this rank's share of made-up batches, and answer some images."""
    torch.manual_seed(0)
    made = create_model(model, num_classes=CLASSES, img_size=(SIDE, SIDE), mixer=mixer)
    net: nn.Module = ranks.wrapped(make_fabric("32"), made)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, SIDE, SIDE, generator=drawn)
        targets = torch.randint(CLASSES, (BATCH,), generator=drawn)
        share = slice(ranks.rank(), None, ranks.size())
        optimizer.zero_grad()
        F.cross_entropy(net(images[share]), targets[share]).backward()
        optimizer.step()
    with torch.inference_mode():
        found: Tensor = made.eval()(images)
    return found


def every(cases: Sequence[tuple[str, str]]) -> list[Tensor | str]:
    """Answers of each case, or why there are none."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    found: list[Tensor | str] = []
    for model, mixer in cases:
        try:
            found.append(answers(MODELS.get(model, model), mixer))
        except UserError as error:
            found.append(str(error))
    return found


def on_rank(rank: int, port: int, cases: Sequence[tuple[str, str]], path: str) -> None:
    """Join the other process and leave the answers in a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ranks.together():
        found = every(cases)
        if rank == 0:
            torch.save(found, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = options(__doc__, threads=1)
    parser.add_argument("cases", nargs="*", metavar="MODEL:MIXER", help="default: a table")
    given = begin(parser, argv)
    chosen = given.cases or [f"vit:{name}" for name in list_mixers(domain="dense")]
    chosen += [] if given.cases else [f"{name}:softmax" for name in [*MODELS][1:]]
    cases = [(model, mixer) for model, _, mixer in (word.partition(":") for word in chosen)]
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, path = free.getsockname()[1], str(Path(folder) / "answers.pt")
        free.close()
        processes.spawn(on_rank, (port, cases, path), nprocs=2)
        theirs = torch.load(path)
    rows = []
    for (model, mixer), one, two in zip(cases, every(cases), theirs, strict=True):
        refused = next((each for each in (one, two) if isinstance(each, str)), None)
        difference = refused or f"{float((one - two).abs().max() / one.abs().max()):.1e}"
        rows.append([model, mixer, difference])
    table(["model", "mixer", "difference"], rows, names=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
