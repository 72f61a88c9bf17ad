# SPDX-License-Identifier: Apache-2.0
"""A small QKFormer on moving digits, recordings of events in four frames: the default for events.

No download, a few minutes on one thread of a CPU. `keymix compare` takes it for every data set of
events, and for spiking mixers where no data are named.

    keymix train moving_digits_qkformer --out moving
    keymix compare --data moving_digits --mixers qkta,qkca,ssa --out moving-cmp

Paper: none; the model is QKFormer's (https://arxiv.org/abs/2403.16552) made small. Data: events
that a camera of 32x32 pixels would see of scikit-learn's digits; 1,213 recordings train, 135
validation, 449 test.
Measured: test top-1 of the last epoch over seeds 0, 1, 2, mean ± standard deviation, 84.8 ± 1.8 %
(validation 81.7 ± 2.8 %; chance 10 %), by the first command with `--seed 0`, `1`, `2`; 266, 288 and
351 s a run on one thread of a Xeon whose two cores other programs kept busy, torch 2.15. The
learning rate was chosen among 1e-3, 2e-3 and 4e-3 by one run each at another seed, on validation.
"""

from __future__ import annotations

from keymix.data.augment import Augment
from keymix.train.recipe import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
)


def recipe() -> Recipe:
    """The run, complete."""
    return Recipe(
        name="moving_digits_qkformer",
        data=DataConfig(spec="moving_digits", time_steps=4, batch_size=32),
        augment=Augment(snn_wide=True),
        model=ModelConfig(name="qkformer_micro_32"),
        optim=OptimConfig(name="adamw", lr=4e-3, weight_decay=0.05, clip_grad=1.0),
        schedule=ScheduleConfig(name="cosine", epochs=20, warmup_epochs=1),
    )
