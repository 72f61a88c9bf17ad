# SPDX-License-Identifier: Apache-2.0
"""Shared attention maps against DeepViT's Eq. 5, head by head, in one layer and in a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from each import together
from keymix.mixers.base import Site
from keymix.mixers.shared_map import SharedMapAttention
from keymix.models import create_model
from keymix.ops import resample
from mixer_cases import refused, stir
from tolerances import close

SITE = Site(dim=12, num_heads=3, grid=(2, 3), num_prefix_tokens=1)


def layer(**options: Any) -> SharedMapAttention:
    torch.manual_seed(0)
    made = SharedMapAttention(SITE, dtype=torch.float64, **options)
    stir(made)
    return made


def some_map(*lead: int) -> Tensor:
    noise = torch.Generator().manual_seed(2)
    logits = torch.randn(*lead, 3, 7, 7, generator=noise, dtype=torch.float64)
    return logits.softmax(-1).requires_grad_()


def some_tokens(*lead: int) -> Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.randn(*lead, 7, 12, generator=noise, dtype=torch.float64).requires_grad_()


def equation_5(mixer: Any, x: Tensor, a: Tensor) -> Tensor:
    """Norm(Θ^T A) V, then the output projection; BatchNorm or LayerNorm written out."""
    h, d = mixer.num_heads, mixer.head_dim
    v = mixer.v(x)
    mixed = [
        sum(mixer.theta[i, g] * a[:, i] for i in range(h)) + mixer.theta_bias[g] for g in range(h)
    ]
    norm, out = mixer.norm, []
    for g in range(h):
        if isinstance(norm, torch.nn.LayerNorm):
            mean = sum(mixed) / h
            variance = sum((m - mean) ** 2 for m in mixed) / h
        elif norm.training:
            mean = mixed[g].mean()
            variance = ((mixed[g] - mean) ** 2).mean()
        else:
            mean, variance = norm.running_mean[g], norm.running_var[g]
        normed = (mixed[g] - mean) / (variance + norm.eps) ** 0.5 * norm.weight[g] + norm.bias[g]
        out.append(normed @ v[..., g * d : (g + 1) * d])
    result: Tensor = mixer.proj(torch.cat(out, -1))
    return result


@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("training", [True, False])
def test_it_is_equation_5(norm, training) -> None:
    mixer = layer(norm=norm).train(training)
    x, a = some_tokens(2), some_map(2)
    named = {"x": x, "map": a, **dict(mixer.named_parameters())}
    wanted = equation_5(mixer, x, a)
    weight = torch.randn_like(wanted)
    expected = torch.autograd.grad((wanted * weight).sum(), list(named.values()))
    y = mixer(x, source=a)
    close(y, wanted)
    grads = torch.autograd.grad((y * weight).sum(), list(named.values()))
    close(torch.cat([g.flatten() for g in grads]), torch.cat([g.flatten() for g in expected]))
    for name, grad in zip(named, grads, strict=True):
        assert (grad.abs().max() > 1e-9) == (name not in mixer.zero_gradients), name


def test_its_map_is_the_shared_one_and_then_what_multiplies_v() -> None:
    mixer = layer().train()
    x, a = some_tokens(2, 3), some_map(2, 3)
    before = {k: v.clone() for k, v in mixer.state_dict().items()}
    assert torch.equal(mixer.attention_map(x, source=a), a)
    final = mixer.attention_map(x, stage="final", source=a)
    for stage, full in (("softmax", a), ("final", final)):
        rows = mixer.attention_map(x, queries=[4, 0], stage=stage, source=a)
        close(rows, full[..., [4, 0], :])
    assert all(torch.equal(before[k], v) for k, v in mixer.state_dict().items())
    v = mixer.inputs(x, None)["v"]
    close(mixer.proj((final @ v).transpose(-3, -2).flatten(-2)), mixer(x, source=a))
    assert not torch.equal(before["norm.running_var"], mixer.norm.running_var)


def test_entries_of_the_final_map_are_dropped() -> None:
    mixer = layer(attn_drop=0.5, proj_drop=0.3).train()
    x, a = some_tokens(2), some_map(2)
    final = mixer.attention_map(x, stage="final", source=a)
    torch.manual_seed(3)
    y = F.dropout(final, 0.5) @ mixer.inputs(x, None)["v"]
    wanted = F.dropout(mixer.proj(y.transpose(-3, -2).flatten(-2)), 0.3)
    torch.manual_seed(3)
    close(mixer(x, source=a), wanted)


def test_values_are_averaged_to_where_the_maps_keys_stay() -> None:
    mixer = layer(key_grid=(1, 3)).eval()
    x, a = some_tokens(2), some_map(2)[..., :4]
    v = mixer.inputs(x, None)["v"]
    pooled = torch.cat((v[..., :1, :], v[..., 1:, :].unflatten(-2, (2, 3)).mean(-3)), -2)
    final = mixer.attention_map(x, stage="final", source=a)
    close(mixer(x, source=a), mixer.proj((final @ pooled).transpose(-3, -2).flatten(-2)))


@pytest.mark.parametrize("size", [(16, 96), (48, 64)])
def test_a_model_with_a_shared_map_of_pooled_keys_takes_another_size(size: tuple[int, int]) -> None:
    """Also one with as many tokens, lying otherwise."""
    small: dict[str, Any] = {"img_size": (32, 48), "embed_dim": 12, "depth": 3, "num_heads": 3}
    options = {"mixer_options": {"resize": "pool_values"}, "shared_from": 1}
    model = create_model("vit_12b", mixer="static_key", **small, **options).double().eval()
    stir(model)
    model.set_input_size(size)
    seen: list[Tensor] = []
    first, later = (model.blocks[i].attn.mixer for i in (0, 2))
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    later.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    model(torch.randn(1, 3, *size, dtype=torch.float64))
    a = first.attention_map(seen[0])
    assert a.shape[-1] == 7
    v = resample.pool(later.inputs(seen[1], None)["v"], 1, first.site.grid, (2, 3))
    final = later.attention_map(seen[1], stage="final", source=a)
    close(seen[2], later.proj((final @ v).transpose(-3, -2).flatten(-2)))


def test_without_a_map_or_with_a_mask_it_refuses() -> None:
    mixer = layer()
    x, a = some_tokens(2), some_map(2)
    for call in (mixer, mixer.attention_map):
        with refused("source="):
            call(x)
        with refused("no bias"):
            call(x, source=a, bias=torch.zeros(7, 7, dtype=torch.float64))
    assert not mixer.claims.maskable


@together
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mixer", ["softmax", "re_attention", "static_key"])
def test_a_model_reads_as_table_3_says(mixer: str, training: bool) -> None:
    """Blocks before `first` as they are; later ones by the map of block first - 1, softmaxed."""
    first, depth = 2, 4
    model = create_model(
        "vit_12b",
        img_size=(32, 48),
        embed_dim=12,
        depth=depth,
        num_heads=3,
        num_classes=3,
        mixer=mixer,
        shared_from=first,
    )
    model.double().train(training)
    stir(model)
    images = torch.randn(2, 3, 32, 48, dtype=torch.float64)
    x = model.patch_embed(images)
    x = torch.cat((model.cls_token.expand(2, -1, -1), x), 1) + model.pos_embed
    unique = None
    for i, block in enumerate(model.blocks):
        tokens, inner = block.norm1(x), block.attn.mixer
        if i == first - 1:
            unique = inner.attention_map(tokens, stage="softmax")
        if i < first:
            v = inner.inputs(tokens, inner.site.grid)["v"]
            final = inner.attention_map(tokens, stage="final")
            mixed = inner.proj((final @ v).transpose(1, 2).flatten(2))
        else:
            mixed = equation_5(inner, tokens, unique)
        x = x + mixed
        x = x + block.mlp(block.norm2(x))
    wanted = model.head(model.norm(x)[:, 0])
    close(model(images), wanted)
