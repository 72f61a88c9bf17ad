# SPDX-License-Identifier: Apache-2.0
"""torchvision's Swin: windows cut as it cuts them, images of any size, keys per window."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import swin_transformer
from torchvision.models.swin_transformer import SwinTransformer

from each import together
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.layers import find_layers
from keymix.hosts.torchvision_swin import TorchvisionSwin
from keymix.mixers.registry import create_mixer, list_mixers
from mixer_cases import stir
from tolerances import close

WHAT = ("weight", "bias")
SIZES = [(16, 16), (18, 34), (23, 12), (5, 40), (6, 6)]  # 5x40: shifted along one axis alone


def swin(**options: Any) -> SwinTransformer:
    """Patches of 2x2 pixels in windows of 3x4; every other block is shifted."""
    defaults = {"patch_size": [2, 2], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3]}
    defaults |= {"window_size": [3, 4], "num_classes": 5, "stochastic_depth_prob": 0.0}
    model = SwinTransformer(**{**defaults, **options}).double().eval()
    stir(model)
    return model


def carry(theirs: nn.Module, mine: nn.Module) -> None:
    """Load the host's own weights into a model with ``softmax`` mixers."""
    state = {}
    for key, value in theirs.state_dict().items():
        for part in ("qkv", "proj"):
            key = key.replace(f"attn.{part}.", f"attn.mixer.{part}.")  # noqa: PLW2901
        if not key.endswith("relative_position_index"):
            state[key] = value
    mine.load_state_dict(state, strict=True)


def image(*size: int, batch: int = 2) -> Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, *size, generator=noise, dtype=torch.float64)


def calls(model: nn.Module, x: Tensor) -> list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]]:
    """Layer, arguments and output of every attention of a call."""
    seen: list[Any] = []
    hooks = [
        layer.module.register_forward_hook(
            lambda _, args, kwargs, out, layer=layer: seen.append((layer, args, kwargs, out)),
            with_kwargs=True,
        )
        for layer in find_layers(model)
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


def maskable(mixer: str) -> bool:
    return create_mixer(mixer, dim=12, num_heads=2, grid=(3, 4)).claims.maskable


def mixers_by_block(mixer: str) -> list[str]:
    """The mixer wherever it can sit in :func:`swin`."""
    shifted = mixer if maskable(mixer) else "softmax"
    return [mixer, shifted, mixer, shifted]


def test_places_say_what_the_host_knows() -> None:
    model = swin(attention_dropout=0.1, dropout=0.2)
    model.image_size = (16, 24)
    places = find_host(model).places(model)
    assert [p.path for p in places] == [f"features.{s}.{i}.attn" for s in (1, 3) for i in (0, 1)]
    assert [p.stage for p in places] == [0, 0, 1, 1]
    assert [p.needs_mask is not None for p in places] == [False, True, False, True]
    first, last = places[0].site, places[3].site
    assert (first.dim, first.num_heads, first.grid, first.num_prefix_tokens) == (12, 2, (3, 4), 0)
    assert (first.windows, first.window_grid) == (9, (3, 3))
    assert (last.dim, last.windows, last.window_grid) == (24, 4, (2, 2))
    assert put_mixers(model, "mhsa") == [f"{p.path}.mixer" for p in places]
    mixer: Any = find_mixers(model)["features.1.1.attn.mixer"]
    assert (mixer.attn_drop_p, mixer.proj_drop.p) == (0.1, 0.2)
    assert find_host(model).places(model)[1].defaults == places[1].defaults


@pytest.mark.parametrize("size", SIZES)
def test_its_reading_is_what_attention_does(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map is caught where torchvision drops out of it."""
    model, maps = swin(), []
    dropout = swin_transformer.F.dropout

    def caught(x: Tensor, *args: Any, **named: Any) -> Tensor:
        if named:  # other modules pass theirs by position
            maps.append(x)
        return dropout(x, *args, **named)

    monkeypatch.setattr(swin_transformer.F, "dropout", caught)
    seen = calls(model, image(*size))
    assert len(maps) == 2 * len(seen) == 8  # a map and an output each
    for (layer, args, kwargs, out), own in zip(seen, maps[::2], strict=True):
        reading = layer.reading(args, kwargs)
        close(reading.map().flatten(0, 1), own)
        close(layer.map(args, kwargs, queries=[0, 7]).flatten(0, 1), own[:, :, [0, 7]])
        layout = layer.layout(model)
        assert reading.q.shape[1] == layout.windows[0] * layout.windows[1]
        assert out.shape[1:3] == layout.grid


@together
@pytest.mark.parametrize("size", SIZES)
def test_softmax_on_it_is_its_own_attention(size: tuple[int, int]) -> None:
    theirs = swin()
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    carry(theirs, mine)
    x = image(*size)
    close(mine(x), theirs(x))
    pairs = zip(calls(mine, x), calls(theirs, x), strict=True)
    for (layer, args, kwargs, _), (own, *call, _) in pairs:
        close(layer.map(args, kwargs), own.map(*call))
        assert layer.layout(mine) == own.layout(theirs)


def test_its_weights_are_named_by_role_and_mixers_start_as_the_hosts_do() -> None:
    model = swin(embed_dim=48, window_size=[2, 2])
    layer, *call, _ = calls(model, image(8, 8))[0]
    own, weights, read = layer.module, layer.host.weights(layer.module), layer.reading(*call)
    assert sorted(weights) == sorted(f"{r}.{p}" for r in ("q", "k", "v", "proj") for p in WHAT)
    x = call[0][0].unflatten(2, (2, 2)).unflatten(1, (2, 2)).transpose(2, 3).reshape(2, 4, 4, 48)
    for role, heads in {"q": read.q, "k": read.k, "v": read.v}.items():
        made = nn.functional.linear(x, weights[f"{role}.weight"], weights[f"{role}.bias"])
        close(heads.transpose(2, 3).flatten(3), made)
    assert torch.equal(weights["proj.weight"], own.proj.weight)
    assert not any(t.requires_grad for t in weights.values())
    put_mixers(model, "static_key")
    for mixer in find_mixers(model).values():
        for linear in mixer.projections:
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
            assert not linear.bias.any()


def test_the_table_of_positions_stays_and_trains_alike() -> None:
    theirs = swin()
    mine = copy.deepcopy(theirs)
    tables = [layer.module.relative_position_bias_table for layer in find_layers(mine)]
    put_mixers(mine, "softmax")
    carry(theirs, mine)
    grads = []
    for model in (mine, theirs):
        model(image(18, 34)).square().sum().backward()
        grads.append([p.grad for k, p in model.named_parameters() if k.endswith("bias_table")])
    kept = [p for k, p in mine.named_parameters() if k.endswith("bias_table")]
    assert all(now is then for now, then in zip(kept, tables, strict=True))
    for one, other in zip(*grads, strict=True):
        assert other.abs().max() > 1e-6
        close(one, other)


def test_layouts_are_those_of_the_last_call() -> None:
    model = swin()
    layers = find_layers(model)
    model(image(18, 34))
    second, last = (layers[i].layout(model) for i in (1, 3))
    assert (second.grid, second.key_grid, second.prefix) == ((9, 17), (9, 17), 0)
    assert (second.window, second.windows, second.shift) == ((3, 4), (3, 5), (1, 2))
    assert (last.grid, last.windows, last.shift) == ((5, 9), (2, 3), (1, 2))
    model(image(5, 40))
    second, last = (layers[i].layout(model) for i in (1, 3))
    assert (second.grid, second.windows, second.shift) == ((2, 20), (1, 5), (0, 2))
    assert (last.grid, last.windows, last.shift) == ((1, 10), (1, 3), (0, 2))


def test_the_number_of_windows_is_given_or_recorded_or_that_of_224_pixels() -> None:
    def windows(model: nn.Module) -> Any:
        return find_host(model).places(model)[0].site.window_grid

    model = swin(patch_size=[4, 4], window_size=[7, 7])
    assert windows(model) == (8, 8)
    model(image(32, 32))
    assert windows(model) == (8, 8), "nothing listened"
    find_layers(model)
    model(image(32, 60))
    assert windows(model) == (2, 3)
    assert windows(pickle.loads(pickle.dumps(model))) == (2, 3)
    model.image_size = 56
    assert windows(model) == (2, 2)
    model.image_size = "56"
    with pytest.raises(UserError, match="image_size='56' must be"):
        windows(model)
    model.image_size = 3
    with pytest.raises(UserError, match="3x3 pixels are smaller than a patch of 4x4"):
        windows(model)


def test_keys_a_window_refuse_another_image_and_say_what_serves() -> None:
    model = swin()
    model.image_size = (18, 34)
    put_mixers(model, "static_key")
    assert model.double()(image(18, 34)).shape == (2, 5)
    says = r"static_key.*each of 15 windows \(3x5 .* 9 windows \(3x3 .*shared_keys=True.*before mix"
    with pytest.raises(UserError, match=says):
        model(image(18, 24))
    put_mixers(model, "static_key", host=TorchvisionSwin(shared_keys=True))
    assert model.double()(image(5, 40)).shape == (2, 5)
    put_mixers(model, "static_key")
    assert {m.site.window_grid for m in find_mixers(model).values()} == {None}, "the choice stays"


def test_keys_per_window_are_resized_for_the_size_that_is_set() -> None:
    model = swin()
    model.image_size = (16, 24)
    put_mixers(model, "static_key", {"resize": "interpolate"})
    model.double()
    with pytest.raises(
        UserError, match=r"model\.image_size = .*find_host\(model\)\.update_grids\(model\)"
    ):
        model(image(18, 34))
    model.image_size = (18, 34)
    find_host(model).update_grids(model)
    assert {tuple(p.shape) for k, p in model.named_parameters() if k.endswith("key")} == {
        (15, 2, 12, 6),
        (6, 3, 12, 8),
    }
    assert model(image(18, 34)).shape == (2, 5)


@pytest.mark.slow
@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_every_mixer_runs_trains_copies_and_loads_or_is_refused_under_the_shift(mixer: str) -> None:
    model = swin().train()
    model.image_size = (18, 34)
    if not maskable(mixer):
        before = [layer.module for layer in find_layers(model)]
        with pytest.raises(UserError, match=rf"{mixer}.*features\.1\.1\.attn.*mask.*one per block"):
            put_mixers(model, mixer)
        assert [layer.module for layer in find_layers(model)] == before
    put_mixers(model, mixers_by_block(mixer))
    model.double()(image(18, 34)).sum().backward()
    assert [k for k, p in model.named_parameters() if p.grad is None] == []
    model.eval()
    y = model(image(18, 34))
    assert torch.equal(copy.deepcopy(model)(image(18, 34)), y)
    fresh = swin()
    fresh.image_size = (18, 34)
    put_mixers(fresh, mixers_by_block(mixer))
    fresh.double().load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh(image(18, 34)), y)
    put_mixers(fresh, "softmax")
    assert fresh(image(18, 34)).shape == (2, 5)


def test_a_mixer_that_no_mask_reaches_refuses_the_image_that_needs_one() -> None:
    model = swin()
    model.image_size = (6, 8)  # one window everywhere: nothing is shifted
    put_mixers(model, "pooling")
    assert model.double()(image(6, 8)).shape == (2, 5)
    with pytest.raises(UserError, match=r"pooling.*image so large.*shifted.*mask"):
        model(image(18, 34))
    layer, *call, _ = calls(model, image(6, 8))[0]
    with pytest.raises(NoAttentionMap, match="pooling"):
        layer.map(*call)


def test_nothing_crosses_a_shifted_edge_however_large_the_logits() -> None:
    """torchvision adds -100 there, and so does the reading of its own attention."""
    model = swin(depths=[2])
    with torch.no_grad():
        model.features[1][1].attn.qkv.weight.mul_(50)
    mine = copy.deepcopy(model)
    put_mixers(mine, "softmax")
    carry(model, mine)
    leaked = []
    for each in (mine, model):
        layer, *call, _ = calls(each, image(18, 32))[1]
        right = layer.map(*call)[:, 3::4]  # windows at the right edge, in its two halves
        right = right.unflatten(-1, (3, 4)).unflatten(-3, (3, 4))  # queries, keys: rows, columns
        leaked.append(right[..., :2, :, 2:].max())
    assert leaked[0] == 0
    assert leaked[1] > 0.01


def test_other_modules_are_refused_by_name() -> None:
    model = swin()
    model.features[1][0].attn = nn.Identity()
    with pytest.raises(UserError, match=r"features\.1\.0\.attn is Identity, not torchvision's"):
        put_mixers(model, "softmax")
