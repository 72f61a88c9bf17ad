# SPDX-License-Identifier: Apache-2.0
"""Two processes with parts of a batch compute what one process computes with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from commands import PATIENCE, forkserver
from each import each
from keymix.layers.cvt_stage import CvTStage, RoleProjections
from keymix.layers.neurons import Neurons
from keymix.layers.spiking_embed import SpikingPatchSplitting
from keymix.layers.spiking_stage import SpikingStage
from keymix.layers.sync_batchnorm import sync_batchnorm
from keymix.mixers.base import Site
from keymix.mixers.registry import build
from keymix.models import create_model
from tolerances import close, differs

BATCH = 6
SHARES = {"equal": (3, 3), "uneven": (5, 1)}
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A module and what it is called with; ``axis`` is that of the images."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    axis: int = 0
    call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__


def mixer(name: str, **options: Any) -> nn.Module:
    return build(name, Site(dim=8, num_heads=4, grid=(2, 3), neuron=Neurons(tau=1.5)), options)


def spiking_stage(attention: str) -> nn.Module:
    """A stage of Spikformer's form that recomputes its one block."""
    neuron = Neurons(tau=1.5)
    embed = SpikingPatchSplitting(3, 8, plan=((2, True), (1, True)), neuron=neuron)
    stage = SpikingStage(embed, 8, num_heads=4, drop_path=(0.0,), neuron=neuron)
    stage.blocks[0].attn = build(attention, Site(dim=8, num_heads=4, grid=(2, 2), neuron=neuron))
    stage.grad_checkpointing = True
    return stage


def cvt_stage() -> nn.Module:
    stage = CvTStage(
        3, 8, num_heads=2, kv_stride=2, embed=(3, 2, 1), class_token=True, drop_path=(0.0, 0.0)
    )
    site = Site(
        dim=8,
        num_heads=2,
        grid=(4, 4),
        num_prefix_tokens=1,
        key_grid=(2, 2),
        project=RoleProjections(8, stride=2, num_prefix_tokens=1),
    )
    for block in stage.blocks:
        block.attn = build("softmax", site)
    stage.grad_checkpointing = True
    return stage


def checkpointed(name: str, **options: Any) -> nn.Module:
    model = create_model(name, num_classes=3, **options)
    model.set_grad_checkpointing(True)
    return model


def evenly_averaged() -> nn.Module:
    norm = nn.BatchNorm2d(4, momentum=None, affine=False)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU())


def final_map(module: nn.Module, x: Tensor) -> Tensor:
    maps: Tensor = module.attention_map(x, stage="final")
    return maps


TOKENS, IMAGES, SPIKES = (BATCH, 6, 8), (BATCH, 3, 8, 8), (2, BATCH, 6, 8)
VIT = partial(checkpointed, "vit_micro_p4_32", img_size=8, embed_dim=8, depth=2, num_heads=2)
QKFORMER = {"img_size": 16, "embed_dim": 16, "num_heads": 2, "depths": (1, 1, 1), "time_steps": 2}
CASES = {
    "BatchNorm1d": Case(partial(nn.BatchNorm1d, 8), (BATCH, 8)),
    "BatchNorm2d": Case(partial(nn.BatchNorm2d, 3), IMAGES),
    "no momentum, no weights": Case(evenly_averaged, IMAGES),
    "re_attention": Case(partial(mixer, "re_attention", backend="reference"), TOKENS),
    "re_attention by rows": Case(partial(mixer, "re_attention", backend="blocked"), TOKENS),
    "map of re_attention": Case(partial(mixer, "re_attention"), TOKENS, call=final_map),
    "static keys": Case(partial(mixer, "static_key_re_attention", backend="reference"), TOKENS),
    "static keys by rows": Case(
        partial(mixer, "static_key_re_attention", backend="blocked"), TOKENS
    ),
    "qk_token": Case(partial(mixer, "qk_token"), SPIKES, axis=1),
    "qk_channel": Case(partial(mixer, "qk_channel"), SPIKES, axis=1),
    "spiking stage": Case(
        partial(spiking_stage, "spiking_self"),
        (2, *IMAGES),
        axis=1,
        call=lambda stage, x: stage(x, 2),
    ),
    "CvT stage": Case(cvt_stage, IMAGES, call=lambda stage, x: stage(x)[0]),
    "vit, recomputed": Case(partial(VIT, mixer="re_attention"), IMAGES),
    "vit by rows, recomputed": Case(
        partial(VIT, mixer="re_attention", mixer_options={"backend": "blocked"}), IMAGES
    ),
    "qkformer, recomputed": Case(
        partial(checkpointed, "qkformer_micro_32", **QKFORMER), (BATCH, 3, 16, 16)
    ),
    "plain_convnet, recomputed": Case(
        partial(checkpointed, "plain_convnet", width=4), (BATCH, 3, 16, 16)
    ),
}


def made(case: Case) -> nn.Module:
    """The module of a case, the same in every process, that trains."""
    torch.manual_seed(1)
    module = case.make().double().train()
    for name, parameter in module.named_parameters():
        if "norm" in name or "bn" in name:  # weights and biases that a wrong one cannot stand for
            nn.init.uniform_(parameter, 0.5, 1.5)
    return module


def whole_batch(case: Case) -> Tensor:
    torch.manual_seed(2)
    x = 1 + torch.randn(case.shape, dtype=torch.float64)
    x.select(case.axis, 0).mul_(3)  # so that the parts have means and variances of their own
    return x


def results(case: Case, module: nn.Module, x: Tensor, first: int = 0) -> Results:
    """Train one step on images from the ``first`` on, by the sum of weighted outputs."""
    x = x.detach().clone().requires_grad_()
    out = case.call(module, x)
    sizes = list(out.shape)
    sizes[case.axis] = BATCH
    torch.manual_seed(3)
    weights = torch.randn(sizes, dtype=out.dtype)
    (out * weights.narrow(case.axis, first, out.shape[case.axis])).sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad}
    found |= {f"d {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return found | {f"buffer {n}": buffer.double() for n, buffer in module.named_buffers()}


def summed(found: Results) -> Results:
    """Sum the gradients of weights over ranks, as data-parallel training does."""
    for key, value in found.items():
        if key.startswith("d "):
            dist.all_reduce(value)
    return found


def ragged(backend: str) -> Results:
    """Re-attention of images that have other sizes on the other rank."""
    module = made(Case(partial(mixer, "re_attention", backend=backend), TOKENS))
    sync_batchnorm(module)
    torch.manual_seed(2)
    x = torch.randn(2, 4 + 5 * dist.get_rank(), 8, dtype=torch.float64)
    return summed(results(CASES["re_attention"], module, x))


def alone() -> dict[str, tuple[Results, Results]]:
    """What norms in eval mode compute, synced and not, with no other rank to wait for."""
    found = {}
    for name in ("BatchNorm2d", "re_attention", "re_attention by rows"):
        case, pair = CASES[name], []
        for synced in (True, False):
            module = made(case)
            for buffer in module.buffers():
                buffer.fill_(2)
            if synced:
                sync_batchnorm(module)
            for norm in module.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.eval()  # frozen: what it stands in trains
            pair.append(results(case, module, whole_batch(case)))
        found[name] = (pair[0], pair[1])
    return found


def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for share, parts in SHARES.items():
            plain = made(case)
            module = copy.deepcopy(plain)
            sync_batchnorm(module)
            assert list(module.state_dict()) == list(plain.state_dict())
            module, original = copy.deepcopy(module), module  # as an average of weights is made
            first = sum(parts[:rank])
            part = whole_batch(case).narrow(case.axis, first, parts[rank])
            found[f"{name}, {share}"] = summed(results(case, module, part, first))
            for (key, mine), own in zip(original.named_buffers(), plain.buffers(), strict=True):
                assert torch.equal(mine, own), f"a copy of {name} moved {key}"
    found["ragged"] = [ragged("blocked"), ragged("reference")]
    found["alone"] = alone() if rank == 0 else None
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = [forkserver().Process(target=worker, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@each("name", {name: (name,) for name in CASES}, shaped=len(CASES))
def test_two_ranks_are_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    wanted = results(case, made(case), whole_batch(case))
    assert differs(wanted["x"], torch.zeros_like(wanted["x"]))
    for share in SHARES:
        one, other = (found[f"{name}, {share}"] for found in ranks)
        assert one.keys() == wanted.keys()
        for key, value in wanted.items():
            if key in ("out", "x"):
                close(torch.cat([one[key], other[key]], case.axis), value)
            else:
                close(one[key], value)
                assert torch.equal(one[key], other[key]), f"ranks differ in {key}"


@pytest.mark.slow
def test_maps_by_rows_may_differ_in_size_between_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        blocked, whole = found["ragged"]
        for key, value in whole.items():
            close(blocked[key], value)
    assert ranks[0]["ragged"][0]["out"].shape != ranks[1]["ragged"][0]["out"].shape


@pytest.mark.slow
def test_norms_in_eval_mode_wait_for_no_other_rank(ranks: list[dict[str, Any]]) -> None:
    for synced, plain in ranks[0]["alone"].values():
        for key, value in plain.items():
            assert torch.equal(synced[key], value)


def test_without_ranks_nothing_changes() -> None:
    norm = nn.BatchNorm1d(4)
    before = dict(vars(norm))
    sync_batchnorm(norm)
    assert vars(norm) == before
