# SPDX-License-Identifier: Apache-2.0
"""Adapter to Hugging Face's ViT, DeiT and DINOv2: attention sits at ``….attention`` of each layer.

transformers is never imported here: whoever hands in one of its models has done so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.hosts.base import UNKNOWN, Host, Place, layout_on, patched
from keymix.hosts.call_grid import ConvGrid, attach_call_hook, call_hook_of, given_size, patches_of
from keymix.hosts.hosted import additive_mask
from keymix.mixers.base import Grid, Site, TokenMixer

FAMILIES = ("vit", "deit", "dinov2", "dinov2_with_registers")
SINCE = "5.20"  # from which on the attention of all four has one layout
PREFIX = ("cls_token", "distillation_token", "register_tokens")
ROLES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "proj": "o_proj"}


class HostedAttention(nn.Module):
    """Stands where a layer's attention stood, takes its call, returns no weights.

    ``config`` is the model's, which may ask for attention weights.
    """

    def __init__(self, mixer: TokenMixer, place: Place, call: ConvGrid, config: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self.place = place
        self.call = call
        self.config = config

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Mix the tokens ``[B, N, C]``; refuse to return weights, and masks it cannot honour."""
        config = getattr(self.config, "output_attentions", False)
        if kwargs.get("output_attentions", config):
            raise UserError(
                "the attention here is a mixer and returns no weights: call the model with "
                "output_attentions=False, and see the maps through keymix.attention_maps"
            )
        bias = _bias(attention_mask, hidden_states)
        if bias is not None and not self.mixer.claims.maskable:
            raise UserError(f"mixer {self.mixer.mixer_name!r} cannot honour an attention mask")
        grid = self.call.of(hidden_states, self.place.site.num_prefix_tokens)
        return self.mixer(hidden_states, grid=grid, bias=bias), None


class HuggingFaceViT(Host):
    """ViT, DeiT and DINOv2 (with registers, too) of Hugging Face's transformers.

    The mixer replaces queries, keys, values and the output projection; the layer's dropout and
    scale stay. Images of another size are taken as the model takes them (DINOv2 any, the others
    with ``interpolate_pos_encoding=True``).

    Sites have the grid of ``config.image_size`` (DINOv2's is the one it was trained on last,
    518x518), unless the model was given an attribute ``image_size``, a side or (height, width) in
    pixels, before mixers are put.
    """

    name = "Hugging Face ViT, DeiT and DINOv2"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is one of transformers' classes, a bare model or one with a head."""
        return of_family(type(model)) and _patch_embeddings(model) is not None

    def places(self, model: nn.Module) -> list[Place]:
        """One place per layer."""
        embeddings = _patch_embeddings(model)
        if embeddings is None:
            raise UserError(f"{type(model).__name__} is no model of {self.name}")
        grid = _grid(model, embeddings)
        tokens = (getattr(embeddings, name, None) for name in PREFIX)
        prefix = sum(token.shape[1] for token in tokens if token is not None)
        places = []
        for path, attention in _attentions(model):
            if isinstance(attention, HostedAttention):
                before = attention.place
                places.append(replace(before, site=replace(before.site, grid=grid)))
                continue
            own = _checked(path, attention)
            dim, heads = own.q_proj.in_features, own.num_attention_heads
            options = {
                "qkv_bias": own.q_proj.bias is not None,
                "proj_bias": own.o_proj.bias is not None,
                "attn_drop": own.attention_dropout,
            }
            if own.head_dim * heads != dim:
                options["head_dim"] = own.head_dim
            site = Site(dim=dim, num_heads=heads, grid=grid, num_prefix_tokens=prefix)
            places.append(Place(path=path, stage=0, site=site, defaults=options))
        return places

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as the model draws its own."""
        owner: Any = model
        for linear in mixer.projections:
            owner._init_weights(linear)
        call = attach_call_hook(_patch_embeddings(model).patch_embeddings.projection, ConvGrid())
        call.keep_at(model.get_submodule(place.path.rpartition(".")[0]))
        before: Any = model.get_submodule(place.path)
        hosted = HostedAttention(mixer, place, call, before.config)
        model.set_submodule(place.path, hosted.train(before.training))

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return queries, keys and values of a call, ``[B, h, N, d]``."""
        own = _checked("attention", attention)
        given = dict(zip(("hidden_states", "attention_mask"), args, strict=False)) | dict(kwargs)
        x: Tensor = given["hidden_states"]
        q, k, v = (
            t.reshape(*t.shape[:-1], -1, own.head_dim).transpose(-3, -2)
            for t in (own.get_submodule(ROLES[role])(x) for role in "qkv")
        )
        mask = _bias(given.get("attention_mask"), x)
        return Reading(q=q, k=k, v=v, scale=own.scaling, bias=mask)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections."""
        own = _checked("attention", attention)
        return {
            f"{role}.{part}": parameter.detach()
            for role, name in ROLES.items()
            for part, parameter in own.get_submodule(name).named_parameters()
        }

    def follow_calls(self, model: nn.Module) -> None:
        """Record the grid of patches of the model's calls, from now on."""
        attach_call_hook(_patch_embeddings(model).patch_embeddings.projection, ConvGrid())

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of a place were in the model's last call."""
        call = call_hook_of(_patch_embeddings(model).patch_embeddings.projection, ConvGrid)
        grid = None if call is None else call.grid
        return layout_on(model, place, grid or place.site.grid)


def of_family(kind: type) -> bool:
    """Whether a class, or one it inherits from, is of transformers' models served here."""
    packages = {f"transformers.models.{name}" for name in FAMILIES}
    return any(cls.__module__.rpartition(".")[0] in packages for cls in kind.__mro__)


def _patch_embeddings(model: Any) -> Any:
    """Return the module that makes a model's tokens, None if it has none."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    embeddings = getattr(base, "embeddings", None)
    conv = getattr(getattr(embeddings, "patch_embeddings", None), "projection", None)
    return embeddings if isinstance(conv, nn.Conv2d) else None


def _grid(model: nn.Module, embeddings: Any) -> Grid:
    patches = embeddings.patch_embeddings
    size = given_size(model) or whole_size("image_size", patches.image_size)
    return patches_of(patches.projection, size)


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every layer's attention."""
    for path, layer in model.named_modules():
        attention = getattr(layer, "attention", None)
        if attention is not None and of_family(type(layer)) and hasattr(layer, "mlp"):
            yield f"{path}.attention", attention


def _checked(path: str, attention: Any) -> Any:
    """Refuse what is not attention as these models have it."""
    name = type(attention).__name__
    package = type(attention).__module__.rpartition(".")[0]
    if package not in {f"transformers.models.{family}" for family in FAMILIES}:
        raise UserError(
            f"{path} is {name}, not transformers' own, so what a mixer in its place would lose is "
            "not known"
        )
    if patched(attention):
        raise UserError(f"the forward of {path} ({name}) was replaced: {UNKNOWN}")
    parts = dict(attention.named_children())
    if parts.keys() != set(ROLES.values()):
        raise UserError(
            f"{path} holds {', '.join(parts)}, where keymix knows "
            f"{', '.join(ROLES.values())}; take transformers {SINCE} or later"
        )
    for part, module in parts.items():
        if type(module) is not nn.Linear:
            raise UserError(
                f"{path}.{part} is {type(module).__name__}, not a plain Linear, so what a mixer in "
                "its place would lose is not known"
            )
    return attention


def _bias(mask: Any, x: Tensor) -> Tensor | None:
    """Turn the mask that a layer is handed into an additive one; booleans say who may attend."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        raise UserError(
            "the model's attention implementation hands its layers a mask that is no tensor "
            "[B, 1, N, N]; choose another: model.set_attn_implementation('sdpa')"
        )
    return additive_mask(mask, x)


HOSTS = (HuggingFaceViT(),)
