# SPDX-License-Identifier: Apache-2.0
"""Embeddings and blocks of spiking models against their equations, written out here."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from each import together
from keymix.layers.neurons import Neurons
from keymix.layers.spiking_embed import (
    LATER,
    SPLITTING,
    STEMS,
    Shortcut,
    SpikingConv,
    SpikingEmbeds,
    SpikingPatchEmbed,
    SpikingPatchSplitting,
)
from keymix.layers.spiking_stage import SpikingStage, SpikingTransformerBlock, StepsDropPath
from mixer_cases import refused, stir
from tolerances import close

T, B = 3, 2
LIF = Neurons()


def made(module: nn.Module) -> Any:
    """In float64, weights away from their start, and norms that let enough through to fire."""
    module = module.double().train()
    stir(module)
    with torch.no_grad():
        for m in module.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                m.weight.mul_(2.0)
                m.bias.add_(0.5)
    return module


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spikes(*shape: int) -> Tensor:
    return (noise(*shape) > 0.5).double()


def fire(x: Tensor) -> Tensor:
    """LIF with tau 2, threshold 1, reset to 0: Eq. (1) to (3), step by step."""
    v, out = torch.zeros_like(x[0]), []
    for current in x:
        h = v + (current - v) / 2
        out.append((h >= 1).to(x))
        v = h * (1 - out[-1])
    return torch.stack(out)


def normed(x: Tensor, conv: SpikingConv) -> Tensor:
    """Convolution and BatchNorm over steps, images and places, with the batch's statistics."""
    weight = conv.conv.weight
    y = F.conv2d(x.flatten(0, 1), weight, stride=conv.stride, padding=weight.shape[-1] // 2)
    mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), keepdim=True, unbiased=False)
    y = (y - mean) / (var + 1e-5).sqrt()
    y = y * conv.bn.weight.view(-1, 1, 1) + conv.bn.bias.view(-1, 1, 1)
    return y.view(*x.shape[:2], *y.shape[1:])


def pooled(x: Tensor) -> Tensor:
    y = F.max_pool2d(F.pad(x.flatten(0, 1), (1, 1, 1, 1), value=-torch.inf), 3, 2)
    return y.view(*x.shape[:2], *y.shape[1:])


def same(result: Tensor, wanted: Tensor) -> None:
    """Spike by spike, and not all of them alike."""
    assert wanted.unique().numel() > 1
    close(result, wanted)


@pytest.mark.parametrize("pool", ["first", "second"])
def test_activation_before_addition_is_equation_16(pool: str) -> None:
    plan, _ = LATER[pool]
    embed = made(SpikingPatchEmbed(6, 12, plan=plan, neuron=LIF))
    x = spikes(T, B, 6, 7, 10)
    one, two = embed.convs
    if pool == "first":
        branch = fire(normed(fire(pooled(normed(x, one))), two))
    else:
        branch = fire(pooled(normed(fire(normed(x, one)), two)))
    y = embed(x, T)
    assert y.shape == (T, B, 12, 4, 5)
    same(y, branch + fire(normed(x, embed.shortcut)))
    assert set(y.unique().tolist()) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("pool", ["first", "second"])
def test_pre_activation_is_equation_17(pool: str) -> None:
    plan, _ = LATER[pool]
    embed = made(SpikingPatchEmbed(6, 12, plan=plan, shortcut="pre_activation", neuron=LIF))
    x = spikes(T, B, 6, 8, 8)
    one, two = embed.convs
    if pool == "first":
        branch = normed(fire(pooled(normed(x, one))), two)
    else:
        branch = pooled(normed(fire(normed(x, one)), two))
    same(embed(x, T), fire(branch + normed(x, embed.shortcut)))


@pytest.mark.parametrize(("kind", "side"), [("imagenet", 4), ("cifar", 1), ("dvs", 8)])
def test_a_stem_encodes_an_image_before_its_shortcut(kind: str, side: int) -> None:
    plan, encode = STEMS[kind]
    embed = made(SpikingPatchEmbed(2, 16, plan=plan, encode=encode, neuron=LIF))
    assert embed.reduction == side
    x = noise(T, B, 2, 16, 24)
    pools = iter([p for _, p in plan])

    def step(x: Tensor, conv: SpikingConv) -> Tensor:
        y = normed(x, conv)
        return fire(pooled(y) if next(pools) else y)

    start = x
    for conv in embed.encode:
        start = step(start, conv)
    y = start
    for conv in embed.convs:
        y = step(y, conv)
    found = embed(x, T)
    assert found.shape[-2:] == (16 // side, 24 // side)
    same(found, y + fire(normed(start, embed.shortcut)))


@pytest.mark.parametrize("pool", ["before", "after"])
def test_the_splitting_stem_adds_positions_behind_four_convolutions(pool: str) -> None:
    stem = made(SpikingPatchSplitting(3, 16, plan=SPLITTING["cifar"], pool=pool, neuron=LIF))
    x = y = noise(T, B, 3, 9, 8)
    for conv, (_, pools) in zip(stem.convs, SPLITTING["cifar"], strict=True):
        y = normed(y, conv)
        first, last = (pools and pool == where for where in ("before", "after"))
        y = fire(pooled(y) if first else y)
        y = pooled(y) if last else y
    found = stem(x, T)
    assert found.shape == (T, B, 16, 3, 2)
    assert stem.reduction == 4
    same(found, y + fire(normed(y, stem.pos)))


def stems() -> list[nn.Module]:
    found: list[nn.Module] = []
    for kind, (plan, encode) in STEMS.items():
        found.append(SpikingPatchSplitting(3, 16, plan=SPLITTING[kind], neuron=LIF))
        found += [
            SpikingPatchEmbed(3, 16, plan=plan, encode=encode, shortcut=shortcut, neuron=LIF)
            for shortcut in get_args(Shortcut)
        ]
    return found


@together
@pytest.mark.parametrize("embed", stems())
def test_an_image_gives_what_its_repetition_gives(embed: nn.Module) -> None:
    embed = made(embed)
    x = noise(1, B, 3, 16, 16)
    same(embed(x, T), embed(x.expand(T, -1, -1, -1, -1).contiguous(), T))


def test_one_step_counts_the_values_of_an_image_once() -> None:
    once, each = SpikingConv(3, 4, neuron=LIF), SpikingConv(3, 4, neuron=LIF)
    each.load_state_dict(once.state_dict())
    once.double(), each.double()
    once.bn.momentum = each.bn.momentum = 1.0
    x = noise(1, B, 3, 5, 4)
    same(once(x, T), each(x.expand(T, -1, -1, -1, -1), T))
    n = B * 5 * 4
    close(once.bn.running_mean, each.bn.running_mean)
    ours, theirs = n / (n - 1), n * T / (n * T - 1)
    close(once.bn.running_var / ours, each.bn.running_var / theirs)
    assert once.bn.num_batches_tracked == each.bn.num_batches_tracked == 1


def test_embeds_follow_one_another() -> None:
    plan, encode = STEMS["cifar"]
    later = LATER["second"][0]
    parts = [
        SpikingPatchEmbed(3, 8, plan=plan, encode=encode, neuron=LIF),
        SpikingPatchEmbed(8, 16, plan=later, neuron=LIF),
    ]
    both = made(SpikingEmbeds(parts))
    assert both.reduction == 2
    x = noise(1, B, 3, 8, 8)
    same(both(x, T), parts[1](parts[0](x, T), T))


def test_a_width_that_does_not_divide_and_odd_words_are_refused() -> None:
    with refused("20 wide.*multiple of 8"):
        SpikingPatchEmbed(2, 20, plan=STEMS["dvs"][0], encode=2, neuron=LIF)
    with refused("shortcut 'pre'.*pre_activation"):
        SpikingPatchEmbed(2, 16, plan=LATER["first"][0], shortcut="pre", neuron=LIF)
    with refused("pool 'behind'.*after"):
        SpikingPatchSplitting(3, 16, plan=SPLITTING["dvs"], pool="behind", neuron=LIF)


def linear(x: Tensor, fc: nn.Linear, bn: nn.BatchNorm1d) -> Tensor:
    y = x @ fc.weight.T + fc.bias
    mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2), unbiased=False)
    return fire((y - mean) / (var + 1e-5).sqrt() * bn.weight + bn.bias)


class Half(nn.Module):
    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        assert grid == (2, 3)
        return (x > 0).to(x).flip(-1)


def test_a_block_adds_its_mixer_and_its_mlp() -> None:
    block = made(SpikingTransformerBlock(8, mlp_ratio=1.5, neuron=LIF))
    block.attn = Half()
    x = spikes(T, B, 6, 8)
    mixed = x + (x > 0).to(x).flip(-1)
    mlp = block.mlp
    assert mlp.fc1.out_features == 12
    hidden = linear(mixed, mlp.fc1, mlp.bn1)
    same(block(x, (2, 3)), mixed + linear(hidden, mlp.fc2, mlp.bn2))


@pytest.mark.parametrize("dropped", ["drop_path1", "drop_path2"])
def test_each_branch_is_dropped_by_itself(dropped: str) -> None:
    block = made(SpikingTransformerBlock(8, neuron=LIF, drop_path=0.5))
    block.attn = Half()
    x = spikes(T, B, 6, 8)
    wanted = block.mlp(x) if dropped == "drop_path1" else block.attn(x, (2, 3))
    block.drop_path1.drop_prob = block.drop_path2.drop_prob = 0.0
    block.get_submodule(dropped).drop_prob = 1 - 1e-12
    block.drop_path1.train()
    block.drop_path2.train()
    assert wanted.any()
    same(block(x, (2, 3)), x + wanted)


def test_an_image_loses_a_branch_at_all_its_steps() -> None:
    drop = StepsDropPath(0.5).train()
    torch.manual_seed(0)
    y = drop(torch.ones(T, 64, 2, 3))
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(y, y[:1, :, :1, :1].expand_as(y))


def test_tokens_and_images_are_views_of_one_memory() -> None:
    plan, _ = LATER["first"]
    stage = SpikingStage(
        SpikingPatchEmbed(4, 8, plan=plan, neuron=LIF),
        8,
        num_heads=2,
        drop_path=[0.0],
        neuron=LIF,
    )
    seen: list[Tensor] = []

    class Keep(nn.Module):
        def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
            seen.append(x)
            return x

    x = torch.randn(T * B, 4, 8, 12).contiguous(memory_format=torch.channels_last)
    image = stage.patch_embed(x.view(T, B, 4, 8, 12), T)
    stage.mix(image, Keep())
    assert seen[0].data_ptr() == image.data_ptr()
    assert torch.equal(seen[0][1, 1, 7], image[1, 1, :, 1, 1])
