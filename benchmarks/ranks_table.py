# SPDX-License-Identifier: Apache-2.0
"""How far a training on two devices is from one: 20 steps of small models in float64.

    python benchmarks/ranks_table.py                # two cores, a few minutes
    python benchmarks/ranks_table.py --only swin    # rows whose model or mixer is so called

Two gloo processes take half of each batch, another process takes all of it, from the same weights
by SGD with momentum; then both answer the same images in eval mode (a detector: its losses). The
number is the largest difference of the answers, relative to the largest answer. Parameters are not
compared: some have no true gradient, and move by rounding alone. Dropout and stochastic depth are
off, since ranks draw masks of their own.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import Tensor, nn

from keymix import create_model
from keymix.errors import UserError
from keymix.layers.sync_batchnorm import sync_batchnorm
from keymix.mixers.registry import list_mixers
from keymix.train import ranks
from keymix.train.step import make_fabric
from measured import begin, options

STEPS, BATCH, CLASSES, RATE, CHANNELS = 20, 8, 5, 0.05, 3
HEADS = {"embed_dim": 32, "num_heads": 2}
SPIKING = {**HEADS, "depths": (1, 1, 1), "time_steps": 2}
STAGES = {"embed_dim": 16, "depths": (2, 1), "num_heads": (2, 2), "merging": (2,)}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "vit": ("vit_micro_p4_32", 16, {**HEADS, "depth": 2}),
    "swin": ("swin_micro_p2_32", 16, {**STAGES, "window_size": 4}),
    "cait": ("cait_micro_p4_32", 16, {**HEADS, "depth": 2}),
    "caformer": ("caformer_micro_32", 32, {}),
    "deepvit": ("deepvit_micro_p4_32", 16, {**HEADS, "depth": 2}),
    "cvt": ("cvt_micro_32", 16, {}),
    "qkformer": ("qkformer_micro_32", 16, SPIKING),
    "spikformer": ("spikformer_4_384", 16, {**HEADS, "depth": 2, "time_steps": 2}),
    "setr": ("setr_micro", 32, {}),
    "mask_rcnn": (
        "mask_rcnn",
        32,
        {
            **{"backbone": "caformer_micro_32", "backbone_size": 32},
            **{"out_channels": 8, "samples": 8, "proposals": 20},
        },
    ),
}
"""Model, side of its images, and what makes it small."""


class Case(NamedTuple):
    """A row of the table."""

    model: str
    mixer: str | None
    strategy: ranks.Strategy


def cases() -> list[Case]:
    """Make the rows: all dense mixers in one model, then all models, then what is sharded."""
    in_vit = [Case("vit", mixer, "ddp") for mixer in list_mixers(domain="dense")]
    others = [Case(model, None, "ddp") for model in [*MODELS][1:]]
    sharded = [Case("vit", mixer, "fsdp") for mixer in ("softmax", "static_key", "re_attention")]
    sharded += [Case(model, None, "fsdp") for model in [*MODELS][1:] if model != "mask_rcnn"]
    return in_vit + others + sharded


def answers(case: Case) -> Tensor | str:
    """Train a model on this rank's share of made-up batches, and answer some images."""
    name, side, small = MODELS[case.model]
    torch.manual_seed(0)
    small = small if case.mixer is None else {**small, "mixer": case.mixer}
    size = {} if case.model == "mask_rcnn" else {"img_size": (side, side)}
    try:
        model = create_model(name, num_classes=CLASSES, **size, **small).train()
    except UserError as error:
        return str(error)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    sync_batchnorm(model)
    fabric = make_fabric("32")
    if case.strategy == "fsdp" and ranks.size() > 1:
        ranks.shard(model)
    net: nn.Module = ranks.wrapped(fabric, model)
    rate = RATE / 10 if case.model == "mask_rcnn" else RATE  # at the others' it diverges
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    drawn = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        images = torch.randn(BATCH, CHANNELS, side, side, generator=drawn)
        places = range(ranks.rank(), BATCH, ranks.size())
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss(case, net, images, [*places], step).sum().backward()
        optimizer.step()
    with torch.no_grad(), ranks.whole(model):
        if case.model == "mask_rcnn":
            return loss(case, model, images, [*range(BATCH)], STEPS)
        found: Tensor = model.eval()(images)
    return found


def loss(case: Case, net: nn.Module, images: Tensor, places: list[int], step: int) -> Tensor:
    """Compute the loss, or the losses of a detector, of some images of a batch of a step."""
    random = torch.Generator().manual_seed(1000 + step)
    if case.model == "mask_rcnn":
        corners = torch.randint(0, 16, (BATCH, 2), generator=random).double()
        boxes = torch.cat([corners, corners + 12], dim=1)
        targets = []
        for place in places:
            mask = torch.zeros(1, 32, 32, dtype=torch.uint8)
            left, top, right, bottom = boxes[place].int().tolist()
            mask[0, top:bottom, left:right] = 1
            label = torch.tensor([place % (CLASSES - 1) + 1])
            targets.append({"boxes": boxes[place, None], "labels": label, "masks": mask})
        losses = net([images[place] for place in places], targets)
        return torch.stack([*losses.values()])
    labels = torch.randint(CLASSES, (BATCH, 32, 32), generator=random)
    found = net(images[places])
    wanted = labels[places] if found.ndim == 4 else labels[places, 0, 0]
    return F.cross_entropy(found, wanted)


def on_rank(rank: int, port: int, chosen: Sequence[Case], said: Queue[Tensor | str]) -> None:
    """Join the other process, and say what comes out of each case."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    prepare()
    with ranks.together():
        for case in chosen:
            found = answers(case)
            if rank == 0:
                said.put(found if isinstance(found, str) else found.numpy())


def prepare() -> None:
    """Compute in float64 on one thread, and pass warnings over."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table, each row as it is done."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--only", metavar="NAME", help="rows of this model, mixer or strategy")
    given = begin(parser, argv)
    chosen = [case for case in cases() if given.only is None or given.only in case]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawned = processes.get_context("spawn")
    said = spawned.Queue()
    running = [
        spawned.Process(target=on_rank, args=(rank, port, chosen, said), daemon=True)
        for rank in range(2)
    ]
    for process in running:
        process.start()
    prepare()
    print("| model | mixer | strategy | difference |\n|---|---|---|--:|")
    for case in chosen:
        one, two = answers(case), said.get(timeout=600)
        difference = one if isinstance(one, str) else str(two)
        if not isinstance(one, str) and not isinstance(two, str):
            off = float((one - torch.from_numpy(two)).abs().max() / one.abs().max())
            difference = f"{off:.0e}"
        print(
            f"| {case.model} | {case.mixer or 'its own'} | {case.strategy} | {difference} |",
            flush=True,
        )
    for process in running:
        process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
