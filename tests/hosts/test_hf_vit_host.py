# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's ViT, DeiT and DINOv2: reading their attention, and putting mixers there."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keymix
from each import together
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.layers import find_layers
from keymix.mixers.registry import list_mixers
from mixer_cases import stir
from tolerances import close

transformers = pytest.importorskip("transformers", minversion="5.20")

SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # classes, further options, prefix tokens, path of the layers
    "vit": ("ViT", {"intermediate_size": 16}, 1, "vit.layers"),
    "deit": ("DeiT", {"intermediate_size": 16}, 2, "deit.layers"),
    "dinov2": ("Dinov2", {"mlp_ratio": 2}, 1, "dinov2.encoder.layer"),
    "registers": (
        "Dinov2WithRegisters",
        {"mlp_ratio": 2, "num_register_tokens": 3},
        4,
        "dinov2_with_registers.encoder.layer",
    ),
}
ALL = pytest.mark.parametrize("family", FAMILIES)


def vit(family: str = "vit", head: str = "ForImageClassification", **options: Any) -> Any:
    """3x3 patches."""
    name, more, _, _ = FAMILIES[family]
    how = {"attn_implementation": "sdpa", "num_labels": 5, "image_size": 12}
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **more, **how, **options})
    model = getattr(transformers, f"{name}{head}")(config).double().eval()
    stir(model)
    return model


def carry(theirs: nn.Module, mine: nn.Module) -> None:
    """Load the host's own weights into a model with ``softmax`` mixers."""
    state = dict(theirs.state_dict())
    for key in [k for k in state if ".attention.q_proj." in k]:
        rows = [state.pop(key.replace("q_proj", f"{role}_proj")) for role in "qkv"]
        state[key.replace("q_proj", "mixer.qkv")] = torch.cat(rows)
    mine.load_state_dict(
        {k.replace("attention.o_proj", "attention.mixer.proj"): v for k, v in state.items()},
        strict=True,
    )


def image(*size: int) -> Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, *size, generator=noise, dtype=torch.float64)


X = image(12, 12)


def calls(
    model: nn.Module, x: Tensor, **more: Any
) -> list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]]:
    """Layer, arguments and output of every attention of a call."""
    seen: list[Any] = []
    hooks = [
        layer.module.register_forward_hook(
            lambda _, args, kwargs, out, layer=layer: seen.append((layer, args, kwargs, out)),
            with_kwargs=True,
        )
        for layer in find_layers(model)
    ]
    model(x, **more)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.slow
@together
@ALL
@pytest.mark.parametrize("head", ["ForImageClassification", "Model"])
def test_places_say_what_the_host_knows(family: str, head: str) -> None:
    model = vit(family, head, attention_probs_dropout_prob=0.1, qkv_bias=False)
    places = find_host(model).places(model)
    _, _, prefix, layers = FAMILIES[family]
    layers = layers if head != "Model" else layers.partition(".")[2]
    assert [p.path for p in places] == [f"{layers}.{i}.attention" for i in (0, 1)]
    site = places[1].site
    assert (site.dim, site.num_heads, site.grid) == (12, 3, (3, 3))
    assert site.num_prefix_tokens == prefix
    assert put_mixers(model, "mhsa") == [f"{p.path}.mixer" for p in places]
    mixer: Any = find_mixers(model)[f"{places[1].path}.mixer"]
    assert (mixer.qkv.bias, mixer.attn_drop_p, mixer.proj_drop.p) == (None, 0.1, 0.0)
    assert find_host(model).places(model)[1].defaults == places[1].defaults


@ALL
def test_its_reading_is_what_attention_does(family: str) -> None:
    seen = calls(vit(family), X)
    assert len(seen) == 2
    for layer, args, kwargs, (out, _) in seen:
        reading = layer.reading(args, kwargs)
        gathered = (reading.map() @ reading.v).transpose(1, 2).flatten(2)
        close(layer.module.o_proj(gathered), out)


@ALL
def test_its_maps_are_those_that_the_library_returns(family: str) -> None:
    model = vit(family, attn_implementation="eager")
    maps = model(X, output_attentions=True).attentions
    for (layer, args, kwargs, _), wanted in zip(calls(model, X), maps, strict=True):
        # ViT's and DeiT's own softmax is in single precision whatever the weights
        close(layer.map(args, kwargs), wanted, torch.float32)
        close(layer.map(args, kwargs, queries=[0, 7]), wanted[:, :, [0, 7]], torch.float32)


@ALL
def test_softmax_on_it_is_its_own_attention(family: str) -> None:
    theirs = vit(family)
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    carry(theirs, mine)
    close(mine(X).logits, theirs(X).logits)
    pairs = zip(calls(mine, X), calls(theirs, X), strict=True)
    for (layer, args, kwargs, _), (own, *call, _) in pairs:
        close(layer.map(args, kwargs), own.map(*call))
        weights, mixer = own.host.weights(own.module), layer.mixer
        assert torch.equal(torch.cat([weights[f"{r}.weight"] for r in "qkv"]), mixer.qkv.weight)
        assert torch.equal(torch.cat([weights[f"{r}.bias"] for r in "qkv"]), mixer.qkv.bias)
        assert torch.equal(weights["proj.weight"], mixer.proj.weight)
        assert torch.equal(weights["proj.bias"], mixer.proj.bias)


@together
@ALL
@pytest.mark.parametrize("size", [(20, 8), (13, 30)])
def test_so_it_is_on_images_of_another_size(family: str, size: tuple[int, int]) -> None:
    theirs = vit(family)
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    carry(theirs, mine)
    more = {} if "dino" in FAMILIES[family][3] else {"interpolate_pos_encoding": True}
    close(mine(image(*size), **more).logits, theirs(image(*size), **more).logits)
    layers = find_layers(theirs)
    theirs(image(*size), **more)
    for model, layer in ((mine, find_layers(mine)[1]), (theirs, layers[1])):
        layout = layer.layout(model)
        assert (layout.grid, layout.key_grid) == ((size[0] // 4, size[1] // 4),) * 2
        assert layout.prefix == FAMILIES[family][2]


def test_an_image_size_of_two_sides_is_the_grid() -> None:
    model = vit(image_size=(8, 20))
    put_mixers(model, "conv_static_key")
    assert {m.site.grid for m in find_mixers(model).values()} == {(2, 5)}
    assert model.double()(image(8, 20)).logits.shape == (2, 5)


def test_keys_lie_on_the_grid_that_is_said_and_follow_a_call() -> None:
    model = vit("dinov2")
    model.image_size = (8, 20)
    put_mixers(model, "static_key", {"resize": "pool_values"})
    model.double()
    assert {m.key.shape for m in find_mixers(model).values()} == {(3, 11, 4)}
    assert model(image(16, 12)).logits.shape == (2, 5)
    layout = find_layers(model)[0].layout(model)
    assert (layout.grid, layout.key_grid) == ((4, 3), (2, 5))
    put_mixers(model, "static_key")
    with pytest.raises(UserError, match=r"grid of \(2, 5\).*\(4, 3\).*resize"):
        model.double()(image(16, 12))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # as of 5.23
def test_a_recomputed_layer_returns_to_the_grid_of_its_call() -> None:
    grads = []
    for recompute in (False, True):
        torch.manual_seed(3)
        model = vit("dinov2").train()
        put_mixers(model, "static_key", {"resize": "interpolate"})
        model.double()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        out = model(image(8, 20)).logits
        model(image(20, 8))
        out.sum().backward()
        grads.append([p.grad for k, p in model.named_parameters() if k.endswith("key")])
    for one, other in zip(*grads, strict=True):
        assert other.abs().max() > 1e-6
        close(one, other)


@together
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_every_mixer_runs_trains_copies_and_loads(name: str) -> None:
    model = vit("registers").train()
    put_mixers(model, name)
    model.double()(X, labels=torch.tensor([1, 2])).loss.backward()
    missing = [k for k, p in model.named_parameters() if p.grad is None]
    assert missing == ["dinov2_with_registers.embeddings.mask_token"]
    model.eval()
    y = model(X).logits
    assert torch.equal(copy.deepcopy(model)(X).logits, y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X).logits, y)
    fresh = vit("registers")
    put_mixers(fresh, name)
    fresh.double().load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(fresh(X).logits, y)
    put_mixers(fresh, "softmax")
    assert fresh(X).logits.shape == (2, 5)


def test_projections_start_as_the_librarys_do() -> None:
    model = vit(hidden_size=192, initializer_range=0.3, intermediate_size=8)
    put_mixers(model, "static_key")
    for mixer in find_mixers(model).values():
        for linear in mixer.projections:
            assert linear.weight.std().item() == pytest.approx(0.3, rel=0.05)
            assert not linear.bias.any()


@together
@ALL
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_masks_reach_the_mixer_or_are_refused(family: str, how: str) -> None:
    theirs = vit(family, attn_implementation=how)
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    carry(theirs, mine)
    keep = torch.ones(2, FAMILIES[family][2] + 9, dtype=torch.long)
    keep[0, -4:] = 0
    y = theirs(X, attention_mask=keep).logits
    assert (y - theirs(X).logits).abs().max() > 1e-4
    close(mine(X, attention_mask=keep).logits, y, torch.float32 if how == "eager" else None)
    for layer, args, kwargs, _ in calls(theirs, X, attention_mask=keep):
        assert layer.map(args, kwargs)[0, ..., -4:].max() == 0
    put_mixers(mine, "re_attention")
    assert mine.double()(X).logits.shape == (2, 5)
    with pytest.raises(UserError, match=r"re_attention.*attention mask"):
        mine(X, attention_mask=keep)


def test_masks_that_are_no_tensors_are_refused() -> None:
    model = vit()
    put_mixers(model, "softmax")
    hosted = model.vit.layers[0].attention
    with pytest.raises(UserError, match="set_attn_implementation"):
        hosted(torch.randn(2, 10, 12, dtype=torch.float64), torch.ones(2, 10))


@ALL
def test_asking_for_attentions_is_an_error_not_an_empty_answer(family: str) -> None:
    model = vit(family, attn_implementation="eager")
    put_mixers(model, "softmax")
    assert len(model(X, output_hidden_states=True).hidden_states) == 3
    with pytest.raises(UserError, match=r"no weights.*keymix\.attention_maps"):
        model(X, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(UserError, match=r"no weights.*keymix\.attention_maps"):
        model(X)


def test_a_mixer_without_a_map_says_so() -> None:
    model = vit()
    put_mixers(model, ["key_value", "pooling"])
    (first, *call, _), (second, *other, _) = calls(model, X)
    assert first.map(*call).shape == (2, 3, 10, 10)
    with pytest.raises(NoAttentionMap, match="pooling"):
        second.map(*other)


@pytest.mark.parametrize(
    ("path", "there", "says"),
    [
        ("0.attention", nn.Identity(), r"vit\.layers\.0\.attention is Identity, not transformers'"),
        ("1.attention.k_proj", nn.Identity(), r"1\.attention\.k_proj is Identity, not a plain"),
        ("1.attention.q_norm", nn.LayerNorm(4), r"1\.attention holds .*q_norm.*transformers 5\."),
    ],
)
def test_attention_that_is_not_the_librarys_is_refused(
    path: str, there: nn.Module, says: str
) -> None:
    model = vit()
    owner, _, name = path.rpartition(".")
    setattr(model.vit.layers.get_submodule(owner), name, there)
    with pytest.raises(UserError, match=says):
        put_mixers(model, "softmax")
    assert not find_mixers(model)


def test_other_models_of_the_library_are_not_taken_for_one() -> None:
    config = transformers.Dinov2Config(**SMALL, image_size=12)
    encoder = transformers.Dinov2Model(config).encoder
    assert "Hugging Face" not in find_host(encoder).name  # no patches: a user's attention
    small = transformers.SegformerConfig(hidden_sizes=[8, 16, 40, 64])
    with pytest.raises(UserError, match=r"SegformerModel.*SegformerAttention.*Hugging Face vision"):
        find_host(transformers.SegformerModel(small))


def test_the_library_is_imported_for_a_file_that_names_it_alone() -> None:
    files = sorted(Path(keymix.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    imports = re.compile(r"^\s*(import|from) transformers\b|import_module\(.transformers", re.M)
    found = [file.name for file in files if imports.search(file.read_text(encoding="utf-8"))]
    assert found == ["swapped.py"]
