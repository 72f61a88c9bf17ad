# SPDX-License-Identifier: Apache-2.0
"""What marks a model whose mixers sit in a part of it that a host knows."""

from __future__ import annotations

from torch import nn


class Encoded(nn.Module):
    """Mix-in for dense models: all tokens of an encoder are read as a map by what follows it.

    Attributes:
        encoder: The part, a model by itself or what wraps one.
        encoder_path: Path of the model in which attention sits.
    """

    encoder: nn.Module
    encoder_path: str = "encoder"


def encoder_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the part in which attention sits, and what stands before its names.

    Args:
        model: A dense model; another is all encoder, and nothing stands before.
    """
    if not isinstance(model, Encoded):
        return model, ""
    return model.get_submodule(model.encoder_path), f"{model.encoder_path}."
