# SPDX-License-Identifier: Apache-2.0
"""One step at a time: a network of spiking neurons fed with frames as they come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from keymix.layers.step_mode import Stepping

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def stepping(model: Model) -> Iterator[Model]:
    """Let all neurons of a model take one step a call, from rest and with state, within the block.

    Afterwards, and after an exception, they take ``[T, *]`` from rest as before and the state is
    gone. With norms in evaluation mode, T calls compute what one call on T steps computes.

    Args:
        model: Any module; its neurons are ours, or were made by
            :func:`keymix.layers.neurons.neuron_maker`.

    Yields:
        The model.
    """
    neurons = [part for part in model.modules() if isinstance(part, Stepping)]
    before = [neuron.step_mode for neuron in neurons]
    try:
        for neuron in neurons:
            neuron.step_mode = "s"
            neuron.reset()
        yield model
    finally:
        for neuron, mode in zip(neurons, before, strict=True):
            if neuron.step_mode != mode:
                neuron.step_mode = mode
            neuron.reset()
