# SPDX-License-Identifier: Apache-2.0
"""Rotary attention: readings, mixers whose queries and keys turn as the host's do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models.eva import Eva
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.layers import find_layers
from keymix.mixers.registry import list_mixers
from keymix.models import create_model, load_weights
from mixer_cases import stir
from tolerances import close

SMALL: dict[str, Any] = {"img_size": (8, 12), "patch_size": 2, "embed_dim": 24, "depth": 2}
SMALL |= {"num_heads": 3, "num_classes": 5}
ROPE: dict[str, Any] = {"use_rot_pos_emb": True}
KINDS: dict[str, dict[str, Any]] = {
    "eva": {"qkv_bias": True},  # no rotation
    "eva02": {**ROPE, "swiglu_mlp": True, "scale_mlp": True, "qkv_fused": False},
    "eva02_scaled": {**ROPE, "scale_attn_inner": True, "num_reg_tokens": 2, "no_embed_class": True},
    "dinov3": {
        **ROPE,
        "rope_type": "dinov3",
        "rope_rotate_half": True,
        "num_reg_tokens": 4,
        "use_abs_pos_emb": False,
        "qkv_bias": False,
        "init_values": 1e-5,
    },
    "rope": {**ROPE, "attn_type": "rope", "qk_norm": True},
    "mixed": {**ROPE, "attn_type": "rope", "rope_type": "mixed", "class_token": False},
    "groups": {
        **ROPE,
        "attn_type": "rope",
        "qkv_fused": False,
        "embed_dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "post_norm": {**ROPE, "use_post_norm": True},
    "padded": {**ROPE, "dynamic_img_size": True, "dynamic_img_pad": True},
}
X = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def eva(kind: str, **options: Any) -> Any:
    model = Eva(**{**SMALL, **KINDS[kind], **options}, global_pool="avg")
    stir(model)
    return model.double().eval()


def give(mixer: nn.Module, weights: dict[str, Tensor]) -> None:
    """Fill a softmax mixer's projections by role."""
    given = dict(weights)
    for leaf in ("weight", "bias"):
        if f"q.{leaf}" in given:
            given[f"qkv.{leaf}"] = torch.cat([given.pop(f"{role}.{leaf}") for role in "qkv"])
    missing = mixer.load_state_dict(given, strict=False).missing_keys
    assert all(name.startswith("post_projection.") for name in missing)


def to_softmax(theirs: Any) -> Any:
    """The same model with softmax mixers in it, which have its weights."""
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    host = find_host(theirs)
    for name, mixer in find_mixers(mine).items():
        give(mixer, host.weights(theirs.get_submodule(name.removesuffix(".mixer"))))
    return mine


@together
@pytest.mark.parametrize("kind", KINDS)
def test_a_reading_is_the_map_that_the_unfused_module_applies(kind: str) -> None:
    model = eva(kind)
    layers = find_layers(model)
    assert layers[0].host.name == "timm Eva"
    for layer in layers:
        seen: dict[str, Any] = {}
        layer.module.fused_attn = False

        def keep(_: Any, args: Any, kwargs: Any, out: Any, seen: Any = seen) -> None:
            seen.update(args=args, kwargs=kwargs, out=out)

        def applied(_: Any, __: Any, out: Any, seen: Any = seen) -> None:
            seen["map"] = out

        layer.module.register_forward_hook(keep, with_kwargs=True)
        layer.module.get_submodule("attn_drop").register_forward_hook(applied)
        model(X)
        read = layer.reading(seen["args"], seen["kwargs"])
        close(read.map(), seen["map"])
        attention: Any = layer.module
        y = attention.norm((read.map() @ read.v).transpose(-3, -2).flatten(-2))
        close(attention.proj(y), seen["out"])
        assert layer.layout(model).grid == (4, 6)


@together
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_with_the_hosts_weights_is_the_host(kind: str) -> None:
    theirs = eva(kind)
    mine = to_softmax(theirs)
    close(mine(X), theirs(X))
    extras = find_host(mine).places(mine)[0].extras
    assert ("rotary positions" in extras) == (kind != "eva")
    assert ("norm" in extras) == (kind == "eva02_scaled")
    layers = find_layers(mine)
    seen: dict[str, Any] = {}
    layers[1].module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(args=args, kwargs=kwargs), with_kwargs=True
    )
    mine(X)
    read = layers[1].reading(seen["args"], seen["kwargs"])
    close(read.map(), layers[1].map(seen["args"], seen["kwargs"]))
    mixer: Any = layers[1].mixer
    x = seen["args"][0]
    close(mixer.output(read.map() @ read.v, x), mixer(x))


@pytest.mark.parametrize("kind", ["eva", "eva02", "dinov3", "rope"])
def test_checkpoints_of_timms_load_into_mixers(kind: str) -> None:
    theirs = eva(kind)
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    loaded = load_weights(mine.double(), theirs.state_dict(), img_size=(8, 12))
    assert loaded.missing == loaded.unused == ()
    close(mine(X), theirs(X))


@together
@pytest.mark.parametrize("name", list_mixers(domain="dense"))
def test_every_mixer_sits_copies_and_trains(name: str) -> None:
    model = eva("mixed")
    put_mixers(model, name)
    y = model.double().train()(X)
    y.square().sum().backward()
    turned = {"q", "k"} & set(getattr(find_mixers(model)["blocks.0.attn.mixer"], "roles", ()))
    grads = {k for k, p in model.named_parameters() if p.grad is None}
    assert grads == (set() if turned else {"rope.freqs"}), "learned frequencies train through it"
    model.eval()
    y = model(X)
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), y)
    put_mixers(model, "softmax")
    assert model(X).shape == (2, 5)


def test_a_static_key_lives_where_turned_queries_do() -> None:
    model = eva("rope")
    put_mixers(model, "static_key")
    mixer: Any = model.double().blocks[0].attn.mixer
    assert set(mixer.post_projection) == {"q"}
    seen: dict[str, Any] = {}
    mixer.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    model(X)
    rope = model.rope.get_embed()
    q = mixer.q(seen["x"]).reshape(2, 25, 3, 8).transpose(1, 2)
    q = mixer.post_projection.q.norm(q)
    q = torch.cat((q[:, :, :1], apply_rot_embed_cat(q[:, :, 1:], rope)), 2)
    wanted = (q @ mixer.key.mT * 8**-0.5).softmax(-1)
    close(mixer.attention_map(seen["x"]), wanted)


@pytest.mark.parametrize("kind", ["rope", "mixed"])
def test_activation_checkpointing_turns_alike(kind: str) -> None:
    plain = to_softmax(eva(kind))
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    for model in (plain, saving):
        model.train()(X).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert a.grad is not None, name
        close(b.grad, a.grad)


@pytest.mark.slow
def test_it_compiles_into_one_graph(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    hosted = to_softmax(eva("rope", depth=1)).blocks[0].attn
    x, rope = (torch.randn(*size, dtype=torch.float64) for size in ((2, 25, 24), (24, 16)))
    rope.requires_grad_()
    wanted = hosted(x, rope)
    torch._dynamo.reset()
    compiled = torch.compile(hosted, fullgraph=True, backend="eager")
    close(compiled(x, rope=rope), wanted)
    compiled(x, rope=rope).sum().backward()
    assert rope.grad is not None
    assert hosted.turn.rope is None, "compiled calls leave nothing behind"


def test_sizes_may_change_from_call_to_call() -> None:
    theirs = eva("padded")
    mine = to_softmax(theirs)
    small = X[..., :6, :9]
    for images in (X, small, X):
        close(mine(images), theirs(images))
    assert find_layers(mine)[0].layout(mine).grid == (4, 6)


def test_dropped_patches_keep_their_positions() -> None:
    theirs = eva("mixed", patch_drop_rate=0.5).train()
    mine = to_softmax(theirs)
    torch.manual_seed(3)
    wanted = theirs(X)
    torch.manual_seed(3)
    close(mine(X), wanted)


def test_a_mixer_without_positions_says_so() -> None:
    model = eva("rope")
    put_mixers(model, "softmax")
    layer = find_layers(model.double())[0]
    x = torch.randn(1, 25, 24, dtype=torch.float64)
    with pytest.raises(UserError, match="call the model first"):
        layer.map((x,), {})
    model(X)
    assert layer.map((x,), {}).shape == (1, 3, 25, 25)
    again = find_layers(copy.deepcopy(model))[0]
    with pytest.raises(UserError, match="call the model first"):
        again.map((x,), {})


def test_causal_attention_and_other_heads_are_refused() -> None:
    model = eva("rope")
    with pytest.raises(UserError, match="rotary positions and q_norm and k_norm for 3 heads of 8"):
        put_mixers(model, "softmax", {"head_dim": 4})
    put_mixers(model, "static_key")
    with pytest.raises(UserError, match="not causal"):
        model.double()(X, is_causal=True)
    keep = torch.ones(25, 25, dtype=torch.bool).tril()
    theirs = eva("rope")
    close(to_softmax(theirs)(X, attn_mask=keep), theirs(X, attn_mask=keep))


def test_projections_start_as_evas_own() -> None:
    torch.manual_seed(0)
    model = Eva(**{**SMALL, "embed_dim": 96, "depth": 4}, **ROPE)
    own = [block.attn.proj.weight.std().item() for block in model.blocks]
    put_mixers(model, "softmax")
    mine = [block.attn.mixer.proj.weight.std().item() for block in model.blocks]
    for a, b in zip(own, mine, strict=True):
        assert abs(a - b) < 0.1 * a
    assert mine[3] < 0.6 * mine[0]


@pytest.mark.parametrize(
    "name",
    ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_ape_224"],
)
def test_timms_models_take_a_mixer_by_name(name: str) -> None:
    model = create_model(name, mixer="ska", img_size=32, patch_size=8, num_classes=3, depth=2)
    assert len(find_mixers(model)) == 2
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert not any(isinstance(m, AttentionRope) for m in model.modules())
