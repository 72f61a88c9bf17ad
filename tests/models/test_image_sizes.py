# SPDX-License-Identifier: Apache-2.0
"""One rule for the image sizes of all families, and a refusal leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.models.metaformer import MetaFormer
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers, put_mixers
from keymix.models import create_model, set_image_size

FAMILIES: dict[str, dict[str, Any]] = {
    "vit_micro_p4_32": {"embed_dim": 8, "depth": 1, "num_heads": 2},
    "deepvit_micro_p4_32": {"embed_dim": 8, "depth": 1, "num_heads": 2},
    "cait_micro_p4_32": {"embed_dim": 8, "depth": 1, "num_heads": 2},
    "swin_micro_p2_32": {"embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "merging": (2,)},
    "cvt_micro_32": {"embed_dims": (8, 8, 8), "depths": (1, 1, 1), "num_heads": (1, 1, 1)},
    "caformer_micro_32": {"dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1), "head_dim": 8},
}
PATCHED = [name for name in FAMILIES if "_p" in name]
VIT = {"img_size": 32, "depth": 1, "embed_dim": 8, "num_heads": 2, "num_classes": 3}


@together
@pytest.mark.parametrize("name", FAMILIES)
def test_no_size_is_refused_by_every_family_alike(name: str, shapes_checked: bool) -> None:
    if shapes_checked and name in ("cvt_micro_32", "caformer_micro_32"):
        pytest.skip("the shape checks refuse another kind of value first")
    model = create_model(name, **FAMILIES[name])
    for value in (0, -4, "48", 48.5, float("nan"), (3, 32, 32), (32, 0)):
        with pytest.raises(UserError, match=r"^img_size=.* must be a side, or \(height, width\)"):
            model.set_input_size(value)


@pytest.mark.parametrize("name", PATCHED)
def test_a_size_that_patches_do_not_fill_is_refused_with_the_nearest(name: str) -> None:
    model = create_model(name, **FAMILIES[name])
    patch = model.patch_embed.patch_size[0]
    nearest = f"images of 33x33: .*patches of {patch}x{patch}.*take 32 or {32 + patch}"
    for take in (
        lambda: create_model(name, **FAMILIES[name], img_size=33),
        lambda: timm.create_model(name, **FAMILIES[name], img_size=33),
        lambda: model.set_input_size(33),
        lambda: set_image_size(model, (33, 33)),
    ):
        with pytest.raises(UserError, match=nearest):
            take()
    assert model.patch_embed.img_size == (32, 32)
    with pytest.raises(UserError, match=f"images of 1x1: .*take {patch}$"):
        create_model(name, **FAMILIES[name], img_size=1)
    with pytest.raises(UserError, match=r"patches of 5x5.*which 32.*take 30 or 35"):
        model.set_input_size(patch_size=5)
    with pytest.raises(UserError, match=r"^patch_size="):
        model.set_input_size(patch_size=0)


def test_timms_models_are_refused_so_where_they_host_mixers() -> None:
    with pytest.raises(UserError, match="take 32 or 48"):
        create_model("vit_tiny_patch16_224", mixer="softmax", **{**VIT, "img_size": 33})
    assert create_model("vit_tiny_patch16_224", **{**VIT, "img_size": 33}).num_classes == 3
    published = {**VIT, "img_size": 384, "global_pool": "avg"}  # 384 is not 27 x 14
    create_model("vit_so400m_patch14_siglip_gap_384", mixer="softmax", **published)


def test_images_that_are_padded_are_taken() -> None:
    options = {**FAMILIES["vit_micro_p4_32"], "dynamic_img_size": True, "dynamic_img_pad": True}
    model = create_model("vit_micro_p4_32", mixer="sep_conv", img_size=33, **options)
    assert model(torch.randn(1, 3, 33, 35)).shape == (1, 10)


def state_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[Any]]:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    mixers = find_mixers(model).values()
    return state, [(m.site, getattr(m, "resize", None)) for m in mixers]


@pytest.mark.parametrize(
    ("name", "mixer", "options"),
    [
        ("vit_tiny_patch16_224", ["static_key", "random"], {**VIT, "depth": 2}),
        (
            "swin_tiny_patch4_window7_224",
            ["static_key", "softmax", "static_key"],
            {"img_size": 56, "depths": (2, 1), "embed_dim": 8, "num_heads": (1, 2)},
        ),
        ("timm's MetaFormer", ["static_key", "random"], {}),
        ("vit_micro_p4_32", ["static_key", "random"], {**VIT, "depth": 2}),
    ],
)
def test_a_refused_size_changes_no_weight_no_grid_and_no_policy(
    name: str, mixer: list[str], options: dict[str, Any]
) -> None:
    if options:
        model = create_model(name, mixer=mixer, **options)
    else:
        model = MetaFormer(depths=(1, 1), dims=(8, 8), num_classes=3)
        model.pretrained_cfg = {"input_size": (3, 32, 32), "fixed_input_size": False}
        put_mixers(model, mixer)
    (state, sites), size = state_of(model), (96, 128) if "swin" not in name else (112, 56)
    for resize in (None, "pool_values", "interpolate"):
        if resize == "interpolate" and "random" not in mixer:
            continue
        with pytest.raises(UserError):
            set_image_size(model, size, resize=resize)
        after, now = state_of(model)
        assert now == sites
        assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in state.items()}
        assert all(torch.equal(after[k], v) for k, v in state.items())
