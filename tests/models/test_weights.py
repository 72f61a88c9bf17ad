# SPDX-License-Identifier: Apache-2.0
"""Weights of timm's models into models with mixers: all that stays the same, listed by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models.metaformer import (
    Attention,
    LayerNorm2dNoBias,
    LayerNormNoBias,
    MetaFormer,
    SepConv,
)
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models import create_model, load_weights
from mixer_cases import stir
from tolerances import close

SMALL: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64), "num_classes": 5}
every_placement = pytest.mark.parametrize(
    "placement",
    [
        ("sep_conv", "static_key", "softmax", "softmax"),
        ("sep_conv", "conv_static_key", "softmax", "softmax"),
        ("softmax", "sep_conv", "identity", "static_key"),
    ],
    ids="/".join,
)


def caformer() -> MetaFormer:
    """timm's CAFormer, small, with random weights."""
    norms = [LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2
    mixers = [SepConv, SepConv, Attention, Attention]
    model = MetaFormer(token_mixers=mixers, norm_layers=norms, head_dim=8, **SMALL)
    stir(model)
    return model.double().eval()


def mixed(**options: Any) -> nn.Module:
    options = {"img_size": 64, "head_dim": 8, **SMALL, **options}
    return create_model("skaformer_s18", **options).double().eval()


def images(side: int = 64) -> Tensor:
    noise = torch.Generator().manual_seed(2)
    return torch.randn(2, 3, side, side, generator=noise, dtype=torch.float64)


def seen(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What went into and came out of every block, as images."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def look(path: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            found[path] = (args[0], out)

        module.register_forward_hook(hook)

    for s, stage in enumerate(model.stages):
        for i, block in enumerate(stage.blocks):
            look(f"stages.{s}.blocks.{i}", block)
    model(x)
    return found


def test_with_its_own_mixers_it_is_timms_caformer() -> None:
    theirs, mine = caformer(), mixed(mixer=["sep_conv", "sep_conv", "softmax", "softmax"])
    loaded = load_weights(mine, theirs.state_dict())
    assert (loaded.missing, loaded.unused, loaded.resized) == ((), (), ())
    assert set(loaded.copied) == set(mine.state_dict())
    close(mine(images()), theirs(images()))


@every_placement
def test_every_block_that_stays_computes_the_same(placement: tuple[str, ...]) -> None:
    theirs, mine = caformer(), mixed(mixer=placement)
    before = {k: v.clone() for k, v in mine.state_dict().items()}
    loaded = load_weights(mine, theirs.state_dict())
    old = ("sep_conv", "sep_conv", "softmax", "softmax")
    changed = [s for s in range(4) if placement[s] != old[s]]
    wanted = seen(theirs, images())
    for s, stage in enumerate(mine.stages):
        for i, block in enumerate(stage.blocks):
            x, y = wanted[f"stages.{s}.blocks.{i}"]
            if x.ndim == 3:  # timm's tokens; ours are images between blocks
                side = round(x.shape[1] ** 0.5)
                x, y = (t.mT.reshape(2, -1, side, side) for t in (x, y))
            if s not in changed:
                close(block(x), y)
    mixers = find_mixers(mine)
    lost = {f"{p}.{n}" for p, m in mixers.items() if int(p[7]) in changed for n in m.state_dict()}
    assert set(loaded.missing) == lost
    assert all(torch.equal(mine.state_dict()[name], before[name]) for name in lost)
    assert {int(name[7]) for name in loaded.unused} == set(changed)
    assert all(".token_mixer." in name for name in loaded.unused)


def test_a_class_less_is_reported_and_the_rest_is_loaded() -> None:
    theirs, mine = caformer(), mixed(num_classes=3, mixer=["sep_conv"] * 2 + ["softmax"] * 2)
    loaded = load_weights(mine, theirs.state_dict())
    assert loaded.missing == loaded.unused == ("head.fc.fc2.weight", "head.fc.fc2.bias")
    close(mine.forward_features(images()), theirs.forward_features(images()))


def test_a_vit_takes_timms_weights_at_another_image_size() -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64).eval()
    stir(theirs)
    same = create_model("vit_tiny_patch16_224", depth=2, img_size=64, mixer="softmax").eval()
    loaded = load_weights(same, theirs.state_dict())
    assert (loaded.missing, loaded.unused, loaded.resized) == ((), (), ())
    close(same(images().float()), theirs(images().float()))
    other = create_model("vit_tiny_patch16_224", depth=2, img_size=(48, 96), mixer="softmax")
    loaded = load_weights(other, theirs.state_dict())
    assert (loaded.missing, loaded.unused, loaded.resized) == ((), (), ("pos_embed",))
    close(other.pos_embed, resample_abs_pos_embed(theirs.pos_embed, [3, 6]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cait_xxs24_224", {"depth": 2, "img_size": 32}),
        (
            "swin_tiny_patch4_window7_224",
            {"depths": (2, 1), "num_heads": (2, 2), "embed_dim": 16, "img_size": 56},
        ),
    ],
)
def test_other_hosts_take_timms_weights(name: str, options: dict[str, Any]) -> None:
    theirs = timm.create_model(name, **options).double().eval()
    stir(theirs)
    mine = create_model(name, mixer="softmax", **options).double().eval()
    loaded = load_weights(mine, theirs.state_dict())
    assert (loaded.missing, loaded.unused, loaded.resized) == ((), (), ())
    x = images(options["img_size"])
    close(mine(x), theirs(x))


def test_a_mixer_is_taken_whole_or_not_at_all() -> None:
    options: dict[str, Any] = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    theirs = timm.create_model("vit_tiny_patch16_224", **options)
    for other in ("static_key", "key_value"):
        mine = create_model("vit_tiny_patch16_224", mixer=[other, "softmax"], **options)
        loaded = load_weights(mine, theirs.state_dict())
        names = {f"blocks.0.attn.mixer.{name}" for name in mine.blocks[0].attn.mixer.state_dict()}
        assert set(loaded.missing) == names
        left = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
        assert loaded.unused == tuple(f"blocks.0.attn.{name}" for name in left)
    half = {k: v for k, v in theirs.state_dict().items() if "blocks.0.attn.qkv" not in k}
    mine = create_model("vit_tiny_patch16_224", mixer="softmax", **options)
    loaded = load_weights(mine, half)
    assert loaded.unused == ("blocks.0.attn.proj.weight", "blocks.0.attn.proj.bias")
    assert len(loaded.missing) == 4
    grown = create_model("vit_tiny_patch16_224", mixer="re_attention", **options)
    loaded = load_weights(grown, theirs.state_dict())
    assert loaded.unused == ()
    assert {name.rpartition("mixer.")[2].partition(".")[0] for name in loaded.missing} == {
        "theta",
        "theta_bias",
        "norm",
    }


@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key"])
@pytest.mark.parametrize("size", [48, (32, 64)])
def test_learned_keys_are_resampled_to_the_models_grid(mixer: str, size: Any) -> None:
    options: dict[str, Any] = {"mixer": mixer, "embed_dims": (8, 12, 24), "depths": (1, 1, 1)}
    theirs = create_model("cvt_13_32", img_size=64, **options)
    stir(theirs)
    mine = create_model("cvt_13_32", img_size=size, **options)
    loaded = load_weights(mine, theirs.state_dict())
    assert (loaded.missing, loaded.unused) == ((), ())
    assert loaded.resized
    for path, made in find_mixers(mine).items():
        source = find_mixers(theirs)[path]
        wanted = made.adapt_state(source.state_dict(), source.site.grid)
        for name, tensor in made.state_dict().items():
            assert torch.equal(tensor, wanted[name])


def test_keys_of_windows_are_resampled_as_one_map() -> None:
    options: dict[str, Any] = {"embed_dim": 12, "depths": (1, 1, 1), "num_heads": (1, 1, 1)}
    theirs = create_model("ska_swin_tiny_p2_32", merging=(2, 1), **options)
    mine = create_model("ska_swin_tiny_p2_32", merging=(2, 1), img_size=64, **options)
    loaded = load_weights(mine, theirs.state_dict())
    assert loaded.missing == ()
    path = "layers.0.blocks.0.attn.mixer"
    assert f"{path}.key" in loaded.resized
    made, source = (find_mixers(model)[path] for model in (mine, theirs))
    there = {"grid": source.site.grid, "window_grid": source.site.window_grid}
    assert torch.equal(made.key, made.adapt_state(source.state_dict(), **there)["key"])


def test_layers_of_which_a_norm_is_left_over_are_of_another_kind() -> None:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 12, "depths": (1, 1, 1)}
    sizes |= {"num_heads": (1, 1, 1), "window_size": 4}
    theirs = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
    mine = create_model("swin_micro_p2_32", **sizes)
    loaded = load_weights(mine, theirs.state_dict())
    normed = {"patch_embed.proj.weight", "layers.1.downsample.reduction.weight"}
    assert normed <= set(loaded.missing)
    assert normed <= set(loaded.unused)
    assert {"layers.0.blocks.0.mlp.fc1.weight", "layers.0.blocks.0.norm1.bias"} <= set(
        loaded.copied
    )


@pytest.mark.parametrize("kind", ["safetensors", "pth", "nested", "compiled", "ema"])
def test_files_of_every_kind(kind: str, tmp_path: Path) -> None:
    theirs, mine = caformer(), mixed(mixer=["sep_conv", "sep_conv", "softmax", "softmax"])
    state = dict(theirs.state_dict())
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pth")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "ema":
        off = {k: v + 1 for k, v in state.items()}
        torch.save({"state_dict": off, "state_dict_ema": state, "epoch": 3}, path)
    else:
        prefix = "_orig_mod." if kind == "compiled" else ""
        state = {f"{prefix}{k}": v for k, v in state.items()}
        torch.save({"state_dict": state, "epoch": 3} if kind == "nested" else state, path)
    assert load_weights(mine, path).missing == ()
    close(mine(images()), theirs(images()))


def damaged(tmp_path: Path, kind: str) -> Any:
    state = dict(caformer().state_dict())
    whole = tmp_path / f"whole.{kind}"
    if kind == "safetensors":
        save_file(state, whole)
    else:
        torch.save(state, whole)
    short = tmp_path / f"short.{kind}"
    short.write_bytes(whole.read_bytes()[:2000])
    return short


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_truncated_files_are_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    model = mixed()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError, match=rf"short\.{kind}.*damaged") as caught:
        load_weights(model, damaged(tmp_path, kind))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_weights_of_another_model_or_size_are_refused() -> None:
    model = mixed()
    foreign = timm.create_model("resnet10t").state_dict()
    with pytest.raises(UserError, match=r"none of its \d+ tensors fits MixerMetaFormer.*'conv1"):
        load_weights(model, foreign)
    wider = mixed(dims=(16, 16, 32, 64)).state_dict()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError, match=r"stem\.conv\.weight is \[16, 3, 7, 7\].*\[8, 3, 7, 7\]"):
        load_weights(model, wider)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with torch.device("meta"):
        empty = mixed()
    with pytest.raises(UserError, match="meta device"):
        load_weights(empty, model.state_dict())


def test_a_model_without_mixers_takes_weights_as_they_are_named() -> None:
    theirs, mine = timm.create_model("resnet10t").eval(), timm.create_model("resnet10t").eval()
    stir(theirs)
    assert load_weights(mine, theirs.state_dict()).missing == ()
    close(mine(images().float()), theirs(images().float()))


@pytest.mark.parametrize("name", ["skaformer_s18", "cvt_micro_32"])
def test_what_has_no_weights_of_its_own_says_where_weights_come_from(name: str) -> None:
    with pytest.raises(UserError, match=rf"{name}.*load_weights"):
        create_model(name, pretrained=True)


def test_timms_own_way_to_name_a_file_stays_open(tmp_path: Path) -> None:
    theirs = mixed()
    save_file(theirs.state_dict(), tmp_path / "own.safetensors")
    overlay = {"file": str(tmp_path / "own.safetensors"), "num_classes": 5}
    mine = mixed(pretrained=True, pretrained_cfg_overlay=overlay)
    close(mine(images()), theirs(images()))
