# SPDX-License-Identifier: Apache-2.0
"""Swin with any mixer: a stage's, a block's, windows with keys of their own, other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from timm.layers import DropPath

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers.registry import create_mixer, list_mixers
from keymix.models import create_model, load_weights
from mixer_cases import stir
from tolerances import close

SMALL: dict[str, Any] = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "merging": (2,)}


def micro(**options: Any) -> Any:
    return create_model("swin_micro_p2_32", **{**SMALL, **options})


def image(height: int, width: int, seed: int = 1) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, height, width, generator=noise)


def blocks(model: Any) -> list[Any]:
    return [block for stage in model.layers for block in stage.blocks]


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_every_mixer_sits_or_is_refused_under_the_shift(mixer: str) -> None:
    fits = create_mixer(mixer, dim=12, num_heads=2, grid=(4, 4)).claims.maskable
    if not fits:
        with pytest.raises(UserError, match=rf"{mixer}.*windows are shifted"):
            micro(mixer=mixer)
    model = micro(mixer=mixer, shifted=fits, img_size=(32, 16))
    assert [any(b.shift_size) for b in blocks(model)] == [False, fits] * 2
    found = find_mixers(model)
    assert list(found) == [f"layers.{s}.blocks.{i}.attn.mixer" for s in (0, 1) for i in (0, 1)]
    assert [m.site.window_grid for m in found.values()] == [(4, 2)] * 2 + [(2, 1)] * 2
    y = model(image(32, 16))
    y.square().sum().backward()
    assert [k for k, p in model.named_parameters() if p.grad is None] == []


def test_one_mixer_a_stage_or_a_block() -> None:
    staged = micro(mixer=["ska", "softmax"], mixer_options=[{"activation": "relu"}, {}])
    names = [m.mixer_name for m in find_mixers(staged).values()]
    assert names == ["static_key", "static_key", "softmax", "softmax"]
    assert find_mixers(staged)["layers.0.blocks.1.attn.mixer"].activation == "relu"
    each = micro(mixer=["re_attention", "kv", "random", "cska"])
    names = [m.mixer_name for m in find_mixers(each).values()]
    assert names == ["re_attention", "key_value", "random", "conv_static_key"]


def test_the_backbone_is_the_same_at_a_seed_whatever_the_mixer() -> None:
    states = []
    for mixer in ("softmax", "ska", "identity"):
        torch.manual_seed(5)
        state = micro(mixer=mixer).state_dict()
        states.append({k: v for k, v in state.items() if ".attn." not in k})
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[k], v) for k, v in states[0].items())


def test_weights_start_as_timms() -> None:
    model = create_model("swin_micro_p2_32", mixer="ska")
    drawn = [linear.weight for m in find_mixers(model).values() for linear in m.projections]
    drawn += [stage.downsample.reduction.weight for stage in model.layers[1:]]
    drawn += [b.attn.relative_position_bias_table for b in blocks(model)]
    assert all(float(w.detach().std()) == pytest.approx(0.02, rel=0.4) for w in drawn)
    assert float(torch.cat([w.detach().flatten() for w in drawn]).std()) == pytest.approx(
        0.02, rel=0.02
    )


def test_the_shift_acts_where_one_window_covers_the_image_too() -> None:
    """As in the paper's network: half of the published shifts are there."""
    model = micro(img_size=8).double().eval()
    assert [b.input_resolution for b in blocks(model)] == [(4, 4)] * 2 + [(2, 2)] * 2
    assert [b.shift_size for b in blocks(model)] == [(0, 0), (2, 2)] * 2
    stir(model)
    y = model(image(8, 8).double())
    for block in blocks(model):
        block.shift_size = (0, 0)
        block.init_non_persistent_buffers()
    assert (model(image(8, 8).double()) - y).abs().max() > 1e-3


@pytest.mark.slow
@together
@pytest.mark.parametrize("size", [(32, 32), (64, 64), (48, 32), (40, 56), (36, 28)])
@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key", "softmax"])
def test_windows_grow_with_the_image_and_keys_with_them(mixer: str, size: Any) -> None:
    options = {"resize": "interpolate"} if "key" in mixer else {}
    model = micro(mixer=mixer, mixer_options=options).eval()
    before = model(image(32, 32))
    model.set_input_size(size)
    window = (4 * (size[0] // 2) // 16, 4 * (size[1] // 2) // 16)
    assert {m.site.grid for m in find_mixers(model).values()} == {window}
    y = model(image(*size))
    assert y.shape == (2, 10)
    if size == (32, 32):
        assert torch.equal(y, before)


@pytest.mark.parametrize("resize", ["interpolate", "pool_values", None])
def test_shared_keys_serve_any_number_of_windows(resize: str | None) -> None:
    model = micro(mixer="ska", mixer_options={"resize": resize}, shared_keys=True).eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.set_input_size((48, 64), window_size=4)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert model(image(48, 64)).shape == (2, 10)
    again = micro(mixer="ska", img_size=(48, 64), shared_keys=True).eval()
    again.load_state_dict(state)
    close(again(image(48, 64)), model(image(48, 64)))
    for side in (16, 48):  # through one window
        model.set_input_size(side, window_size=4)
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("resize", ["interpolate", "pool_values", None])
def test_a_mixer_that_holds_nothing_a_position_takes_any_windows(resize: str | None) -> None:
    """Its policy has nothing to act on: the same as in a model built for the windows."""
    model = micro(mixer="kv", mixer_options={"resize": resize}).eval()
    model.set_input_size((48, 64))
    assert {m.site.grid for m in find_mixers(model).values()} == {(6, 8)}
    built = micro(mixer="kv", img_size=(48, 64), window_size=(6, 8)).eval()
    built.load_state_dict(model.state_dict(), strict=True)
    close(built(image(48, 64)), model(image(48, 64)))
    model.set_input_size((64, 32), window_size=4)
    assert model(image(64, 32)).shape == (2, 10)


def test_keys_of_windows_are_resampled_as_one_map() -> None:
    options = {"resize": "interpolate"}
    model = micro(mixer="ska", mixer_options=options).eval()
    model.set_input_size((48, 64), window_size=4)
    shapes = [b.attn.mixer.key.shape[0] for b in blocks(model)]
    assert shapes == [6 * 8] * 2 + [3 * 4] * 2
    assert model(image(48, 64)).shape == (2, 10)


@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key"])
def test_the_one_window_of_a_stage_has_its_own_keys_among_more(mixer: str) -> None:
    """As in stages three and four of the paper's network: one window here, four at twice the side.

    There and back, and through a checkpoint, it is the same as in a model built for the size.
    """
    options = {"mixer": mixer, "mixer_options": {"resize": "interpolate"}}
    model = micro(img_size=16, **options).double().eval()
    stir(model)
    small = {k: v.clone() for k, v in model.state_dict().items()}
    assert [b.attn.window_grid for b in blocks(model)] == [(2, 2)] * 2 + [(1, 1)] * 2
    model.set_input_size(32, window_size=4)
    built = micro(img_size=32, **options).double().eval()
    assert [m.site for m in find_mixers(model).values()] == [
        m.site for m in find_mixers(built).values()
    ]
    loaded = micro(img_size=32, **options).double().eval()
    report = load_weights(loaded, small)
    assert (report.missing, report.unused) == ((), ())
    built.load_state_dict(model.state_dict(), strict=True)
    x = image(32, 32).double()
    close(built(x), model(x))
    close(loaded(x), model(x))
    model.set_input_size(16, window_size=4)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in small.items()
    }
    back = micro(img_size=16, **options).double().eval()
    report = load_weights(back, loaded.state_dict())
    assert (report.missing, report.unused) == ((), ())
    x = image(16, 16).double()
    close(back(x), model(x))


def test_the_keys_of_one_window_serve_no_others_as_they_are() -> None:
    model = micro(mixer="ska", img_size=8, dynamic_img_size=True).eval()
    assert model(image(8, 8)).shape == (2, 10)
    with pytest.raises(UserError, match=r"static_key.*windows"):
        model(image(16, 16))


@pytest.mark.parametrize(
    ("mixer", "options", "model_options", "size", "says"),
    [
        ("ska", {}, {}, {"img_size": 64}, r"of 4x4 tokens.*of 8x8 tokens.*'interpolate'"),
        ("ska", {}, {}, {"img_size": 64, "window_size": 4}, "resize='interpolate'"),
        (
            "ska",
            {"resize": "pool_values"},
            {},
            {"img_size": 64, "window_size": 4},
            r"16 windows \(4x4 of them\) of 4x4.*64 windows \(8x8 of them\) of 4x4.*"
            "each window has keys of its own.*shared_keys=True",
        ),
        (
            "ska",
            {"resize": "pool_values"},
            {"shared_keys": True},
            {"img_size": 64},
            r"relative positions.*window_size=\(4, 4\)",
        ),
        ("random", {}, {"shifted": False}, {"img_size": 64}, "random"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_whole(
    mixer: str, options: Any, model_options: Any, size: dict[str, Any], says: str
) -> None:
    model = micro(mixer=mixer, mixer_options=options, **model_options).eval()
    x = image(32, 32)
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError, match=rf"layers\.0\.blocks\.0\.attn\.mixer.*{says}"):
        model.set_input_size(**size)
    assert torch.equal(model(x), before)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_any_image_can_be_taken_as_it_comes() -> None:
    model = micro(mixer="kv", dynamic_img_size=True).eval()
    assert model(image(48, 40)).shape == (2, 10)
    fixed = micro(mixer="kv").eval()
    fixed.load_state_dict(model.state_dict())
    close(model(image(32, 32)), fixed(image(32, 32)))
    fixed.set_input_size((48, 40), window_size=4)
    close(model(image(48, 40)), fixed(image(48, 40)))


def test_grids_that_do_not_divide_are_padded_as_in_timm() -> None:
    model = micro(img_size=(36, 28), merging=(3,)).eval()
    assert [stage.output_resolution for stage in model.layers] == [(18, 14), (6, 5)]
    final, between = model.forward_intermediates(image(36, 28))
    assert [tuple(f.shape) for f in between] == [(2, 12, 18, 14), (2, 24, 6, 5)]
    assert [info["reduction"] for info in model.feature_info] == [2, 6]
    assert final.shape == (2, 6, 5, 24)


def test_given_windows_are_what_later_sizes_grow_from() -> None:
    model = micro()
    model.set_input_size(64, window_size=4)
    assert {m.site.grid for m in find_mixers(model).values()} == {(4, 4)}
    model.set_input_size(128)
    assert {m.site.grid for m in find_mixers(model).values()} == {(8, 8)}
    model.set_input_size(32, window_ratio=8)
    assert {m.site.grid for m in find_mixers(model).values()} == {(2, 2)}
    assert model(image(32, 32)).shape == (2, 10)


def test_no_path_is_dropped_unless_it_is_asked_for() -> None:
    assert not [m for m in micro().modules() if isinstance(m, DropPath)]
    assert [m for m in micro(drop_path_rate=0.1).modules() if isinstance(m, DropPath)]


def test_features_are_those_of_all_stages() -> None:
    names = {"swin_micro_p2_32": SMALL, "swin_tiny_p2_32": {"embed_dim": 12, "num_heads": (1,) * 4}}
    for name, small in names.items():
        model = timm.create_model(name, features_only=True, **small)
        shapes = [tuple(f.shape[1:]) for f in model(image(32, 32))]
        assert shapes == [(12, 16, 16), (24, 8, 8), (48, 4, 4), (96, 4, 4)][: len(shapes)]
        assert len(shapes) == len(model.feature_info) == (2 if "micro" in name else 4)


def test_another_patch_size_keeps_the_reductions_true() -> None:
    model = micro().eval()
    model.set_input_size(patch_size=4, window_size=4)
    assert [info["reduction"] for info in model.feature_info] == [4, 8]
    assert [f.shape[-1] for f in model.forward_intermediates(image(32, 32))[1]] == [8, 4]
