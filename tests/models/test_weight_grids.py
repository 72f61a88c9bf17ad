# SPDX-License-Identifier: Apache-2.0
"""Grids of a checkpoint's positions: known by its image size, or square, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import resize_rel_pos_bias_table
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models import create_model, load_weights
from keymix.weights_file import packed
from mixer_cases import stir
from tolerances import close

SMALL: dict[str, dict[str, Any]] = {
    "vit_micro_p4_32": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "cvt_micro_32": {"embed_dims": (8, 12, 24), "depths": (1, 1, 1)},
    "cait_micro_p4_32": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "swin_micro_p2_32": {"embed_dim": 12, "depths": (2, 1, 1), "num_heads": (1, 1, 1)},
    "caformer_micro_32": {},
}
every_family = pytest.mark.parametrize("name", SMALL)
KEYS = {"ska": "key", "cska": "key_conv.weight", "kv": "pos_code"}


def made(name: str, size: Any, mixer: Any = "ska", **options: Any) -> nn.Module:
    if mixer == "kv":
        options["mixer_options"] = {"pos_dim": 6, **options.get("mixer_options", {})}
    model = create_model(name, mixer=mixer, img_size=size, **SMALL[name], **options).eval()
    stir(model)
    return model


def moved(model: nn.Module, size: Any) -> nn.Module:
    """The model itself, resampled by its own set_input_size."""
    for mixer in find_mixers(model).values():
        mixer.resize = "interpolate"
    model.set_input_size(img_size=size)
    return model


def same(mine: nn.Module, theirs: nn.Module) -> None:
    own = mine.state_dict()
    for name, tensor in theirs.state_dict().items():
        if tensor.is_floating_point():
            close(own[name], tensor)


def refused(model: nn.Module, source: Any, **options: Any) -> str:
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model, source, **options)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    return str(caught.value)


@pytest.mark.slow
@together
@pytest.mark.parametrize("mixer", KEYS)
@pytest.mark.parametrize(
    ("there", "here"), [((32, 64), (64, 32)), ((16, 64), (32, 32)), ((32, 64), 32)]
)
@pytest.mark.parametrize("name", [name for name in SMALL if "swin" not in name])
def test_with_the_image_size_known_positions_go_where_set_input_size_takes_them(
    name: str, there: Any, here: Any, mixer: str
) -> None:
    theirs, mine = made(name, there, mixer), made(name, here, mixer)
    state = {k: v.clone() for k, v in theirs.state_dict().items()}
    loaded = load_weights(mine, state, img_size=there)
    assert (loaded.missing, loaded.unused) == ((), ())
    assert {f"{path}.{KEYS[mixer]}" for path in find_mixers(mine)} <= set(loaded.resized)
    same(mine, moved(theirs, here))


def test_an_unrecorded_code_has_the_grid_of_position_embeddings() -> None:
    theirs, mine = (made("vit_micro_p4_32", size, "kv") for size in (32, 48))
    loaded = load_weights(mine, {k: v.clone() for k, v in theirs.state_dict().items()})
    assert len(loaded.resized) == 3
    same(mine, moved(theirs, 48))


@pytest.mark.slow
@together
@every_family
def test_on_its_own_grid_given_or_square_nothing_is_resampled(name: str) -> None:
    for size, given in (((32, 64), (32, 64)), (32, None), (32, 32)):
        theirs, mine = made(name, size), made(name, size)
        loaded = load_weights(mine, theirs.state_dict(), img_size=given)
        assert (loaded.missing, loaded.unused, loaded.resized) == ((), (), ())
        same(mine, theirs)


@pytest.mark.slow
@together
@every_family
def test_what_may_lie_in_several_ways_is_refused_without_the_image_size(name: str) -> None:
    theirs = made(name, (32, 64))
    for here in ((64, 32), (32, 64), 32):
        message = refused(made(name, here), theirs.state_dict())
        assert "may lie on more than one grid" in message
        assert "img_size=" in message
    if name != "swin_micro_p2_32":
        message = refused(made(name, 32), theirs.state_dict(), img_size=16)
        assert "images of 16x16 make" in message
        assert "images of another size: give that one, img_size=" in message


@pytest.mark.slow
def test_positions_alone_are_checked_alike() -> None:
    theirs, mine = (made("vit_micro_p4_32", s, "softmax") for s in ((16, 64), (64, 16)))
    assert refused(mine, theirs.state_dict()).startswith("the state dict: pos_embed holds 64")
    loaded = load_weights(mine, theirs.state_dict(), img_size=(16, 64))
    assert loaded.resized == ("pos_embed",)


def test_a_whole_map_goes_to_no_other_grid() -> None:
    theirs, mine = (made("vit_micro_p4_32", s, "random") for s in ((16, 64), (32, 32)))
    loaded = load_weights(mine, theirs.state_dict(), img_size=(16, 64))
    assert len(loaded.missing) == len(loaded.unused) == 2 * len(mine.blocks[0].attn.state_dict())


def test_a_runs_weights_record_their_image_size(tmp_path: Path) -> None:
    theirs, mine = made("vit_micro_p4_32", (16, 64)), made("vit_micro_p4_32", (64, 16))
    data = {"image_size": [16, 64], "classes": ["a"], "in_chans": 3, "task": "classification"}
    data |= {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0}
    content = packed(theirs.state_dict(), {"data": data})
    (tmp_path / "weights_last.safetensors").write_bytes(content)
    assert "pos_embed" in load_weights(mine, tmp_path).resized
    same(mine, moved(theirs, (64, 16)))


@pytest.mark.slow
def test_the_model_asked_about_is_left_alone() -> None:
    mine = made("swin_micro_p2_32", 32)
    before = [(m.site, m.resize) for m in find_mixers(mine).values()]
    load_weights(mine, made("swin_micro_p2_32", (32, 64)).state_dict(), img_size=(32, 64))
    assert [(m.site, m.resize) for m in find_mixers(mine).values()] == before
    assert mine.patch_embed.grid_size == (16, 16)


def tables(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if k.endswith("bias_table")}


def test_tables_of_relative_positions_are_resampled_as_timms() -> None:
    options: dict[str, Any] = {"depths": (2, 1), "num_heads": (2, 2), "embed_dim": 16}
    theirs = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, **options)
    stir(theirs)
    there = {"img_size": 64, "window_size": 8, **options}
    mine = create_model("swin_tiny_patch4_window7_224", mixer="softmax", **there)
    loaded = load_weights(mine, theirs.state_dict())
    assert (loaded.missing, loaded.unused) == ((), ())
    assert set(loaded.resized) == set(tables(mine))
    wanted = tables(theirs)
    for name, table in tables(mine).items():
        close(table, resize_rel_pos_bias_table(wanted[name], (8, 8), table.shape))


@pytest.mark.parametrize("mixer", ["softmax", "ska", "cska"])
def test_windows_of_another_size_keep_their_place_in_the_image(mixer: str) -> None:
    theirs = made("swin_micro_p2_32", 32, mixer)
    moved(theirs, 48)
    assert theirs.layers[0].blocks[0].window_size == (6, 6)
    mine = made("swin_micro_p2_32", 48, mixer, window_size=4)
    for size in (None, 48):
        loaded = load_weights(mine, theirs.state_dict(), img_size=size)
        assert (loaded.missing, loaded.unused) == ((), ())
        assert set(tables(mine)) <= set(loaded.resized)
    if mixer == "ska":
        pixel = {
            m: find_mixers(m)["layers.0.blocks.0.attn.mixer"].key.detach() for m in (mine, theirs)
        }
        maps = [
            k.reshape(n, n, -1, w, w, k.shape[-1]).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            for k, n, w in ((pixel[mine], 6, 4), (pixel[theirs], 4, 6))
        ]
        close(maps[0].flatten(1, 2), maps[1].flatten(1, 2))


def test_windows_that_are_not_square_follow_from_the_image_size() -> None:
    theirs, mine = (made("swin_micro_p2_32", 48, window_size=w) for w in ((6, 3), (3, 6)))
    assert "more than one window" in refused(mine, theirs.state_dict())
    message = refused(made("swin_micro_p2_32", 48), theirs.state_dict(), img_size=48)
    assert "images of 48x48 make windows of 4x4 here; build the model with window_size=" in message
    mine = made("swin_micro_p2_32", 48, window_size=(6, 3))
    assert load_weights(mine, theirs.state_dict(), img_size=48).missing == ()


@pytest.mark.parametrize("mixer", ["ska", "kv"])
@pytest.mark.parametrize("name", ["vit_micro_p4_32", "cvt_micro_32"])
def test_what_is_pooled_stays_where_it_was_trained(name: str, mixer: str) -> None:
    def pooled(size: int) -> nn.Module:
        return made(name, size, mixer, mixer_options={"resize": "pool_values"})

    theirs, key = pooled(32), KEYS[mixer]
    state = {k: v.clone() for k, v in theirs.state_dict().items()}
    for size in (32,) if (name, mixer) == ("cvt_micro_32", "kv") else (None, 32):
        message = refused(pooled(64), state, img_size=size)
        assert "pool_values" in message
        assert "set_input_size" in message
    mine = pooled(32)
    assert load_weights(mine, state).resized == ()
    theirs.set_input_size(64)
    mine, built = pooled(32), pooled(64)
    for size in (None, 64):
        loaded = load_weights(mine, theirs.state_dict(), img_size=size)
        assert not any(key in path for path in loaded.resized)
        ends = [getattr(find_mixers(m).popitem()[1], key) for m in (mine, theirs)]
        close(*ends)
        assert "pool_values" in refused(built, theirs.state_dict(), img_size=size)
    with pytest.raises(RuntimeError, match=f"size mismatch for .*{key}"):
        built.load_state_dict(theirs.state_dict())
