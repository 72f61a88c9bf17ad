# SPDX-License-Identifier: Apache-2.0
"""SKA's published ViT-S baseline, written a second time from the papers' equations, in float64.

Shifted patches and locality self-attention are Lee et al. 2021 (https://arxiv.org/abs/2112.13492,
Sec. 4), the blocks Dosovitskiy et al. 2020, static keys SKA Sec. 4.1 and 4.2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close, differs

EPS = 1e-5
WIDTH, HEADS, DEPTH, PATCH = 12, 3, 2, 4
SIZE = (16, 24)
Weights = dict[str, Tensor]


def moved(image: Tensor, down: int, right: int) -> Tensor:
    """What an image shows after a move, in zeros: out[y, x] = image[y - down, x - right]."""
    out = torch.zeros_like(image)
    height, width = image.shape[-2:]
    for y in range(height):
        for x in range(width):
            if 0 <= y - down < height and 0 <= x - right < width:
                out[..., y, x] = image[..., y - down, x - right]
    return out


def copies(shifts: str) -> list[tuple[int, int]]:
    """How far the copies move down and right."""
    step = PATCH // 2 if shifts == "half_patch" else 1
    if shifts == "axes":
        return [(0, step), (0, -step), (step, 0), (-step, 0)]
    return [(down, right) for right in (step, -step) for down in (step, -step)]


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    spread = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (spread + EPS) ** 0.5 * weight + bias


def embedded(w: Weights, images: Tensor, shifts: str) -> Tensor:
    """Sec. 4.1: five images over channels, patches, LayerNorm, projection."""
    whole = torch.cat([images, *(moved(images, *move) for move in copies(shifts))], 1)
    tokens = []
    for top in range(0, images.shape[-2], PATCH):
        for left in range(0, images.shape[-1], PATCH):
            patch = whole[..., top : top + PATCH, left : left + PATCH].flatten(1)
            patch = normed(patch, w["patch_embed.norm.weight"], w["patch_embed.norm.bias"])
            tokens.append(patch @ w["patch_embed.proj.weight"].T + w["patch_embed.proj.bias"])
    return torch.stack(tokens, 1)


def heads(x: Tensor, weight: Tensor) -> Tensor:
    """Project without a bias: ``[B, N, C] -> [B, h, N, d]``."""
    return torch.stack([x @ part.T for part in weight.chunk(HEADS)], 1)


def convolved(q: Tensor, w: Weights) -> Tensor:
    """SKA Sec. 4.2: a logit is the 3x3 convolution of the query image, zeros around it."""
    grid = SIZE[0] // PATCH, SIZE[1] // PATCH
    image = q[:, :, 1:].unflatten(2, grid)  # [B, h, H, W, d]
    kernels = w["key_conv.weight"].unflatten(0, (HEADS, -1))  # [h, M, d, 3, 3]
    bias = w["key_conv.bias"].unflatten(0, (HEADS, -1))
    logits = bias[:, None, None].expand(len(q), HEADS, *grid, bias.shape[-1]).clone()
    for y in range(grid[0]):
        for x in range(grid[1]):
            for dy in (-1, 0, 1):
                for dx in (-1, 0, 1):
                    if 0 <= y + dy < grid[0] and 0 <= x + dx < grid[1]:
                        kernel = kernels[..., dy + 1, dx + 1]
                        logits[:, :, y, x] += torch.einsum(
                            "bhd,hmd->bhm", image[:, :, y + dy, x + dx], kernel
                        )
    return logits.flatten(2, 3)


def attended(w: Weights, x: Tensor) -> Tensor:
    """Sec. 4.2: logits times a learned factor, the diagonal left out of the softmax."""
    if "qkv.weight" in w:
        q, k, v = (heads(x, part) for part in w["qkv.weight"].chunk(3))
        logits = q @ k.mT
    else:
        q, v = heads(x, w["q.weight"]), heads(x, w["v.weight"])
        logits = q @ w["key"].mT
        if "key_conv.weight" in w:
            logits = torch.cat((logits[:, :, :1], convolved(q, w)), 2)
    powers = (logits * w["temperature"].exp()).exp()
    powers = powers * (1 - torch.eye(x.shape[1], dtype=x.dtype))
    out = powers / powers.sum(-1, keepdim=True) @ v
    out = torch.cat(list(out.unbind(1)), -1)
    return out @ w["proj.weight"].T + w["proj.bias"]


def network(w: Weights, images: Tensor, shifts: str) -> Tensor:
    """The whole baseline, from images to logits."""
    x = embedded(w, images, shifts)
    x = torch.cat((w["cls_token"].expand(len(x), -1, -1), x), 1) + w["pos_embed"]
    for i in range(DEPTH):
        b = {k.removeprefix(f"blocks.{i}."): v for k, v in w.items() if k.startswith(f"blocks.{i}")}
        mixer = {k.removeprefix("attn.mixer."): v for k, v in b.items() if "attn.mixer." in k}
        x = x + attended(mixer, normed(x, b["norm1.weight"], b["norm1.bias"]))
        hidden = normed(x, b["norm2.weight"], b["norm2.bias"]) @ b["mlp.fc1.weight"].T
        hidden = hidden + b["mlp.fc1.bias"]
        hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
        x = x + hidden @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"]
    first = normed(x[:, 0], w["norm.weight"], w["norm.bias"])
    return first @ w["head.weight"].T + w["head.bias"]


def made(name: str, **options: Any) -> nn.Module:
    small = {"embed_dim": WIDTH, "num_heads": HEADS, "depth": DEPTH, "patch_size": PATCH}
    model = create_model(name, img_size=SIZE, num_classes=5, **small, **options).double().eval()
    stir(model)
    return model


def images() -> Tensor:
    seed = torch.Generator().manual_seed(3)
    return torch.randn(2, 3, *SIZE, dtype=torch.float64, generator=seed)


@together
@pytest.mark.parametrize("shifts", [None, "half_patch"])
@pytest.mark.parametrize(
    "name", ["vit_small_spt_p4_32", "ska_vit_small_spt_p4_32", "cska_vit_small_spt_p4_32"]
)
def test_the_published_baseline_is_its_equations(name: str, shifts: str | None) -> None:
    model = made(name, norm_eps=EPS, shifts=shifts)
    weights = dict(model.named_parameters())
    here, there = model(images()), network(weights, images(), shifts or "axes")
    close(here, there)
    grads = [torch.autograd.grad(y.square().sum(), list(weights.values())) for y in (here, there)]
    for one, other in zip(*grads, strict=True):
        close(one, other)


def test_at_timms_eps_it_is_another_function() -> None:
    ours = made("vit_small_spt_p4_32")
    theirs = made("vit_small_spt_p4_32", norm_eps=EPS)
    theirs.load_state_dict(ours.state_dict())
    assert differs(ours(images()), theirs(images()))
