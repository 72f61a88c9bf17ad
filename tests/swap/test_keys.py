# SPDX-License-Identifier: Apache-2.0
"""Learned keys estimated from a model's own: against NumPy, against each other, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import MODELS, answer, images, ready, tiny
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.hosts.layers import find_layers
from keymix.models import create_model
from keymix.swap import gather, swap
from keymix.swap.calibration import RIDGE
from mixer_cases import stir
from tolerances import close

KEYS = ("static_key", "conv_static_key")


def readings(model: nn.Module, x: Tensor) -> list[Any]:
    """Queries, keys and values of every layer in one call."""
    found: list[Any] = []
    hooks = [
        layer.module.register_forward_pre_hook(
            lambda _, args, kwargs, layer=layer: found.append(layer.reading(args, kwargs)),
            with_kwargs=True,
        )
        for layer in find_layers(model)
    ]
    answer(model, x)
    for hook in hooks:
        hook.remove()
    return found


def fitted(features: Tensor, logits: Tensor, mean: Tensor, scale: float) -> Tensor:
    """Least squares of one head by NumPy, the ridge as further rows: ``[M, F]``."""
    phi, wanted = (t.flatten(0, 1).numpy() for t in (features, logits))
    root = np.sqrt(RIDGE * np.mean(np.sum(phi**2, 0)))
    rows = np.concatenate([scale * phi, scale * root * np.eye(phi.shape[1])])
    target = np.concatenate([wanted, scale * root * mean.numpy().T])
    return torch.from_numpy(np.linalg.lstsq(rows, target, rcond=None)[0].T)


def test_mean_keys_are_the_means_by_position() -> None:
    model, x = tiny("timm_vit_registers_qk_norm"), images((8, 12), 10)
    keys = [read.k.mean(0) for read in readings(model, x)]
    swap(model, "static_key", calibration=x, estimate="mean", batch_size=4, drift=False)
    for mixer, key in zip(find_mixers(model).values(), keys, strict=True):
        close(mixer.key, key)


@pytest.mark.parametrize("name", ["timm_vit", "timm_eva02"])
def test_least_squares_are_numpys(name: str) -> None:
    model, x = tiny(name), images((8, 12), 10)
    reads = readings(model, x)
    swap(model, "static_key", calibration=gather(model, x, batch_size=3), drift=False)
    for mixer, read in zip(find_mixers(model).values(), reads, strict=True):
        for h in range(3):
            logits = read.logits()[:, h]
            wanted = fitted(read.q[:, h], logits, read.k[:, h].mean(0), read.scale)
            torch.testing.assert_close(mixer.key[h], wanted, rtol=1e-8, atol=1e-8)


def test_least_squares_of_a_convolution_are_numpys_on_unfolded_queries() -> None:
    model, x = tiny("timm_vit"), images((8, 12), 10)
    reads = readings(model, x)
    statistics = gather(model, x, "conv_static_key", batch_size=4)
    swap(model, "conv_static_key", calibration=statistics, drift=False)
    for mixer, read in zip(find_mixers(model).values(), reads, strict=True):
        convolves(mixer, read, prefix=1)


def convolves(mixer: Any, read: Any, prefix: int) -> None:
    """Hold a convolution of queries on 4x6 patches, and the prefix queries' key, to NumPy's."""
    weight = mixer.key_conv.weight.unflatten(0, (3, -1))
    bias = mixer.key_conv.bias.unflatten(0, (3, -1))
    gain = float(mixer.gain())
    for h in range(3):
        q, logits = read.q[:, h], read.logits()[:, h]
        mean = read.k[:, h].mean(0) * float(read.scale) / gain
        padded = F.pad(q[:, prefix:].mT.unflatten(-1, (4, 6)), (1, 1, 1, 1))  # [B, d, 6, 8]
        near = [padded[:, :, i : i + 4, j : j + 6] for i in range(3) for j in range(3)]
        phi = torch.stack(near, 2).flatten(1, 2).flatten(2).mT  # d slowest, as a filter's
        phi = torch.cat((phi, torch.ones_like(phi[..., :1])), -1)
        start = torch.zeros(len(mean), 4, 9, dtype=torch.float64)
        start[..., 4] = mean
        start = torch.cat((start.flatten(1), torch.zeros(len(mean), 1)), -1)
        wanted = fitted(phi, logits[:, prefix:], start, gain)
        made = torch.cat((weight[h].flatten(1), bias[h][:, None]), -1)
        torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-7)
        first = fitted(q[:, :prefix], logits[:, :prefix], mean, gain)
        torch.testing.assert_close(mixer.key[h], first, rtol=1e-7, atol=1e-7)


def test_keys_meet_what_the_swapped_layers_before_give() -> None:
    model, x = tiny("timm_vit"), images((8, 12), 10)
    original = readings(model, x)
    swap(model, "static_key", calibration=x, batch_size=4, drift=False)
    met = readings(model, x)  # the queries there do not depend on the layer's own keys
    assert (met[1].q - original[1].q).abs().max() > 1e-3
    for mixer, new, old in zip(find_mixers(model).values(), met, original, strict=True):
        for h in range(3):
            mean = old.k[:, h].mean(0)
            wanted = fitted(new.q[:, h], old.logits()[:, h], mean, old.scale)
            torch.testing.assert_close(mixer.key[h], wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("name", "mixer"), [("timm_swin", "static_key"), ("timm_vit", "sep_conv")])
def test_reconstruction_brings_outputs_nearer_and_moves_only_what_is_new(
    name: str, mixer: str
) -> None:
    x, moved = images(MODELS[name][1]), {}
    for estimate in ("least_squares", "reconstruct"):
        model = tiny(name)
        before = {path: p.detach().clone() for path, p in model.named_parameters()}
        torch.manual_seed(2)
        report = swap(model, mixer, 0, calibration=x, estimate=estimate)
        assert report.rows[0].drift is not None
        moved[estimate] = report.rows[0].drift.output
        now = dict(model.named_parameters())
        assert all(torch.equal(now[path], before[path]) for path in now.keys() & before.keys())
    assert moved["reconstruct"] < 0.9 * moved["least_squares"]
    assert report.estimate == "reconstruct"
    assert report.rows[0].estimated
    assert not report.rows[0].fresh
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_reconstruction_keeps_keys_that_were_exact() -> None:
    model, x = place_alone("timm_vit"), images((8, 12))
    before = answer(model, x)
    swap(model, "static_key", 0, calibration=x, estimate="reconstruct")
    close(answer(model, x), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mixer"),
    [
        *((name, "conv_static_key") for name in ("timm_vit", "timm_swin", "keymix_cvt")),
        *((name, "static_key") for name in ("timm_vit_no_prefix", "timm_swin", "timm_cait")),
    ],
)
def test_least_squares_come_nearer_to_the_logits_than_means(name: str, mixer: str) -> None:
    x = images(MODELS[name][1])
    errors = {}
    for estimate in ("mean", "least_squares"):
        report = swap(tiny(name), mixer, calibration=x, estimate=estimate)
        errors[estimate] = [row.drift.logits for row in report.rows if row.drift is not None]
        assert all("key" in " ".join(row.estimated) and not row.fresh for row in report.rows)
    means, squares = errors["mean"], errors["least_squares"]
    assert len(means) == len(squares) > 1
    # by construction, also with the mean of a row taken out; one key alone has no row to move
    pairs = list(zip(squares, means, strict=True))
    assert all(s is m is None or (s is not None and m is not None and s < m) for s, m in pairs)
    assert any(s is not None for s, _ in pairs)


def place_alone(name: str) -> nn.Module:
    """A model whose first layer's keys see channels that no image reaches, only its positions."""
    model = tiny(name)
    owner: Any = model
    half = owner.embed_dim // 2
    with torch.no_grad():
        owner.patch_embed.proj.weight[half:] = 0.0
        attention = owner.blocks[0].attn
        attention.qkv.weight[owner.embed_dim : 2 * owner.embed_dim, :half] = 0.0
    owner.blocks[0].norm1 = nn.Identity()
    return model


@together
@pytest.mark.parametrize("estimate", ["mean", "least_squares"])
@pytest.mark.parametrize("mixer", [*KEYS, "static_key_re_attention"])
def test_keys_that_no_image_moves_are_found_exactly(mixer: str, estimate: Any) -> None:
    model, x = place_alone("timm_vit"), images((8, 12))
    before = answer(model, x)
    report = swap(model, mixer, 0, calibration=x, estimate=estimate)
    close(answer(model, x), before)
    assert report.rows[0].estimated
    others = images((8, 12), 4, seed=2)
    close(answer(model, others), answer(place_alone("timm_vit"), others))


def test_what_a_mixer_itself_adds_to_its_logits_is_fitted() -> None:
    model, x = tiny("timm_vit"), images((8, 12))
    swap(model, "key_value", mixer_options={"pos_dim": 4})
    stir(model)
    first = readings(model, x)[0]
    assert first.bias is not None
    swap(model, "static_key", calibration=x, drift=False)
    logits, mixer = first.logits(), next(iter(find_mixers(model).values()))
    for h in range(3):
        mean = first.k[:, h].mean(0) * float(first.scale / mixer.gain())
        wanted = fitted(first.q[:, h], logits[:, h], mean, mixer.gain())
        torch.testing.assert_close(mixer.key[h], wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("name", "prefix"), [("timm_vit", 1), ("timm_vit_registers_qk_norm", 3)])
def test_what_a_mixer_itself_adds_is_fitted_by_a_convolution_too(name: str, prefix: int) -> None:
    model, x = tiny(name), images((8, 12), 10)
    swap(model, "key_value", mixer_options={"pos_dim": 4})
    stir(model)
    first = readings(model, x)[0]
    assert first.bias is not None
    assert (first.bias[prefix] - first.bias[0]).abs().min() > 0.01, "each query has its own"
    swap(model, "conv_static_key", 0, calibration=x, batch_size=4, drift=False)
    mixer = next(iter(find_mixers(model).values()))
    convolves(mixer, first, prefix)


def test_windows_have_mean_keys_of_their_own() -> None:
    model, x = tiny("timm_swin"), images((24, 16))
    keys = [read.k.mean(0) for read in readings(model, x)]
    swap(model, "static_key", calibration=x, estimate="mean", drift=False)
    mixers = list(find_mixers(model).values())
    assert mixers[0].key.shape == (6, 2, 16, 6)
    for mixer, key in zip(mixers, keys, strict=True):
        close(mixer.key, key if mixer.site.windows > 1 else key[0])


def test_windows_that_share_keys_have_one_mean_key() -> None:
    small: dict[str, Any] = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3)}
    model = ready(
        create_model("swin_micro_p2_32", mixer="softmax", shared_keys=True, merging=(2,), **small)
    )
    x = images((32, 32))
    keys = [read.k.mean((0, 1)) for read in readings(model, x)]
    swap(model, "static_key", calibration=x, estimate="mean", drift=False)
    for mixer, key in zip(find_mixers(model).values(), keys, strict=True):
        close(mixer.key, key)


def test_windows_of_another_image_size_are_refused() -> None:
    model, x = tiny("torchvision_swin"), images((18, 24))
    del model.image_size
    with pytest.raises(UserError, match=r"make 9 windows of 12 keys and the model is built for"):
        swap(model, "static_key", calibration=x)
    assert not find_mixers(model)


def test_keys_of_another_grid_are_averaged_onto_the_mixers() -> None:
    model, x = tiny("keymix_cvt"), images((16, 16))
    swap(model, "key_value")  # without a query keys lie where tokens do
    full = [read.k.mean(0) for read in readings(model, x)]
    swap(model, "static_key", calibration=x, estimate="mean", drift=False)
    first = next(iter(find_mixers(model).values()))
    assert first.key.shape[-2] * 4 == full[0].shape[-2]
    close(first.key, F.avg_pool2d(full[0].mT.unflatten(-1, (4, 4)), 2).flatten(2).mT)


def test_another_scale_goes_into_the_keys() -> None:
    x = images((8, 12))
    models = []
    for options in ({}, {"scale": False}, {"temperature": True}):
        model = tiny("timm_vit")
        swap(model, "static_key", calibration=x, mixer_options=options, drift=False)
        models.append(model)
    for other in models[1:]:
        close(answer(other, x), answer(models[0], x))
    scaled = [next(iter(find_mixers(m).values())) for m in models]
    close(scaled[1].key * 2.0, scaled[0].key)  # heads of 4, which divide logits by 2


def test_statistics_serve_layer_after_layer_as_all_at_once() -> None:
    x = images((16, 16))
    at_once, one_by_one = (tiny("keymix_vit") for _ in range(2))
    swap(at_once, "static_key", calibration=gather(at_once, x), drift=False)
    statistics = gather(one_by_one, iter(x.split(3)), "static_key", number=9)
    for layer in (2, 0, 1):
        report = swap(one_by_one, "static_key", layer, calibration=statistics)
        assert report.output is not None
        assert report.output.images == 9
    close(answer(one_by_one, x), answer(at_once, x))


def test_statistics_of_another_mixer_are_refused() -> None:
    model, x = tiny("timm_vit"), images((8, 12))
    statistics = gather(model, x, "static_key", "0")
    with pytest.raises(UserError, match="hold no least squares of unfolded 3"):
        swap(model, "conv_static_key", 0, calibration=statistics)
    with pytest.raises(UserError, match=r"hold nothing of blocks\.1\.attn"):
        swap(model, "static_key", calibration=statistics)
    assert not find_mixers(model)


def test_a_convolution_gives_no_keys_and_says_so() -> None:
    model, x = tiny("timm_vit"), images((8, 12))
    swap(model, "conv_static_key", calibration=x)
    report = swap(model, "static_key", calibration=x)
    row = report.rows[0]
    assert "no product of queries and keys" in " ".join(row.notes)
    assert row.fresh == ("key",)


def test_fewer_queries_than_unknowns_are_reported() -> None:
    model = tiny("timm_vit_no_prefix")  # 24 tokens, heads of 4: 37 unknowns of a convolution
    few = swap(tiny("timm_vit_no_prefix"), "conv_static_key", calibration=images((8, 12))[:8])
    assert not [note for row in few.rows for note in row.notes if "unknowns" in note]
    wide = swap(
        model,
        "conv_static_key",
        calibration=images((8, 12))[:8],
        mixer_options={"kernel_size": 9},
    )
    for row in wide.rows:
        (note,) = [note for note in row.notes if "unknowns" in note]
        assert note.startswith("192 queries of 8 images set 325 unknowns a key")
        assert note.endswith("give 14 or more")
