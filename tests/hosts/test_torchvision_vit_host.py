# SPDX-License-Identifier: Apache-2.0
"""torchvision's ViT: reading its attention, and putting mixers where it sits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

from each import together
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.layers import find_layers
from keymix.mixers.registry import list_mixers
from mixer_cases import stir
from tolerances import close

PATH = "encoder.layers.encoder_layer_1.self_attention"
WHAT = ("weight", "bias")


def vit(**options: Any) -> VisionTransformer:
    """3x3 patches and a class token."""
    sizes = {"image_size": 12, "patch_size": 4, "num_layers": 2, "num_heads": 3}
    widths = {"hidden_dim": 12, "mlp_dim": 16, "num_classes": 5}
    model = VisionTransformer(**{**sizes, **widths, **options}).double().eval()
    stir(model)
    return model


def carry(theirs: nn.Module, mine: nn.Module) -> None:
    """Load the host's own weights into a model with ``softmax`` mixers."""
    names = {"self_attention.": "self_attention.mixer.", "in_proj_": "qkv.", "out_proj": "proj"}
    state = {}
    for key, value in theirs.state_dict().items():
        for old, new in names.items():
            key = key.replace(old, new)  # noqa: PLW2901
        state[key] = value
    mine.load_state_dict(state, strict=True)


X = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


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


def test_places_say_what_the_host_knows() -> None:
    model = vit(attention_dropout=0.1)
    places = find_host(model).places(model)
    assert [p.path for p in places] == [PATH.replace("_1", "_0"), PATH]
    site = places[1].site
    assert (site.dim, site.num_heads, site.grid, site.num_prefix_tokens) == (12, 3, (3, 3), 1)
    assert put_mixers(model, "mhsa") == [f"{p.path}.mixer" for p in places]
    mixer: Any = find_mixers(model)[f"{PATH}.mixer"]
    assert (mixer.attn_drop_p, mixer.proj_drop.p) == (0.1, 0.0)
    layout = find_layers(model)[1].layout(model)
    assert (layout.grid, layout.key_grid, layout.prefix, layout.window) == ((3, 3), (3, 3), 1, None)


def test_a_stem_of_convolutions_leaves_the_same_grid() -> None:
    stem = [ConvStemConfig(out_channels=6, kernel_size=3, stride=2) for _ in range(2)]
    model = vit(image_size=20, conv_stem_configs=stem)
    put_mixers(model, "conv_static_key")
    assert {m.site.grid for m in find_mixers(model).values()} == {(5, 5)}
    assert model.double()(torch.randn(1, 3, 20, 20, dtype=torch.float64)).shape == (1, 5)


@pytest.mark.parametrize("gradients", [True, False], ids=["plain", "fast path"])
def test_its_reading_is_what_attention_does(gradients: bool) -> None:
    """Without gradients, torch takes a path of its own through attention."""
    model = vit()
    with torch.set_grad_enabled(gradients):
        seen = calls(model, X)
        assert len(seen) == 2
        for layer, args, kwargs, (out, _) in seen:
            reading = layer.reading(args, kwargs)
            wanted = layer.module(*args, need_weights=True, average_attn_weights=False)[1]
            close(reading.map(), wanted)
            close(layer.map(args, kwargs, queries=[0, 7]), wanted[:, :, [0, 7]])
            gathered = (reading.map() @ reading.v).transpose(1, 2).flatten(2)
            close(layer.module.out_proj(gathered), out)


def test_its_weights_are_named_by_role() -> None:
    layer = find_layers(vit())[1]
    own, weights = layer.module, layer.host.weights(layer.module)
    assert sorted(weights) == sorted(f"{r}.{p}" for r in ("q", "k", "v", "proj") for p in WHAT)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    read = layer.reading((x, x, x), {"need_weights": False})
    for role, heads in {"q": read.q, "k": read.k, "v": read.v}.items():
        made = nn.functional.linear(x, weights[f"{role}.weight"], weights[f"{role}.bias"])
        close(heads.transpose(1, 2).flatten(2), made)
    assert torch.equal(weights["proj.weight"], own.out_proj.weight)
    assert not any(t.requires_grad for t in weights.values())


def test_softmax_on_it_is_its_own_attention() -> None:
    theirs = vit()
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    carry(theirs, mine)
    close(mine(X), theirs(X))
    with torch.no_grad():
        close(mine(X), theirs(X))
    for (layer, args, kwargs, _), (own, *call, _) in zip(
        calls(mine, X), calls(theirs, X), strict=True
    ):
        close(layer.map(args, kwargs), own.map(*call))


@together
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_every_mixer_runs_trains_copies_and_loads(name: str) -> None:
    model = vit().train()
    put_mixers(model, name)
    model.double()(X).sum().backward()
    without = {k for k, p in model.named_parameters() if p.grad is None}
    assert without == set()
    model.eval()
    y = model(X)
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), y)
    fresh = vit()
    put_mixers(fresh, name)
    fresh.double().load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh(X), y)
    put_mixers(fresh, "softmax")
    assert fresh(X).shape == (2, 5)


def test_a_mixer_without_a_map_says_so() -> None:
    model = vit()
    put_mixers(model, ["softmax", "pooling"])
    (first, *call, _), (second, *other, _) = calls(model, X)
    assert first.map(*call).shape == (2, 3, 10, 10)
    with pytest.raises(NoAttentionMap, match="pooling"):
        second.map(*other)


def test_another_image_size_reaches_the_mixers_there_are() -> None:
    model = vit()
    host = find_host(model)
    place = host.places(model)[0]
    put_mixers(model, "static_key", {"resize": "interpolate"})
    model.encoder.layers[1].self_attention = nn.MultiheadAttention(12, 3, batch_first=True)
    model.image_size = 20
    host.update_grids(model)
    mixer: Any = find_mixers(model)[f"{place.path}.mixer"]
    assert mixer.site.grid == (5, 5)
    assert mixer.key.shape == (3, 26, 4)


def attention(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(12, 3, **{"batch_first": True, **options})


@together
@pytest.mark.parametrize(
    ("there", "says"),
    [
        (attention(add_bias_kv=True), r"has bias_k and bias_v, which no mixer"),
        (attention(add_zero_attn=True), r"has add_zero_attn, which no mixer"),
        (attention(kdim=8, vdim=8), r"has keys of other tokens \(kdim, vdim\)"),
        (nn.Identity(), r"is Identity, not torch's MultiheadAttention"),
    ],
    ids=["bias_k", "add_zero_attn", "kdim", "Identity"],
)
def test_attention_that_no_mixer_stands_for_is_refused(there: nn.Module, says: str) -> None:
    model = vit()
    before = model.encoder.layers[0].self_attention
    model.encoder.layers[1].self_attention = there
    with pytest.raises(UserError, match=PATH.replace(".", r"\.") + " " + says):
        put_mixers(model, "softmax")
    assert model.encoder.layers[0].self_attention is before
    with pytest.raises(UserError, match=says):
        find_host(model).reading(there, (X, X, X), {})


MASK = torch.zeros(10, 10)


@together
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"attn_mask": MASK}, "re_attention.*attention mask"),
        ({"key_padding_mask": MASK[:1]}, "re_attention.*attention mask"),
        ({"is_causal": True}, "causal"),
    ],
)
def test_calls_for_more_than_a_mixer_gives_are_refused(more: dict[str, Any], says: str) -> None:
    model = vit()
    put_mixers(model, "re_attention")
    hosted, x = model.get_submodule(PATH), torch.randn(1, 10, 12, dtype=torch.float64)
    with pytest.raises(UserError, match=says):
        hosted(x, x, x, **more)
    with pytest.raises(UserError, match="other tokens"):
        hosted(x, x + 1, x, need_weights=False)


def test_masks_are_not_read_as_if_they_were_not_there() -> None:
    layer = find_layers(vit())[0]
    x = torch.randn(1, 10, 12, dtype=torch.float64)
    mask = torch.triu(torch.ones(10, 10, dtype=torch.bool), 1)
    maps = layer.reading((x, x, x), {"attn_mask": mask, "need_weights": False}).map()
    assert maps[:, :, mask].max() == 0
