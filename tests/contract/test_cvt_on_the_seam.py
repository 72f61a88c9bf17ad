# SPDX-License-Identifier: Apache-2.0
"""CvT on the seam: convolutions make queries, keys and values, and keys lie on a coarser grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import each, together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.layers.cvt_stage import ConvProjection, RoleProjections
from keymix.mixers.base import Site
from keymix.mixers.head_mixer import HeadMixer
from keymix.mixers.registry import build, list_mixers
from keymix.models import create_model
from mixer_cases import DEVICE, DTYPE, close, gradients, numbers, refused, stir
from tolerances import differs

SMALL: dict[str, Any] = {
    "embed_dims": (8, 12, 24),
    "num_heads": (1, 3, 6),
    "depths": (1, 1, 2),
    "img_size": 48,  # keys on 6x6, 3x3 and 2x2, so that no softmax runs over one key alone
}


def small(mixer: str, **options: Any) -> nn.Module:
    model = create_model("cvt_13_32", mixer=mixer, **{**SMALL, **options}).to(DEVICE, DTYPE)
    stir(model)
    return model


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
@pytest.mark.parametrize("kv_stride", [1, 2])
def test_every_mixer_trains_in_cvt(mixer: str, kv_stride: int) -> None:
    model = small(mixer, kv_stride=kv_stride)
    found = find_mixers(model)
    image_is_seen = found["stages.2.blocks.0.attn.mixer"].claims.mixes_prefix
    y, grads = gradients(model, numbers(2, 3, 48, 48))
    assert torch.isfinite(y).all()
    path, first = next(iter(found.items()))
    # the same number on every logit of a query, or of a slot, whose softmax is over the tokens
    shifts_all = "project.q.bn.bias" if mixer == "external" else "project.k.bn.bias"
    for key, grad in grads.items():
        name = key.removeprefix(f"{path}.")
        if name != key and name not in (*first.zero_gradients, shifts_all):
            reached = not grad.isnan().any() and differs(grad, torch.zeros_like(grad))
            assert reached == image_is_seen, key


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_a_mixer_gets_the_projections_that_it_can_use(mixer: str) -> None:
    for made in find_mixers(small(mixer)).values():
        site = made.site
        if not isinstance(made, HeadMixer):
            assert (site.project, site.key_grid) == (None, None)
        elif mixer not in ("key_value", "xca", "agent"):
            assert site.key_grid == tuple(-(-side // 2) for side in site.grid)
            assert {r: p.conv.stride for r, p in made.project.items()} == {
                r: (1, 1) if r == "q" else (2, 2) for r in made.roles
            }
        else:
            assert site.key_grid in (None, site.grid)
            assert all(p.conv.stride == (1, 1) for p in made.project.values())


@each(
    "mixer, options, whole",
    {
        "agent without": ("agent", {"dwc": False}, False),
        "nystrom with": ("nystrom", {"conv_size": 3}, True),
    },
)
def test_a_convolution_of_values_gets_as_many_as_tokens(
    mixer: str, options: dict[str, Any], whole: bool
) -> None:
    site = find_mixers(small(mixer, mixer_options=options))["stages.0.blocks.0.attn.mixer"].site
    assert (site.key_grid in (None, site.grid)) == whole


def test_a_mask_of_the_diagonal_gets_as_many_keys_as_tokens() -> None:
    model = small("softmax", mixer_options={"mask_diagonal": True})
    made = find_mixers(model)["stages.2.blocks.1.attn.mixer"]
    x = numbers(1, 10, 24)
    assert (made.attention_map(x).diagonal(dim1=-2, dim2=-1) == 0).all()


def test_key_value_is_refused_where_keys_lie_elsewhere() -> None:
    site = Site(dim=8, grid=(4, 4), key_grid=(2, 2), project=RoleProjections(8, 2, 0))
    with pytest.raises(UserError, match=r"\(2, 2\).*\(4, 4\).*stride 1"):
        build("key_value", site)


def test_keys_on_another_grid_need_projections() -> None:
    for mixer in ("softmax", "static_key", "re_attention"):
        with pytest.raises(UserError, match="project="):
            build(mixer, Site(dim=8, grid=(4, 4), key_grid=(2, 2)))


@together
@pytest.mark.parametrize("mixer", ["softmax", "static_key", "conv_static_key", "re_attention"])
@pytest.mark.parametrize("prefix", [0, 1])
def test_strided_maps_have_a_column_a_key(mixer: str, prefix: int) -> None:
    site = Site(
        dim=8,
        num_heads=2,
        grid=(3, 5),
        key_grid=(2, 3),
        num_prefix_tokens=prefix,
        project=RoleProjections(8, 2, prefix),
    )
    made = build(mixer, site).to(DEVICE, DTYPE).eval()
    stir(made)
    x = numbers(2, prefix + 15, 8)
    maps = made.attention_map(x, stage="final")
    assert maps.shape == (2, 2, prefix + 15, prefix + 6)
    v = made.inputs(x, (3, 5))["v"]
    close(made.proj((maps @ v).transpose(1, 2).flatten(-2)), made(x))
    with refused("mask_diagonal"):
        build(mixer, site, {"mask_diagonal": True})


def test_convolved_tokens_are_the_queries_without_a_projection() -> None:
    project = RoleProjections(8, 2, 1)
    site = Site(
        dim=8, num_heads=2, grid=(3, 5), key_grid=(2, 3), num_prefix_tokens=1, project=project
    )
    made = build("static_key", site, {"query_proj": False}).to(DEVICE, DTYPE).eval()
    stir(made)
    x = numbers(2, 16, 8)
    q = made.project["q"](x, (3, 5)).unflatten(-1, (2, 4)).transpose(1, 2)
    close(made.attention_map(x), (q @ made.key.mT / 2).softmax(-1))


def test_projected_softmax_is_attention_of_projected_tokens() -> None:
    site = Site(
        dim=8,
        num_heads=2,
        grid=(3, 5),
        key_grid=(2, 3),
        num_prefix_tokens=1,
        project=RoleProjections(8, 2, 1),
    )
    made = build("softmax", site).to(DEVICE, DTYPE).eval()
    stir(made)
    x = numbers(2, 16, 8)
    parts = {}
    for i, role in enumerate("qkv"):
        weight, bias = made.qkv.weight[8 * i : 8 * i + 8], made.qkv.bias[8 * i : 8 * i + 8]
        parts[role] = made.project[role](x, (3, 5)) @ weight.T + bias
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        rows = (parts["q"][..., part] @ parts["k"][..., part].mT / 2).softmax(-1)
        heads.append(rows @ parts["v"][..., part])
    close(made(x), made.proj(torch.cat(heads, -1)))


def test_a_projection_is_a_depthwise_convolution_of_the_patches() -> None:
    made = ConvProjection(8, stride=2, num_prefix_tokens=1).to(DEVICE, DTYPE).eval()
    stir(made)
    x = numbers(2, 16, 8)
    image = x[:, 1:].mT.reshape(2, 8, 3, 5)
    wanted: Tensor = made.bn(made.conv(image)).flatten(2).mT
    out = made(x, (3, 5))
    assert torch.equal(out[:, :1], x[:, :1])
    close(out[:, 1:], wanted)
    assert made.conv.groups == 8
    assert made.conv.bias is None


def test_another_grid_reaches_the_projections() -> None:
    stage = small("softmax", img_size=32).eval().stages[0]
    tokens, grid = stage(numbers(2, 3, 48, 32))
    assert (tokens.shape, grid) == ((2, 96, 8), (12, 8))
