# SPDX-License-Identifier: Apache-2.0
"""Which computation path a mixer with an attention map takes, and why."""

from __future__ import annotations

import torch

from keymix.errors import UserError
from keymix.mixers.base import BackendChoice

_STEPS = ("logits", "activate", "mix_after", "maps")


def own_step(cls: type) -> str | None:
    """Why a subclass is no plain softmax though it does not say so itself: a step it overrides."""
    for each in cls.__mro__:
        if "plain_softmax" in vars(each):  # whoever answers for these steps
            break
        for step in _STEPS:
            if step in vars(each):
                return f"{each.__name__} has {step}() of its own"
    return None


def choose(
    asked: str,
    mixer: str,
    against: str | None,
    *,
    dropping: bool,
    device: torch.device | None,
) -> BackendChoice:
    """Choose between the plain path and fused attention.

    Args:
        asked: ``"auto"``, or a path by name.
        mixer: Name of the mixer, for the message.
        against: Why fused attention cannot serve, None if it can.
        dropping: Whether entries of the map are dropped in this pass.
        device: Where it runs; the CPU if None.

    Raises:
        UserError: If a path was asked for by name that cannot run; with the reason.
    """
    if asked == "reference":
        return BackendChoice("reference", "asked for by name")
    if asked == "sdpa":
        if against is not None:
            raise UserError(f"backend='sdpa' cannot run here: {against}")
        return BackendChoice("sdpa", "asked for by name")
    if asked != "auto":
        raise UserError(
            f"backend={asked!r} does not exist for mixer {mixer!r}; choose 'auto', 'reference' or "
            "'sdpa'"
        )
    if against is not None:
        return BackendChoice("reference", against)
    on_cpu = device is None or device.type == "cpu"
    if on_cpu and dropping:
        return BackendChoice("reference", "attention dropout has no fused kernel on CPU")
    return BackendChoice("sdpa", "the map is a plain softmax of a product")
