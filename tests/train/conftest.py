# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_runs import MOVING, on_masks

from keymix.data.augment import Augment
from keymix.train.recipe import DataConfig, ModelConfig, OptimConfig, Recipe, ScheduleConfig
from keymix.train.recipe import replace_path as replaced
from made_masks import write_uwgi

TINY = Recipe(
    name="tiny",
    data=DataConfig(spec="digits", limit=80, batch_size=16, eval_batch_size=64),
    augment=Augment(crop_padding=1),
    model=ModelConfig(
        name="vit_nano_p2_12",
        options={"depth": 1, "embed_dim": 16, "num_heads": 2},
        drop_rate=0.2,
    ),
    optim=OptimConfig(lr=1e-3),
    schedule=ScheduleConfig(epochs=3, warmup_epochs=0.5),
)


WILD = {
    "optim.name": "sgd",
    "optim.lr": 1e3,
    "optim.weight_decay": 100.0,
    "schedule.warmup_epochs": 0,
}
"""Fields of a training that diverges in its third step."""


@pytest.fixture(scope="session")
def tiny_recipe() -> Recipe:
    """A run of well under a second an epoch, with dropout, augmentation and warm-up."""
    return TINY


@pytest.fixture
def tiny(tiny_recipe: Recipe) -> Recipe:
    """The same, where a test needs no fixture of a wider scope."""
    return tiny_recipe


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe: Recipe, made_once: Callable[..., Path]) -> Path:
    """Folder of the tiny run, finished; a test that changes it works on a copy."""
    from keymix.train.engine import train

    return made_once("tiny", partial(train, tiny_recipe))


@pytest.fixture(scope="session")
def masks_run(made_once: Callable[..., Path]) -> Path:
    """Folder of a finished ``run`` on masks, and of its ``uwgi`` data; copied to be changed."""
    from keymix.train.engine import train

    def write(folder: Path) -> None:
        train(on_masks(write_uwgi(folder / "uwgi"), task__options__dice=0.5), folder / "run")

    return made_once("masks", write)


@pytest.fixture(scope="session")
def events_run(made_once: Callable[..., Path]) -> Path:
    """Folder of a finished run on recordings of events; a test that changes it works on a copy."""
    from keymix.train.engine import train

    return made_once("events", partial(train, MOVING))


@pytest.fixture
def vary(tiny: Recipe) -> Callable[..., Recipe]:
    """The tiny run with some fields replaced, by dotted key."""

    def change(overrides: dict[str, Any]) -> Recipe:
        return replaced(tiny, overrides)

    return change


@pytest.fixture
def wild(vary: Callable[..., Recipe]) -> Recipe:
    """The tiny run with a rate at which it diverges in its third step."""
    return vary(WILD)
