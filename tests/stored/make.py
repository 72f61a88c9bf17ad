# SPDX-License-Identifier: Apache-2.0
"""Make an archive of what one version of keymix writes, which later versions must open.

    cd tests/stored && python make.py NAME

writes ``NAME.tar.xz`` with runs, comparisons, analyses and a swap, small ones; `test_stored.py`
opens every archive that lies here. An archive stays as the version that made it wrote it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "compare")]

import few_masks  # noqa: E402

from keymix import cli  # noqa: E402
from keymix.compare.run import compare  # noqa: E402
from keymix.data.augment import Augment  # noqa: E402
from keymix.errors import Interrupted  # noqa: E402
from keymix.train import task  # noqa: E402
from keymix.train.engine import train  # noqa: E402
from keymix.train.recipe import (  # noqa: E402
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    replace_path,
)

DATA = "masks_data"
RECIPES = {
    "images": Recipe(
        name="images",
        data=DataConfig(spec="digits", limit=80, batch_size=16, eval_batch_size=64),
        augment=Augment(crop_padding=1),
        model=ModelConfig(
            name="vit_nano_p2_12",
            options={"depth": 2, "embed_dim": 16, "num_heads": 2},
            drop_rate=0.1,
        ),
        optim=OptimConfig(lr=1e-3, accumulate=2, clip_grad=1.0),
        schedule=ScheduleConfig(epochs=3, warmup_epochs=0.5),
        ema=0.9,
    ),
    "masks": replace_path(few_masks.recipe_of(Path(DATA)), {"schedule.epochs": 3}),
    "events": Recipe(
        name="events",
        data=DataConfig(spec="moving_digits:100", time_steps=2, batch_size=16),
        augment=Augment(snn_wide=True),
        model=ModelConfig(name="qkformer_micro_32", options={"embed_dim": 16, "num_heads": 2}),
        optim=OptimConfig(lr=4e-3, clip_grad=1.0),
        schedule=ScheduleConfig(epochs=3, warmup_epochs=1),
    ),
}
MIXERS = {"images": "mhsa,ska", "masks": "mhsa,kv", "events": "qkta,ssa"}

MORE: dict[str, list[str]] = {
    "attention": ["--limit", "1"],
    "collapse": ["--limit", "4"],
    "memory": ["--sides", "4,6", "--dim", "32", "--heads", "2"],
    "complexity": ["--tokens", "16,25", "--dim", "32", "--heads", "2", "--repeats", "2"],
    "spikes": ["--limit", "4"],
    "swap": ["--mixer", "ska", "--search", "--images", "16", "--held-out", "8", "--test"],
}


def stopped(recipe: Recipe, out: Path, *, steps: int) -> None:
    """Train into a folder until a number of steps began, and end it by SIGTERM."""
    begun = 0
    seed_of: Callable[..., int] = task.step_seed

    def seed(*place: Any) -> int:
        nonlocal begun
        begun += 1
        if begun == steps:
            signal.raise_signal(signal.SIGTERM)
        return seed_of(*place)

    with mock.patch.object(task, "step_seed", seed), suppress(Interrupted):
        train(recipe, out)
    assert not (out / "summary.json").exists()


def _drop_large(out: Path) -> None:
    """Delete the checkpoints that nothing is resumed from."""
    for place in out.glob("**/checkpoints"):
        names = sorted(path.name for path in place.iterdir())
        kept = names[-1:] if place.parent.name in ("run", "stopped") else []
        for name in set(names) - set(kept):
            (place / name).unlink()


def run(*words: str) -> None:
    assert cli.main(list(words)) == 0, words


def main(name: str) -> None:
    """Make every folder, and the archive of all."""
    os.chdir(HERE)
    if Path(f"{name}.tar.xz").exists():
        sys.exit(f"{name}.tar.xz is there: choose another name")
    out = Path("stored")
    out.mkdir()
    made = few_masks.made_masks(Path(DATA))
    try:
        for kind, recipe in RECIPES.items():
            train(recipe, out / kind / "run")
            stopped(recipe, out / kind / "stopped", steps=8)
            compare(
                recipe=replace_path(recipe, {"schedule.epochs": 2}),
                mixers=MIXERS[kind],
                seeds=2,
                controls=False,
                processes=1,
                out=out / kind / "comparison",
            )
        _drop_large(out)
        one, studies = str(out / "images" / "run"), out / "analyses"
        for study in ("attention", "collapse"):
            run("analyze", study, one, "--out", str(studies / study), *MORE[study])
        for study in ("memory", "complexity"):
            run("analyze", study, "--out", str(studies / study), *MORE[study])
        spiking = str(out / "events" / "run")
        run(
            "analyze", "spikes", spiking, "--out", str(out / "analyses" / "spikes"), *MORE["spikes"]
        )
        run("swap", one, "--out", str(out / "swap"), *MORE["swap"])
    finally:
        shutil.rmtree(made)
    with tarfile.open(f"{name}.tar.xz", "w:xz") as archive:
        archive.add(out, filter=_nobody)
    shutil.rmtree(out)


def _nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out whose file it was, and when."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main(sys.argv[1])
