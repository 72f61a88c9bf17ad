# SPDX-License-Identifier: Apache-2.0
"""What scores a model: batches, the sums of an evaluation, and the precision of computing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from keymix.analysis.passes import Inputs as Inputs  # noqa: PLC0414
from keymix.train import ranks

Metrics = dict[str, float | None]
"""Scores by name, None where one is not defined."""


class ImageBatch(Protocol):
    """What a loader yields: prepared inputs, targets as the task reads them, positions [B]."""

    @property
    def images(self) -> Inputs: ...  # noqa: D102

    @property
    def targets(self) -> Any: ...  # noqa: D102

    @property
    def index(self) -> Tensor: ...  # noqa: D102


Flips = Literal["horizontal", "both"]
"""Mirror images that are answered too: left to right; or these, top to bottom, and both at once."""


class Mirrored(nn.Module):
    """Averages a model's logits of images and of their mirror images, as nnU-Net does.

    Shape: ``[B, C, H, W]`` -> ``[B, K, H, W]``.
    """

    def __init__(self, model: nn.Module, flips: Flips) -> None:
        super().__init__()
        self.model = model
        self.axes = [(-1,)] if flips == "horizontal" else [(-1,), (-2,), (-2, -1)]

    def forward(self, x: Tensor) -> Tensor:
        """Answer each mirror image, and turn its logits back."""
        total = self.model(x)
        for axes in self.axes:
            total = total + self.model(x.flip(axes)).flip(axes)
        return torch.as_tensor(total / (1 + len(self.axes)))


Outputs = Iterator[tuple[ImageBatch, Any]]
"""Batches, each with what a model returned for it."""


def stacked(inputs: Inputs) -> Tensor:
    """Return a batch as one tensor, for what takes no list."""
    return inputs if isinstance(inputs, Tensor) else torch.stack(inputs)


def device_of(inputs: Inputs) -> torch.device:
    """Return the device of a batch."""
    return inputs.device if isinstance(inputs, Tensor) else inputs[0].device


def answered(
    model: nn.Module, batches: Iterable[ImageBatch], *, device: torch.device, precision: str
) -> Outputs:
    """Put a model in eval mode on a device, and yield each batch with what it returns for it."""
    model.eval()
    if any(parameter.device.type != device.type for parameter in model.parameters()):
        model.to(device)  # never of a model in parts, which it would take apart
    for batch in batches:
        with autocast(device, precision):
            outputs = model(batch.images)
        yield batch, outputs


class ValidationScores(nn.Module):
    """Scores of an evaluation, from sums over its batches, which `update` adds to.

    They are given as zeros by name, become attributes, and move with the module.
    """

    def __init__(self, **sums: Tensor) -> None:
        super().__init__()
        for name, zeros in sums.items():
            self.register_buffer(name, zeros, persistent=False)

    @abstractmethod
    def update(self, outputs: Any, targets: Any) -> object:
        """Take in a batch: what the model gave, and the truth."""

    @abstractmethod
    def metrics(self) -> Metrics:
        """The scores since the last call, by the keys of the task."""

    def taken(self) -> dict[str, Tensor]:
        """Return the sums over the batches of all ranks since the last call."""
        found = {name: ranks.total(each) for name, each in self.named_buffers()}
        for each in self.buffers():
            each.zero_()
        return found


def effective_precision(precision: str, device: torch.device) -> str:
    """Return ``32``, ``bf16`` or ``16``: a recipe's ``auto`` is bfloat16 on CUDA, else 32 bits."""
    if precision == "auto":
        return "bf16" if device.type == "cuda" else "32"
    return precision


def autocast(device: torch.device, precision: str, *, cache: bool = True) -> torch.autocast:
    """The context that a recipe's precision means on a device, see `effective_precision`.

    `cache` converts a weight that is used twice once; its gradients are then summed in the low
    precision.
    """
    bits = effective_precision(precision, device)
    dtype = torch.float16 if bits == "16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=bits != "32", cache_enabled=cache)
