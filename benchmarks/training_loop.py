# SPDX-License-Identifier: Apache-2.0
"""What keymix's training costs over a bare PyTorch loop on the same work.

    python benchmarks/training_loop.py                       # embedded digits, resized to 32x32
    python benchmarks/training_loop.py --data parquet:PATH   # CIFAR-10

Both train vit_micro_p4_32 on the same batches (same loader, crop and flip), with the same optimiser
and clipping. keymix adds Fabric, seeding, the schedule and the record of every loss; epochs of
the two alternate in one process, and validation and checkpoints, which the bare loop has none of,
lie outside the clock and are reported apart. A ratio of 1.00 is no loss.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_path import Trainer, served
from keymix import recipes
from keymix.train.engine import train
from keymix.train.model import load_data
from keymix.train.recipe import Recipe, replace_path
from measured import begin, options, spread, table

WARM_UP = 1  # epochs


def compare(recipe: Recipe) -> dict[str, list[float]]:
    """Seconds of every epoch: ``keymix``, ``bare``, and ``besides`` (validation, checkpoint)."""
    data = load_data(recipe.data)
    size = recipe.data.batch_size
    bare = Trainer(
        recipe, data, served(data, batch_size=size, augment=recipe.augment, seed=recipe.seed)
    )
    seconds: dict[str, list[float]] = {"keymix": [], "bare": [], "besides": []}

    def after(line: Mapping[str, Any]) -> None:
        """Keymix ended an epoch: the bare loop's turn."""
        trained = len(data.train) / line["images_per_s"]
        _, alone = bare.run(line["epoch"], -(-len(data.train) // size))
        if line["epoch"] >= WARM_UP:
            seconds["keymix"].append(trained)
            seconds["bare"].append(alone)
            seconds["besides"].append(line["seconds"] - trained)

    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run", progress=after, data=data)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--data", default="digits", metavar="SPEC")
    parser.add_argument("--limit", type=int, default=1280, help="images; default 1280")
    parser.add_argument("--repeats", type=int, default=7, help="epochs of each; default 7")
    given = begin(parser, argv)
    changed = {
        "data.spec": given.data,
        "data.limit": given.limit,
        "precision": "32",
        "schedule.epochs": given.repeats + WARM_UP,
    }
    seconds = compare(replace_path(recipes.get("small_images_vit"), changed))
    rows = [[name, *spread(values, ".3f")] for name, values in seconds.items()]
    pairs = zip(seconds["keymix"], seconds["bare"], strict=True)
    rows.append(["keymix / bare", *spread([own / bare for own, bare in pairs], ".3f")])
    table(("epoch, seconds", "median", "fastest", "slowest"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
