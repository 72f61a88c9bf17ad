# SPDX-License-Identifier: Apache-2.0
"""Does a calibrated swap start nearer? Swap parts of a trained run, score, and train one epoch.

For each part of the model (one block, the middle third, all) and each way to start (fresh, mean
keys, least squares): test accuracy right after the swap, and after one epoch of recovery without
and with distillation from the run; also the run itself, trained on for that epoch. All of it
through the command line, as a user would:

    python benchmarks/swap_recovery.py RUN --out FOLDER --limit 10000

What is done already in FOLDER is not done again. Prints a table in Markdown, its last column the
points of test accuracy that the start is ahead of a fresh one after recovery without a teacher,
with the 95 % interval of the paired difference over the test images.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from keymix.analysis.statistics import bonett_price

STARTS = {
    "fresh": ("--init", "fresh"),
    "mean keys": ("--estimate", "mean"),
    "least squares": ("--estimate", "least_squares"),
}
SHARE = "0.5"  # of the loss that the teacher's answers make where there is a teacher


def keymix(*words: str) -> str:
    """Run a command of keymix in a process of its own and return what it printed."""
    command = [sys.executable, "-m", "keymix", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def swapped(run: str, mixer: str, layers: str, start: str, images: int, folder: Path) -> Any:
    """Swap once and return the record."""
    if not (folder / "swap.json").exists():
        words = ["--mixer", mixer, "--layers", layers, *STARTS[start], "--images", str(images)]
        keymix("swap", run, *words, "--test", "--out", str(folder))
    return json.loads((folder / "swap.json").read_text(encoding="utf-8"))


def recovered(
    run: str, source: Path, folder: Path, settings: argparse.Namespace, distil: bool
) -> float:
    """Train a model for one epoch and return its test accuracy."""
    words = ["--model.weights", str(source), "--schedule.epochs", "1"]
    words += ["--schedule.warmup_epochs", "0", "--optim.lr", settings.lr]
    words += ["--limit", str(settings.limit), "--out", str(folder)]
    if distil:
        words += ["--loss.distill", SHARE, "--loss.distill_teacher", run]
    keymix("train", str(source), *words)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["last"]["test"]["top1"])


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


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f}"


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of a trained run with softmax attention")
    parser.add_argument("--mixer", default="static_key")
    parser.add_argument("--parts", nargs="+", default=["one=6", "middle third=4-7", "all=0-11"])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=[*STARTS])
    parser.add_argument("--only-swap", action="store_true", help="leave the recovery out")
    parser.add_argument("--images", type=int, default=512, help="calibration images")
    parser.add_argument("--limit", type=int, default=10000, help="training images of recovery")
    parser.add_argument("--lr", default="3e-4", help="peak learning rate of recovery")
    parser.add_argument("--out", type=Path, required=True)
    settings = parser.parse_args()
    print("| swapped | start | test, % | recovered | recovered, distilled | ahead of fresh |")
    print("|---|---|--:|--:|--:|--:|")
    if not settings.only_swap:
        target = settings.out / "nothing-plain"
        trained_on = recovered(settings.run, Path(settings.run), target, settings, distil=False)
        before = json.loads((Path(settings.run) / "summary.json").read_text(encoding="utf-8"))
        print(
            f"| nothing | | {percent(before['last']['test']['top1'])} | {percent(trained_on)} | | |"
        )
    for part in settings.parts:
        name, _, layers = part.partition("=")
        for start in settings.starts:
            folder = settings.out / f"{name} {start}".replace(" ", "-")
            record = swapped(settings.run, settings.mixer, layers, start, settings.images, folder)
            cells = [record["test"]["after"]["top1"]]
            for distil in () if settings.only_swap else (False, True):
                target = folder.with_name(f"{folder.name}-{'distilled' if distil else 'plain'}")
                cells.append(recovered(settings.run, folder, target, settings, distil))
            row = [*map(percent, cells), "", ""][:3]
            fresh = settings.out / f"{name} fresh-plain".replace(" ", "-")
            compared = start != "fresh" and "fresh" in settings.starts and not settings.only_swap
            row.append(ahead(folder.with_name(f"{folder.name}-plain"), fresh) if compared else "")
            print(f"| {name} ({layers}) | {start} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
