# SPDX-License-Identifier: Apache-2.0
"""Test accuracy at other resolutions than the training's, for both policies of learned positions.

    python benchmarks/resolutions.py --data parquet:data/cifar10 --out resolutions
    python benchmarks/resolutions.py --data parquet:data/cifar10 --markdown docs/resolutions.md

Trains a small ViT with each mixer at one side, then scores each on the same test images at every
size: the model takes the size through ``set_input_size``, under each policy its mixer has. A run
that is done is not trained again. Prints a table, writes ``resolutions.json`` into the folder, and
with ``--markdown`` puts the table between the page's two marks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a process, two processes

import torch
from torch import nn

import keymix
from keymix.cli.console import parse_size
from keymix.data.loaders import Loader
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers.resize import GridBound
from keymix.mixers.spec import parse_mixers
from keymix.models.image_size import POLICIES, set_image_size
from keymix.recipes.small import small_images_vit
from keymix.tasks.classification.answers import ANSWERS
from keymix.train.model import load_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.runs import load_run

MIXERS = "softmax,static_key,conv_static_key,key_value,key_value(pos_dim=16)"
MARKS = ("<!-- resolutions -->", "<!-- /resolutions -->")


@dataclass(frozen=True)
class Score:
    """Accuracy of one run at one size."""

    mixer: str
    resize: str | None
    seed: int
    height: int
    width: int
    top1: float
    loss: float
    images: int


def recipe_of(args: argparse.Namespace, mixer: str, seed: int) -> Recipe:
    """The run of a mixer at a seed: ``small_images_vit`` with the sizes asked for."""
    return replace_path(
        small_images_vit(),
        {
            "data.spec": args.data,
            "data.limit": args.limit,
            "data.image_size": args.side,
            "model.mixer": mixer,
            "model.options": {"depth": args.depth},
            "schedule.epochs": args.epochs,
            "schedule.warmup_epochs": min(1.0, args.epochs / 6),
            "seed": seed,
        },
    )


def policies(model: nn.Module) -> tuple[str | None, ...]:
    """The policies that matter to a model: both where a mixer holds something per position."""
    mixers = find_mixers(model).values()
    holds = any(isinstance(m, GridBound) and m.bound for m in mixers)
    return POLICIES if holds else (None,)


def train(job: tuple[Recipe, Path]) -> None:
    """Train one run, unless it is done."""
    torch.set_num_threads(1)
    recipe, folder = job
    began = time.monotonic()
    keymix.train(recipe, folder)
    say(f"{folder.name}: trained ({time.monotonic() - began:.0f} s)")


def score_at(job: tuple[list[Path], tuple[int, int], int]) -> list[Score]:
    """Score all runs at one size on the same images."""
    torch.set_num_threads(1)
    folders, size, images = job
    began = time.monotonic()
    data, found = None, []
    for folder in folders:
        run = load_run(folder)
        facts = run.weights()[1].data
        if data is None:
            data = load_data(replace(run.recipe.data, limit=images), image_size=size)
        seen = replace(data, mean=facts.mean, std=facts.std)
        for resize in policies(run.model()):
            model = run.model()
            set_image_size(model, size, resize=resize)
            batches = Loader(seen.test, seen, batch_size=100, train=False)
            device = torch.device("cpu")
            scored = ANSWERS.evaluate(model, batches, seen.test, seen, device=device)
            metrics = scored.scores
            found.append(
                Score(
                    mixer=run.recipe.model.mixer or "softmax",
                    resize=resize,
                    seed=run.recipe.seed,
                    height=size[0],
                    width=size[1],
                    top1=float(metrics["top1"] or 0.0),
                    loss=float(metrics["loss"] or 0.0),
                    images=len(scored.answers.index),
                )
            )
    say(f"{size[0]}x{size[1]}: scored ({time.monotonic() - began:.0f} s)")
    return found


def say(text: str) -> None:
    """Report how far it is, on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def table(scores: list[Score], side: int) -> str:
    """The scores in Markdown: a row per mixer and policy, a column a size."""
    sizes = list(dict.fromkeys((s.height, s.width) for s in scores))
    sizes.sort(key=lambda size: (size[0] != size[1], size))
    names = [f"{h}" if h == w else f"{h}x{w}" for h, w in sizes]
    names = [f"**{n}**" if n == str(side) else n for n in names]
    lines = [
        f"| mixer | `resize` | {' | '.join(names)} |",
        f"|---|---|{'--:|' * len(sizes)}",
    ]
    for mixer, resize in dict.fromkeys((s.mixer, s.resize) for s in scores):
        cells = []
        for size in sizes:
            mine = [
                100 * s.top1
                for s in scores
                if (s.mixer, s.resize, s.height, s.width) == (mixer, resize, *size)
            ]
            spread = f" ± {statistics.stdev(mine):.1f}" if len(mine) > 1 else ""
            cells.append(f"{statistics.mean(mine):.1f}{spread}")
        policy = "–" if resize is None else f"`{resize}`"
        lines.append(f"| `{mixer}` | {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put(page: Path, text: str) -> None:
    """Replace what stands between the page's marks.

    Raises:
        UserError: If it has none.
    """
    whole = page.read_text(encoding="utf-8")
    before, first, rest = whole.partition(MARKS[0])
    _, last, after = rest.partition(MARKS[1])
    if not (first and last):
        raise UserError(f"{page} does not hold {MARKS[0]} and {MARKS[1]}")
    page.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}", encoding="utf-8")


def facts(args: argparse.Namespace, scores: list[Score]) -> dict[str, Any]:
    """What is needed to do it again."""
    return {
        "command": f"python benchmarks/resolutions.py {' '.join(args.words)}",
        "keymix": keymix.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "trained_at": args.side,
        "train_images": args.limit,
        "epochs": args.epochs,
        "test_images": scores[0].images,
        "seeds": args.seeds,
        "scores": [asdict(s) for s in scores],
    }


def parser() -> argparse.ArgumentParser:
    """The options."""
    known = os.environ.get("KEYMIX_DATA")
    default = f"parquet:{known}/cifar10" if known else None
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--data", default=default, help="default: parquet:$KEYMIX_DATA/cifar10")
    made.add_argument("--out", default="resolutions", help="folder of the runs and the JSON")
    made.add_argument("--mixers", default=MIXERS, help=f"default: {MIXERS}")
    made.add_argument("--side", type=int, default=32, help="pixels in training (default 32)")
    made.add_argument(
        "--sizes",
        nargs="+",
        default=["24", "32", "40", "48", "64", "32x48"],
        help="pixels in test: a side or HxW",
    )
    made.add_argument("--limit", type=int, default=10000, help="training images (default 10000)")
    made.add_argument("--test-images", type=int, default=2000, help="default 2000")
    made.add_argument("--epochs", type=int, default=6, help="default 6")
    made.add_argument("--depth", type=int, default=4, help="blocks (default 4)")
    made.add_argument("--seeds", type=int, default=1, help="default 1")
    made.add_argument("--workers", type=int, default=2, help="processes; 0 for none (default 2)")
    made.add_argument("--markdown", metavar="PAGE", help="put the table between the page's marks")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    args = parser().parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    if args.data is None:
        raise UserError("--data names no images: give parquet:PATH, or set KEYMIX_DATA")
    out, sizes = Path(args.out), [parse_size(size, "--sizes") for size in args.sizes]
    runs = {
        out / f"{spec.slug}-seed{seed}": recipe_of(args, spec.label, seed)
        for seed in range(args.seeds)
        for spec in parse_mixers(args.mixers)
    }
    jobs = [(recipe, folder) for folder, recipe in runs.items()]
    tasks = [(list(runs), size, args.test_images) for size in sizes]
    if args.workers:
        with ProcessPoolExecutor(args.workers) as pool:
            list(pool.map(train, jobs))
            found = list(pool.map(score_at, tasks))
    else:
        for job in jobs:
            train(job)
        found = [score_at(task) for task in tasks]
    scores = [s for part in found for s in part]
    record = facts(args, scores)
    (out / "resolutions.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = table(scores, args.side)
    print(text)
    if args.markdown:
        put(Path(args.markdown), text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
