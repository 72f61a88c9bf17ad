# SPDX-License-Identifier: Apache-2.0
"""timm's MetaFormer block with its own layout: each block hears of the grid from its image.

timm's stage turns images into tokens for all of its blocks or for none, and its blocks never learn
the grid. Here a block takes and gives images, and lays them out as tokens inside if its mixer is
better served so; between two such blocks that costs no copy.
"""

from __future__ import annotations

from typing import Any

from timm.layers import LayerNorm, LayerNorm2d
from timm.models.metaformer import LayerNorm2dNoBias, LayerNormNoBias, MetaFormerStage, Scale
from torch import Tensor, nn

from keymix.hosts.grid_mixer import GridMixer
from keymix.mixers.base import Grid, to_image, to_tokens

# timm's norms over channels of an image, and the same over those of tokens
_TOKEN_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    LayerNorm2dNoBias: LayerNormNoBias,
    LayerNorm2d: LayerNorm,
}
_IMAGE_NORMS = {token: image for image, token in _TOKEN_NORMS.items()}


class GridBlock(nn.Module):
    """The parts of a timm ``MetaFormerBlock`` under their own names, between images.

    Args:
        block: timm's block, whose parts move here.
        use_nchw: Whether the parts work on images, as timm says of a stage; else on tokens.

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

    def __init__(self, block: nn.Module, *, use_nchw: bool) -> None:
        super().__init__()
        for name, part in block.named_children():
            self.add_module(name, part)
        self.use_nchw = use_nchw
        self.training = block.training

    def set_layout(self, use_nchw: bool) -> None:
        """Work on images or on tokens from now on, if the norms have both forms.

        The numbers stay: a 1x1 convolution becomes a linear map and the other way round.
        """
        norms = _IMAGE_NORMS if use_nchw else _TOKEN_NORMS
        both = (self.norm1, self.norm2)
        if use_nchw == self.use_nchw or any(type(norm) not in norms for norm in both):
            return
        self.norm1, self.norm2 = (_norm(norm, norms[type(norm)]) for norm in both)
        self.mlp.fc1, self.mlp.fc2 = _pointwise(self.mlp.fc1), _pointwise(self.mlp.fc2)
        for scale in (self.layer_scale1, self.res_scale1, self.layer_scale2, self.res_scale2):
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


def grid_blocks(stage: MetaFormerStage) -> None:
    """Let a stage hand images to its blocks, all of which become :class:`GridBlock`."""
    if all(isinstance(block, GridBlock) for block in stage.blocks):
        return
    blocks = [
        block if isinstance(block, GridBlock) else GridBlock(block, use_nchw=stage.use_nchw)
        for block in stage.blocks
    ]
    stage.blocks = nn.Sequential(*blocks).train(stage.blocks.training)
    stage.use_nchw = True


def _norm(norm: Any, form: type[nn.Module]) -> nn.Module:
    """Return the same norm over another layout's channels."""
    made = form(len(norm.weight), eps=norm.eps, device="meta")
    made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)


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
    return made.train(layer.training)
