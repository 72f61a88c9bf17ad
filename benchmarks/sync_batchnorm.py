# SPDX-License-Identifier: Apache-2.0
"""Gradients of two processes with half of a batch each, against one process with the whole batch.

    python benchmarks/sync_batchnorm.py

Numbers are ||g - g'|| / ||g'|| over all parameters, of small models in training with random weights
and images. ``each rank alone`` is plain data-parallel training, ``synced`` has ``sync_batchnorm``;
these three are against one process of the same dtype. The last two say where float32 differs:
gradients in float32, of one process and of two, against those of one process in float64.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.layers.sync_batchnorm import sync_batchnorm
from keymix.models import create_model
from measured import begin, options, table

RANKS, IMAGES, SIDE = 2, 8, 32
SPIKING = {"embed_dim": 64, "num_heads": 4}
MODELS = {
    "deepvit, re_attention": (
        "deepvit_micro_p4_32",
        {},
    ),
    "cvt": ("cvt_micro_32", {}),
    "plain_convnet": ("plain_convnet", {}),
    "spikformer": ("spikformer_4_384", {**SPIKING, "depth": 2}),
    "qkformer": ("qkformer_micro_32", {**SPIKING, "depths": (1, 1, 2)}),
    "qkformer, ReLU for neurons": (
        "qkformer_micro_32",
        {**SPIKING, "depths": (1, 1, 2), "neuron": "relu", "time_steps": 1},
    ),
}


def gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Gradients of all parameters by the sum of the losses, one behind the other."""
    model.zero_grad(set_to_none=False)
    F.cross_entropy(model(images), labels, reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def over_ranks(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Gradients of which each rank computes a part."""
    model, rank = copy.deepcopy(model), dist.get_rank()
    total = gradient(model, images.chunk(RANKS)[rank], labels.chunk(RANKS)[rank])
    dist.all_reduce(total)
    return total


def off(one: Tensor, other: Tensor) -> str:
    """Relative difference of two gradients."""
    return f"{float((one.double() - other.double()).norm() / other.norm()):.1e}"


def measure(rank: int, folder: str) -> None:
    """Compute the rows in one of the processes; the first prints them."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    rows = []
    for label, (name, sizes) in MODELS.items():
        torch.manual_seed(0)
        model = create_model(name, img_size=SIDE, num_classes=10, **sizes).train()
        images, labels = torch.randn(IMAGES, 3, SIDE, SIDE), torch.arange(IMAGES) % 10
        one, alone, synced = {}, {}, {}
        for dtype in (torch.float64, torch.float32):
            copied, given = copy.deepcopy(model).to(dtype), images.to(dtype)
            one[dtype] = gradient(copy.deepcopy(copied), given, labels)
            alone[dtype] = over_ranks(copied, given, labels)
            sync_batchnorm(copied)
            synced[dtype] = over_ranks(copied, given, labels)
        exact = one[torch.float64]
        rows.append(
            (
                label,
                off(alone[torch.float64], exact),
                off(synced[torch.float64], exact),
                off(synced[torch.float32], one[torch.float32]),
                off(one[torch.float32], exact),
                off(synced[torch.float32], exact),
            )
        )
    if rank == 0:
        against = "against float64"
        kinds = ("float64, each rank alone", "float64, synced", "float32, synced")
        table(("model", *kinds, f"float32, one, {against}", f"float32, synced, {against}"), rows)
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Run."""
    begin(options(__doc__, threads=1), argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
