# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are meant, where mixers are put."""

from __future__ import annotations

from collections.abc import Sequence

from keymix.analysis import capture
from keymix.analysis.capture import chosen_numbers
from keymix.errors import UserError
from keymix.hosts.layers import Layer

Layers = capture.Layers | None


def choose(found: Sequence[Layer], layers: Layers) -> list[Layer]:
    """Return the layers meant, in the model's order.

    Args:
        found: All layers of the model.
        layers: As :func:`keymix.analysis.capture.chosen_numbers` takes them.

    Raises:
        UserError: If one of them matches nothing; it names the nearest paths.
    """
    if not found:
        raise UserError("this model has no layer where a mixer could sit")
    names = [(layer.place.path, layer.path) for layer in found]
    return [found[i] for i in chosen_numbers(names, layers, "layers with attention")]
