# SPDX-License-Identifier: Apache-2.0
"""Does a calibrated swap start nearer? Swap parts of a trained run, score, and train one epoch.

For each part of the model (one block, the middle third, all) and each way to start (fresh, mean
keys, least squares): test accuracy right after the swap, and after one epoch of recovery without
and with distillation from the run; also the run itself, trained on for that epoch. All of it
through the command line, as a user would:

    python benchmarks/swap_recovery.py RUN --out FOLDER

What is done already in FOLDER is not done again. The table's last column is the points of test
accuracy that the start is ahead of a fresh one after recovery without a teacher, with the 95 %
interval of the paired difference over the test images.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keymix.analysis.statistics import bonett_price
from measured import begin, options, table

STARTS = {
    "fresh": ("--init", "fresh"),
    "mean keys": ("--estimate", "mean"),
    "least squares": ("--estimate", "least_squares"),
}
PARTS = {"one block": "6", "the middle third": "4-7", "all": "0-11"}
SHARE = "0.5"  # of the loss that the teacher's answers make where there is a teacher


def keymix(*words: str) -> str:
    """Run a command of keymix in a process of its own and return what it printed."""
    command = [sys.executable, "-m", "keymix", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def record(folder: Path, name: str) -> Any:
    """Read a file that a command left."""
    return json.loads((folder / name).read_text(encoding="utf-8"))


def swapped(run: str, layers: str, start: str, images: str, folder: Path) -> float:
    """Swap once and return the test accuracy right after."""
    if not (folder / "swap.json").exists():
        words = ["--mixer", "static_key", "--layers", layers, *STARTS[start], "--images", images]
        keymix("swap", run, *words, "--test", "--out", str(folder))
    return float(record(folder, "swap.json")["test"]["after"]["top1"])


def recovered(run: str, source: Path, folder: Path, limit: str, teacher: bool = False) -> float:
    """Train a model for one epoch and return its test accuracy."""
    words = ["--model.weights", str(source), "--schedule.epochs", "1"]
    words += ["--schedule.warmup_epochs", "0", "--optim.lr", "3e-4"]
    words += ["--limit", limit, "--out", str(folder)]
    if teacher:
        words += ["--loss.distill", SHARE, "--loss.distill_teacher", run]
    keymix("train", str(source), *words)
    return float(record(folder, "summary.json")["last"]["test"]["top1"])


def ahead(folder: Path, fresh: Path) -> str:
    """Say by how many points one recovered run is ahead of another on the test images."""
    both = []
    for run in (fresh, folder):
        with np.load(run / "predictions_test.npz") as kept:
            order = np.argsort(kept["index"])
            both.append((kept["last_pred"] == kept["target"])[order].astype(np.float64))
    change = both[1] - both[0]
    low, high, _ = bonett_price(change)
    gain = float(change.mean())
    return f"{100 * gain:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def rows(run: str, out: Path, parts: Mapping[str, str], limit: str, images: str) -> Iterator[Any]:
    """Swap, recover and score; what is done is not done again."""
    before = float(record(Path(run), "summary.json")["last"]["test"]["top1"])
    on = recovered(run, Path(run), out / "nothing-plain", limit)
    yield ["nothing", "", f"{before:.1%}", f"{on:.1%}", "", ""]
    for part, layers in parts.items():
        fresh = out / f"{part}-fresh-plain".replace(" ", "-")
        for start in STARTS:
            folder = out / f"{part}-{start}".replace(" ", "-")
            plain, distilled = (Path(f"{folder}-{how}") for how in ("plain", "distilled"))
            scores = (
                swapped(run, layers, start, images, folder),
                recovered(run, folder, plain, limit),
                recovered(run, folder, distilled, limit, teacher=True),
            )
            compared = "" if start == "fresh" else ahead(plain, fresh)
            yield [f"{part} ({layers})", start, *(f"{each:.1%}" for each in scores), compared]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its table."""
    parser = options(__doc__)
    parser.add_argument("run", help="folder of a trained run with softmax attention")
    parser.add_argument("--parts", nargs="+", help="NAME=LAYERS; default: those of the page")
    parser.add_argument("--images", default="512", help="calibration images (default 512)")
    parser.add_argument("--limit", default="10000", help="images of recovery (default 10000)")
    parser.add_argument("--out", type=Path, required=True)
    given = begin(parser, argv)
    parts = dict(part.split("=") for part in given.parts) if given.parts else PARTS
    heads = ("swapped", "start", "test", "recovered", "recovered, distilled", "ahead of fresh")
    found = rows(given.run, given.out, parts, given.limit, given.images)
    table(heads, found, names=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
