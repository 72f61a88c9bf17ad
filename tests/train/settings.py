# SPDX-License-Identifier: Apache-2.0
"""Settings that several tests of training share."""

from __future__ import annotations

from typing import Any

# what keeps a state or draws a number, all at once, by dotted key
EVERYTHING: dict[str, Any] = {
    "ema": 0.9,
    "optim.accumulate": 2,
    "optim.clip_grad": 1.0,
    "loss.mixup": 0.4,
    "loss.cutmix": 1.0,
    "loss.label_smoothing": 0.1,
    "loss.similarity": 0.5,
    "model.options.depth": 2,  # the likeness of maps wants neighbours
    "model.drop_path": 0.1,
    "augment.erasing": 0.5,
}
