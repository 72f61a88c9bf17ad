# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's MetaFormer: the mixer sits at ``stages.<s>.blocks.<i>.token_mixer``.

timm's stage turns images into tokens for all of its blocks or for none, and its blocks never learn
the grid. Here a block takes and gives images, and turns them into tokens inside if its mixer is
better served so; between two such blocks that costs no copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from timm.layers import LayerNorm, LayerNorm2d, Mlp
from timm.models.metaformer import (
    Attention,
    LayerNorm2dNoBias,
    LayerNormNoBias,
    MetaFormer,
    MetaFormerBlock,
    MetaFormerStage,
    Scale,
)
from torch import Tensor, nn

from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import UNKNOWN, Place, draw_truncated, patched
from keymix.hosts.call_grid import patches_of
from keymix.hosts.hosted import GridMixer
from keymix.hosts.stages import StageHost
from keymix.hosts.timm_heads import own_weights, projections_of, read_call
from keymix.mixers.base import Grid, Site, TokenMixer, to_image, to_tokens
from keymix.mixers.head_mixer import HeadMixer

HEAD_DIM = 32  # width of a head in CAFormer

# the family's own mixers: MetaFormer Baselines, https://arxiv.org/abs/2210.13452, Sec. 3
FORMS: dict[str, dict[str, Any]] = {
    "sep_conv": {"kernel_size": 7, "expansion": 2.0, "act": "star_relu", "conv_bias": False},
}


# timm's norms over channels of an image, and the same over those of tokens
_TOKEN_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    LayerNorm2dNoBias: LayerNormNoBias,
    LayerNorm2d: LayerNorm,
}
_IMAGE_NORMS = {token: image for image, token in _TOKEN_NORMS.items()}


class GridBlock(MetaFormerBlock):
    """A timm ``MetaFormerBlock`` between images, its parts as they are, under their own names.

    They work on images if ``use_nchw``, as timm says of a stage; else on tokens. What else was
    attached to timm's block is attached to this one: hooks are called with images from now on, in a
    stage of tokens too.

    Shape: x ``[B, C, H, W]`` -> the same.
    """

    # timm's parts, by timm's names
    norm1: Any
    token_mixer: Any
    drop_path1: Any
    layer_scale1: Any
    res_scale1: Any
    norm2: Any
    mlp: Any
    drop_path2: Any
    layer_scale2: Any
    res_scale2: Any

    def __init__(self, block: MetaFormerBlock, *, use_nchw: bool) -> None:
        nn.Module.__init__(self)  # timm's would make parts of its own
        self.__dict__.update(block.__dict__)
        self._modules = dict(block._modules)
        self.use_nchw = use_nchw

    def set_layout(self, use_nchw: bool) -> None:
        """Work on images or on tokens from now on, if all parts have both forms.

        The numbers stay: a 1x1 convolution becomes a linear map and the other way round. Their
        weights are new parameters then, since the shape is another: an optimizer of the old ones
        must be handed the new. Hooks of a part run, in the other layout. A block with a part that
        has one form alone (a norm of PoolFormer's, an adapter of low rank, a weight that is
        computed) stays as it is.
        """
        if use_nchw == self.use_nchw or not _turns(self, use_nchw):
            return
        norms = _IMAGE_NORMS if use_nchw else _TOKEN_NORMS
        self.norm1, self.norm2 = (_norm(n, norms[type(n)]) for n in (self.norm1, self.norm2))
        self.mlp.fc1, self.mlp.fc2 = _pointwise(self.mlp.fc1), _pointwise(self.mlp.fc2)
        for scale in _scales(self):
            if isinstance(scale, Scale):
                scale.shape = (len(scale.scale), 1, 1) if use_nchw else (len(scale.scale),)
        self.use_nchw = use_nchw

    def forward(self, x: Tensor) -> Tensor:
        """Mix, then transform each token."""
        if self.use_nchw:
            return self._run(x, None)
        lead = x.shape[:1]
        grid = (x.shape[-2], x.shape[-1])
        return to_image(self._run(to_tokens(x, lead), grid), grid)

    def _run(self, x: Tensor, grid: Grid | None) -> Tensor:
        mixed = self._mix(self.norm1(x), grid)
        x = self.res_scale1(x) + self.layer_scale1(self.drop_path1(mixed))
        transformed = self.mlp(self.norm2(x))
        out: Tensor = self.res_scale2(x) + self.layer_scale2(self.drop_path2(transformed))
        return out

    def _mix(self, x: Tensor, grid: Grid | None) -> Tensor:
        """Call the mixer with tokens and grid; timm's own takes the block's layout."""
        mixed: Tensor
        if not isinstance(self.token_mixer, GridMixer):
            mixed = self.token_mixer(x)
        elif grid is not None:
            mixed = self.token_mixer(x, grid)
        else:
            grid = (x.shape[-2], x.shape[-1])
            mixed = to_image(self.token_mixer(to_tokens(x, x.shape[:1]), grid), grid)
        return mixed


_BLOCKS = (MetaFormerBlock, GridBlock)


def grid_blocks(stage: MetaFormerStage, index: int) -> GridBlock:
    """Let a stage hand images to its blocks, and return one of them as a :class:`GridBlock`.

    In a stage that hands on images already the others stay as they are.
    """
    for i in [index] if stage.use_nchw else range(len(stage.blocks)):
        if not isinstance(stage.blocks[i], GridBlock):
            stage.blocks[i] = GridBlock(stage.blocks[i], use_nchw=stage.use_nchw)
    stage.use_nchw = True
    made = stage.blocks[index]
    assert isinstance(made, GridBlock)
    return made


def why_not(stage: MetaFormerStage, path: str, index: int, *, use_nchw: bool) -> str | None:
    """Say why a block of a stage cannot take a mixer, with the remedy; None if it can.

    ``use_nchw`` says whether the mixer works on images. What a block or a part of it computes must
    be what timm's class does, where it is to compute the same in another layout.
    """
    own = f"{path}.blocks.{index}"
    reasons = [_unlike(stage.blocks[index], own, _BLOCKS, own)]
    if not stage.use_nchw:  # it will hand on images from now on
        named = [(f"{path}.blocks.{i}", block) for i, block in enumerate(stage.blocks)]
        reasons += [_unlike(stage, path, (MetaFormerStage,), path)]
        reasons += [_unlike(block, where, _BLOCKS, path) for where, block in named]
    found = next((reason for reason in reasons if reason is not None), None)
    if found is not None:
        return found
    block: Any = stage.blocks[index]
    here = block.use_nchw if isinstance(block, GridBlock) else stage.use_nchw
    if use_nchw == here or not _turns(block, use_nchw):
        return None
    reasons = [
        _replaced(part, f"{own}.{name}")
        for name, part in block.named_modules()
        if name.partition(".")[0] != "token_mixer"
    ]
    return next((reason for reason in reasons if reason is not None), None)


def _unlike(module: nn.Module, path: str, kinds: tuple[type, ...], leave: str) -> str | None:
    kind = type(module)
    if kind not in kinds:
        return (
            f"{path} is {kind.__module__}.{kind.__qualname__}, and only timm's own "
            f"{kinds[0].__name__} is known to compute the same with a mixer of keymix in its "
            f"stage; leave {leave} out (layers=)"
        )
    return _replaced(module, path)


def _replaced(module: nn.Module, path: str) -> str | None:
    name = type(module).__name__
    return f"the forward of {path} ({name}) was replaced: {UNKNOWN}" if patched(module) else None


def _turns(block: Any, use_nchw: bool) -> bool:
    """Whether all parts of a block but its mixer have the other layout's form."""
    norms, mlp = _IMAGE_NORMS if use_nchw else _TOKEN_NORMS, block.mlp
    return (
        all(type(norm) in norms and _own_weight(norm) for norm in (block.norm1, block.norm2))
        and type(mlp) is Mlp
        and type(mlp.norm) is nn.Identity
        and _is_pointwise(mlp.fc1)
        and _is_pointwise(mlp.fc2)
        and all(type(scale) in (Scale, nn.Identity) for scale in _scales(block))
    )


def _scales(block: Any) -> tuple[nn.Module, ...]:
    return block.layer_scale1, block.res_scale1, block.layer_scale2, block.res_scale2


def _own_weight(module: nn.Module) -> bool:
    """Whether the weight is a parameter, not what a norm or a mask makes of others."""
    return module._parameters.get("weight") is not None


def _is_pointwise(layer: nn.Module) -> bool:
    """Whether it is a linear map of channels and nothing else."""
    if type(layer) is nn.Conv2d:
        plain = layer.kernel_size == layer.stride == (1, 1) and layer.padding == (0, 0)
        return plain and layer.groups == 1 and _own_weight(layer)
    return type(layer) is nn.Linear and _own_weight(layer)


def _norm(norm: Any, form: type[nn.Module]) -> nn.Module:
    """Return the same norm over another layout's channels."""
    made = form(len(norm.weight), eps=norm.eps, device="meta")
    made.weight, made.bias = norm.weight, norm.bias
    return _hooked_as(norm, made).train(norm.training)


def _pointwise(layer: nn.Module) -> nn.Module:
    """Turn a 1x1 convolution into the linear map that it is, or back."""
    made: nn.Module
    assert isinstance(layer, nn.Linear | nn.Conv2d)  # timm's MLP has one or the other
    weight, bias = layer.weight, layer.bias is not None
    factory: dict[str, Any] = {"bias": bias, "device": "meta", "dtype": weight.dtype}
    if isinstance(layer, nn.Conv2d):
        made, numbers = nn.Linear(weight.shape[1], weight.shape[0], **factory), weight.flatten(1)
    else:
        made = nn.Conv2d(weight.shape[1], weight.shape[0], 1, **factory)
        numbers = weight[..., None, None]
    made.weight = nn.Parameter(numbers.detach().clone(), requires_grad=weight.requires_grad)
    made.bias = layer.bias
    return _hooked_as(layer, made).train(layer.training)


def _hooked_as(old: nn.Module, new: nn.Module) -> nn.Module:
    """Hang the hooks of one module on another, where their handles remove them still."""
    vars(new).update({name: hook for name, hook in vars(old).items() if "_hook" in name})
    return new


@dataclass(frozen=True, kw_only=True)
class BlockPlace(Place):
    """A place in a block; ``refused``: why no mixer on images (True), on tokens (False) fits."""

    refused: Mapping[bool, str] = field(default_factory=dict)


class TimmMetaFormer(StageHost):
    """timm's MetaFormer: PoolFormer, ConvFormer, CAFormer.

    A block whose mixer has heads works on tokens, any other on images, as timm has it of its
    attention; where a part has no other form (PoolFormer's norms), as the block does already.
    """

    name = "timm MetaFormer"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class."""
        return isinstance(model, MetaFormer)

    def places(self, model: nn.Module) -> list[Place]:
        """One place per block."""
        if not isinstance(model, MetaFormer):
            raise UserError(f"{type(model).__name__} is not timm's MetaFormer")
        return [
            _place(s, i, grid, model)
            for s, (stage, grid) in enumerate(
                zip(model.stages, stage_grids(model, image_size(model)), strict=True)
            )
            for i in range(len(stage.blocks))
        ]

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Return the place's site; refuse a block that would lose what somebody put there."""
        use_nchw = _on_images(mixer)
        if isinstance(place, BlockPlace) and use_nchw in place.refused:
            raise UserError(place.refused[use_nchw])
        return place.site

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its linear maps initialised as timm initialises the model's."""
        mine = mixer.modules() if mixer.mixer_name in FORMS else mixer.projections
        for part in mine:
            if isinstance(part, nn.Linear | nn.Conv2d):
                draw_truncated(part)
        stage_path, _, index = place.path.removesuffix(".token_mixer").rpartition(".blocks.")
        stage: Any = model.get_submodule(stage_path)
        block = grid_blocks(stage, int(index))
        block.token_mixer = GridMixer(mixer, place).train(block.training)
        block.set_layout(use_nchw=_on_images(type(mixer)))

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what attention makes of a call; a convolution or pooling there forms no map."""
        _check(attention)
        return read_call(attention, args, kwargs)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the own projections of attention, by their role in a mixer."""
        _check(attention)
        return own_weights(attention)

    def first(self, model: nn.Module) -> nn.Module:
        """The stem, which gets the images."""
        return model.get_submodule("stem")

    def image(self, model: nn.Module) -> Grid:
        """Height and width of the images it was made for."""
        return image_size(model)

    def grids(self, model: nn.Module, image: Grid) -> list[Grid]:
        """Grid of the tokens in every stage."""
        return stage_grids(model, image)


def _check(mixer: nn.Module) -> None:
    """Refuse what is not attention as timm computes it."""
    name = type(mixer).__name__
    if not isinstance(mixer, Attention):
        raise NoAttentionMap(f"{name} of timm's MetaFormer is no attention: it forms no map")
    if patched(mixer):
        raise UserError(f"the forward of timm's MetaFormer's {name} was replaced: {UNKNOWN}")


def image_size(model: nn.Module) -> Grid:
    """Height and width in pixels of the images a MetaFormer is made for.

    Ours know; timm's say it in their ``pretrained_cfg``, and are 224x224 where they have none.
    """
    known: Any = getattr(model, "img_size", None)
    if known is None:
        described: Any = getattr(model, "pretrained_cfg", None) or {}
        known = described.get("input_size", (3, 224, 224))[-2:]
    return known[0], known[1]


def stage_grids(model: nn.Module, image: Grid) -> list[Grid]:
    """Grid of every stage, for images of this height and width in pixels."""
    assert isinstance(model, MetaFormer)
    grids, grid = [], patches_of(model.stem.conv, image)
    for stage in model.stages:
        conv = getattr(stage.downsample, "conv", None)
        grid = patches_of(conv, grid) if conv is not None else grid
        grids.append(grid)
    return grids


def _on_images(mixer: type[TokenMixer]) -> bool:
    """Whether a block with such a mixer works on images; with heads it works on tokens."""
    return not issubclass(mixer, HeadMixer)


def _place(s: int, i: int, grid: Grid, model: MetaFormer) -> Place:
    stage: Any = model.stages[s]
    block: Any = stage.blocks[i]
    mixer = block.token_mixer
    reasons = {
        on_images: why_not(stage, f"stages.{s}", i, use_nchw=on_images)
        for on_images in (True, False)
    }
    refused = {layout: reason for layout, reason in reasons.items() if reason is not None}
    if isinstance(mixer, GridMixer):
        before = mixer.place
        site = replace(before.site, grid=grid)
        return BlockPlace(**{**vars(before), "site": site, "refused": refused})
    dim = len(block.norm1.weight)
    if isinstance(mixer, Attention):
        heads, defaults = mixer.num_heads, {"head_dim": mixer.head_dim, **projections_of(mixer)}
    else:
        head_dim = getattr(model, "head_dim", HEAD_DIM)
        heads = max(dim // head_dim, 1)
        defaults = {
            "head_dim": head_dim,
            "qkv_bias": False,
            "proj_bias": False,
            "attn_drop": getattr(model, "attn_drop_rate", 0.0),
            "proj_drop": block.mlp.drop1.p,
        }
    return BlockPlace(
        path=f"stages.{s}.blocks.{i}.token_mixer",
        stage=s,
        site=Site(dim=dim, num_heads=heads, grid=grid),
        defaults=defaults,
        forms=FORMS,
        refused=refused,
    )


HOSTS = (TimmMetaFormer(),)
