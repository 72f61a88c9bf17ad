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
