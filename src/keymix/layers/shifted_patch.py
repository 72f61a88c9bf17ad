# SPDX-License-Identifier: Apache-2.0
"""Shifted patch tokenisation: each patch sees its image and four shifted copies."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import PatchEmbed
from torch import Tensor, nn

from keymix.errors import KeymixWarning, UserError, unknown
from keymix.layers.patches import whole_size
from keymix.layers.shifts import SHIFTS

# direction of each copy's content: right and down are positive
_AXES = ((1, 0), (-1, 0), (0, 1), (0, -1))
_DIAGONALS = ((1, 1), (1, -1), (-1, 1), (-1, -1))


class ShiftedPatchEmbed(PatchEmbed):
    """Patch embedding of the image with four shifted copies of it.

    Paper: Vision Transformer for Small-Size Datasets, https://arxiv.org/abs/2112.13492, Sec. 4.1;
    part of the ViT-S baseline of SKA. The shifted copies are concatenated over channels, cut into
    patches, normalised (LayerNorm over 5 * in_chans * p^2 values) and projected.

    Args:
        img_size: Height and width of the image in pixels.
        patch_size: Side p of a patch in pixels.
        in_chans: Channels of the image.
        embed_dim: Width C of the tokens.
        bias: Bias of the projection.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
        shifts: How the copies are moved, zeros following: ``"axes"`` by one pixel right, left, down
            and up, as in the code behind SKA's baseline; ``"half_patch"`` along the diagonals by
            p // 2 pixels, as in the paper and its code; ``"diagonal"`` along the diagonals by one
            pixel, which is neither and was the only one in keymix before there was a choice. None
            is ``"axes"`` until weights are loaded whose record says another.
        timm: What else timm's ViT passes to its patch embedding (``dynamic_img_pad`` and the
            like); any that is set is refused.

    Shape: x ``[B, in_chans, H, W]`` -> ``[B, (H / p) * (W / p), C]``.

    Raises:
        UserError: If asked for an option of timm's patch embedding that it does not have, for
            unknown shifts, or for half of a patch of one pixel.
    """

    shifts: str = "diagonal"  # these two of modules pickled before there was a choice
    chosen: bool = True

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 4,
        in_chans: int = 3,
        embed_dim: int = 512,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        shifts: str | None = None,
        **timm: Any,
    ) -> None:
        asked = sorted(name for name, value in timm.items() if value)
        if asked:
            raise UserError(f"shifted patch embedding does not take {', '.join(asked)}")
        super().__init__(img_size, patch_size, in_chans, embed_dim, device="meta")
        self.chosen = shifts is not None  # or left to the weights
        self.take_shifts(SHIFTS[0] if shifts is None else shifts)
        width = 5 * in_chans * self.patch_size[0] * self.patch_size[1]
        self.norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.proj = nn.Linear(width, embed_dim, bias=bias, device=device, dtype=dtype)

    def take_shifts(self, shifts: str) -> None:
        """Move the copies in another way from the next call on; no weight depends on it.

        Args:
            shifts: As the constructor takes it.

        Raises:
            UserError: If there are no such shifts, or half a patch is no pixel.
        """
        self.check_shifts(shifts)
        self.shifts = shifts

    def check_shifts(self, shifts: str) -> None:
        """Refuse what `take_shifts` refuses, and change nothing.

        Args:
            shifts: As the constructor takes it.

        Raises:
            UserError: If there are no such shifts, or half a patch is no pixel.
        """
        if shifts not in SHIFTS:
            raise unknown("shifts", shifts, SHIFTS)
        height, width = self.patch_size
        if shifts == "half_patch" and min(height, width) < 2:
            raise UserError(
                f"{shifts=} moves by half a patch, which is no whole pixel of patches of "
                f"{height}x{width}; take shifts='axes', or larger patches"
            )

    def _copies(self, x: Float[Tensor, "B c H W"]) -> list[Float[Tensor, "B c H W"]]:
        """Return the image moved in the four directions."""
        half = self.shifts == "half_patch"
        down, right = [side // 2 if half else 1 for side in self.patch_size]
        directions = _AXES if self.shifts == "axes" else _DIAGONALS
        steps = [(right * across, down * along) for across, along in directions]
        # padding of one side and cropping of the other: left, right, top, bottom
        return [F.pad(x, (dx, -dx, dy, -dy)) for dx, dy in steps]

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Take another image size; the patch size is built in.

        Raises:
            UserError: If another patch size is asked for.
        """
        if patch_size is not None and whole_size("patch_size", patch_size) != self.patch_size:
            raise UserError("shifted patch embedding cannot change its patch size")
        super().set_input_size(img_size=img_size)

    def forward(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B N C"]:
        """Embed the patches."""
        if self.img_size is not None and tuple(x.shape[-2:]) != tuple(self.img_size):
            raise UserError(
                f"image is {tuple(x.shape[-2:])}, the model was built for {self.img_size}"
            )
        x = torch.cat((x, *self._copies(x)), 1)
        patches = F.unfold(x, self.patch_size, stride=self.patch_size).transpose(1, 2)
        out: Tensor = self.proj(self.norm(patches))
        return out


def shifted_in(model: nn.Module) -> list[ShiftedPatchEmbed]:
    """Return the patch embeddings of a model that shift.

    Args:
        model: Any model.
    """
    return [module for module in model.modules() if isinstance(module, ShiftedPatchEmbed)]


def take_recorded_shifts(
    model: nn.Module, shifts: str | None, called: str, *, stacklevel: int
) -> None:
    """Move a model's shifted patches as the record of its weights says.

    A model that was built with ``shifts=`` keeps its own, with a warning.

    Args:
        model: The model; it is changed in place, unless an error is raised.
        shifts: What the weights were trained with; None where no record says.
        called: The weights, in words.
        stacklevel: Whom the warning is for, as `warnings.warn` takes it.

    Raises:
        UserError: If there are no such shifts, or half a patch is no pixel.
    """
    others = [embed for embed in shifted_in(model) if shifts not in (None, embed.shifts)]
    free = [embed for embed in others if not embed.chosen]
    for embed in free:
        embed.check_shifts(str(shifts))
    for embed in free:
        embed.take_shifts(str(shifts))
    kept = next((embed.shifts for embed in others if embed.chosen), None)
    if kept is not None:
        text = f"{called} were trained with {shifts=}, and the model has shifts={kept!r}"
        warnings.warn(text, KeymixWarning, stacklevel=stacklevel)
