# SPDX-License-Identifier: Apache-2.0
"""A trained spiking model takes another number of time steps than it was trained with."""

from __future__ import annotations

from torch import nn

from keymix.errors import UserError


def take_time_steps(model: nn.Module, time_steps: int) -> None:
    """Let a spiking model take so many steps T from the next call on.

    Paper: QKFormer, https://arxiv.org/abs/2403.16552, Table 5 varies T. No weight depends on it.

    Args:
        model: The model, changed in place.
        time_steps: 1 or more.

    Raises:
        UserError: If it has no time steps, or the number is none.
    """
    change = getattr(model, "set_time_steps", None)
    if change is None:
        raise UserError(
            f"time_steps={time_steps} is for spiking models such as qkformer_micro_32; "
            f"{type(model).__name__} has no time steps. Leave --time-steps out."
        )
    change(time_steps)
