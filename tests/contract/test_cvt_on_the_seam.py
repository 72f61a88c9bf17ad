# SPDX-License-Identifier: Apache-2.0
"""CvT on the seam: convolutions make queries, keys and values, and keys lie on a coarser grid.

The small CvT-13 here stands for the family to come; it shows that the seam suffices.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Grid, Site
from keymix.mixers.registry import build, list_mixers
from mixer_cases import gradients, refused, stir
from tolerances import close, differs


class ConvProjection(nn.Module):
    """Depthwise 3x3 and BatchNorm on the patch tokens; prefix tokens pass."""

    def __init__(self, dim: int, stride: int, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.conv = nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        image = x[..., self.prefix :, :].mT.reshape(-1, x.shape[-1], *grid)
        patches = self.bn(self.conv(image)).flatten(2).mT.unflatten(0, x.shape[:-2])
        return torch.cat((x[..., : self.prefix, :], patches), -2)


class Block(nn.Module):
    def __init__(self, site: Site, mixer: str) -> None:
        super().__init__()
        dim = site.dim
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mixer = build(mixer, site)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.token_mixer(self.norm1(x), grid=grid)
        return x + self.mlp(self.norm2(x))


class Stage(nn.Module):
    def __init__(
        self,
        conv: nn.Conv2d,
        heads: int,
        depth: int,
        grid: Grid,
        prefix: int,
        mixer: str,
        stride: int,
    ) -> None:
        super().__init__()
        dim = conv.out_channels
        self.conv, self.norm = conv, nn.LayerNorm(dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if prefix else None

        def project(role: str) -> nn.Module:
            return ConvProjection(dim, 1 if role == "q" else stride, prefix)

        site = Site(
            dim=dim,
            num_heads=heads,
            grid=grid,
            key_grid=(-(-grid[0] // stride), -(-grid[1] // stride)),
            num_prefix_tokens=prefix,
            project=project,
        )
        self.blocks = nn.ModuleList(Block(site, mixer) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        grid = (x.shape[-2], x.shape[-1])
        tokens = self.norm(x.flatten(2).mT)
        if self.cls_token is not None:
            tokens = torch.cat((self.cls_token.expand(len(x), -1, -1), tokens), 1)
        for block in self.blocks:
            tokens = block(tokens, grid)
        return tokens if self.cls_token is not None else tokens.mT.unflatten(2, grid)


class CvT(nn.Module):
    """CvT-13: three stages, the class token in the last."""

    def __init__(
        self,
        mixer: str,
        *,
        stride: int = 2,
        dims: tuple[int, ...] = (64, 192, 384),
        heads: tuple[int, ...] = (1, 3, 6),
        depths: tuple[int, ...] = (1, 2, 10),
    ) -> None:
        super().__init__()
        convs = [
            nn.Conv2d(3, dims[0], 7, 4, 2),
            nn.Conv2d(dims[0], dims[1], 3, 2, 1),
            nn.Conv2d(dims[1], dims[2], 3, 2, 1),
        ]
        side, stages = 32, []
        for i, conv in enumerate(convs):
            side = (side + 2 * int(conv.padding[0]) - conv.kernel_size[0]) // conv.stride[0] + 1
            grid = (side, side)
            stages.append(Stage(conv, heads[i], depths[i], grid, int(i == 2), mixer, stride))
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(dims[-1]), nn.Linear(dims[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(x)[:, 0]))


SMALL: dict[str, Any] = {"dims": (8, 12, 24), "heads": (1, 3, 6), "depths": (1, 1, 2)}


@pytest.mark.parametrize(
    ("mixer", "dims", "count"),
    [
        ("softmax", (64, 192, 384), 19_616_330),
        ("static_key", (64, 192, 384), 18_022_730),
        ("conv_static_key", (64, 192, 384), 18_112_490),
        ("static_key", (64, 198, 402), 19_694_000),
        ("static_key", (64, 195, 402), 19_655_243),
    ],
)
def test_counts_are_the_published(mixer: str, dims: tuple[int, ...], count: int) -> None:
    with torch.device("meta"):
        model = CvT(mixer, dims=dims)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("mixer", list_mixers())
@pytest.mark.parametrize("stride", [1, 2])
def test_every_mixer_trains_in_cvt_or_is_refused(mixer: str, stride: int) -> None:
    if mixer == "key_value" and stride == 2:
        with refused("stride 1"):
            CvT(mixer, stride=stride, **SMALL)
        return
    model = CvT(mixer, stride=stride, **SMALL).double()
    stir(model)
    image_is_seen = model.stages[2].blocks[0].token_mixer.claims.mixes_prefix
    y, grads = gradients(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert torch.isfinite(y).all()
    first = model.stages[0].blocks[0].token_mixer
    prefix = "stages.0.blocks.0.token_mixer."
    shifts_all_keys = "project.k.bn.bias"  # the same number on every logit of a query
    for key, grad in grads.items():
        name = key.removeprefix(prefix)
        if name != key and name not in (*first.zero_gradients, shifts_all_keys):
            reached = not grad.isnan().any() and differs(grad, torch.zeros_like(grad))
            assert reached == image_is_seen, key


def test_key_value_is_refused_where_keys_lie_elsewhere() -> None:
    site = Site(dim=8, grid=(4, 4), key_grid=(2, 2), project=lambda role: ConvProjection(8, 2, 0))
    with pytest.raises(UserError, match=r"\(2, 2\).*\(4, 4\).*stride 1"):
        build("key_value", site)


def test_keys_on_another_grid_need_projections() -> None:
    for mixer in ("softmax", "static_key", "re_attention"):
        with pytest.raises(UserError, match="project="):
            build(mixer, Site(dim=8, grid=(4, 4), key_grid=(2, 2)))


@pytest.mark.parametrize("mixer", ["softmax", "static_key", "conv_static_key", "re_attention"])
@pytest.mark.parametrize("prefix", [0, 1])
def test_strided_maps_have_a_column_a_key(mixer: str, prefix: int) -> None:
    def project(role: str) -> nn.Module:
        return ConvProjection(8, 1 if role == "q" else 2, prefix)

    site = Site(
        dim=8, num_heads=2, grid=(3, 5), key_grid=(2, 3), num_prefix_tokens=prefix, project=project
    )
    made = build(mixer, site).double().eval()
    stir(made)
    x = torch.randn(2, prefix + 15, 8, dtype=torch.float64)
    maps = made.attention_map(x, stage="final")
    assert maps.shape == (2, 2, prefix + 15, prefix + 6)
    v = made.inputs(x, (3, 5))["v"]
    close(made.proj((maps @ v).transpose(1, 2).flatten(-2)), made(x))
    with refused("mask_diagonal"):
        build(mixer, site, {"mask_diagonal": True})


def test_projected_softmax_is_attention_of_projected_tokens() -> None:
    def project(role: str) -> nn.Module:
        return ConvProjection(8, 1 if role == "q" else 2, 1)

    site = Site(
        dim=8, num_heads=2, grid=(3, 5), key_grid=(2, 3), num_prefix_tokens=1, project=project
    )
    made = build("softmax", site).double().eval()
    stir(made)
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    parts = {}
    for i, role in enumerate("qkv"):
        weight, bias = made.qkv.weight[8 * i : 8 * i + 8], made.qkv.bias[8 * i : 8 * i + 8]
        parts[role] = made.project[role](x, (3, 5)) @ weight.T + bias
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        rows = (parts["q"][..., part] @ parts["k"][..., part].mT / 2).softmax(-1)
        heads.append(rows @ parts["v"][..., part])
    close(made(x), made.proj(torch.cat(heads, -1)))


def test_another_grid_reaches_the_projections() -> None:
    model = CvT("softmax", **SMALL).double().eval()
    stage = copy.deepcopy(model.stages[0])
    image = torch.randn(2, 3, 48, 32, dtype=torch.float64)
    assert stage(image).shape == (2, 8, 12, 8)
