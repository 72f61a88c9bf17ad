# SPDX-License-Identifier: Apache-2.0
"""What is said of a network whose answers say nothing of it, such as one answer for all images."""

from __future__ import annotations

import math
import warnings

from keymix.analysis.answers import Answers
from keymix.errors import KeymixWarning
from keymix.models.factory import domain_of
from keymix.train.recipe import ModelConfig

DIVERGED = "its outputs are NaN or infinite, so training diverged: lower --optim.lr"
SILENT = (
    "its spikes die out on the way, or it has learned nothing yet: train more epochs, or with a "
    "lower --optim.lr"
)
UNTRAINED = "it has learned nothing yet, or training diverged: train more epochs, lower --optim.lr"


def warn_of_degenerate(
    answers: Answers, model: ModelConfig, inputs: str, loss: float | None
) -> None:
    """Warn of answers that say nothing of a model, and say why it may be so.

    Args:
        answers: To all inputs of a split.
        model: What was trained.
        inputs: What was answered, such as ``test images``.
        loss: Mean loss over them; None or not finite where training diverged.
    """
    if loss is not None and not math.isfinite(loss):
        why = DIVERGED
    elif domain_of(model.name) == "spiking" and model.options.get("neuron") != "relu":
        why = f"probably {SILENT}"
    else:
        why = f"probably {UNTRAINED}"
    unscorable = answers.unscorable()
    found = [unscorable] if unscorable else [f"{each}: {why}" for each in answers.degenerate()]
    for text in found:
        warnings.warn(text.replace("{inputs}", inputs), KeymixWarning, stacklevel=3)
