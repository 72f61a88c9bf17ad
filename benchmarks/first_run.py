# SPDX-License-Identifier: Apache-2.0
"""What ``keymix compare`` should do where nobody names anything: candidates, and what they find.

    python benchmarks/first_run.py --out candidates            # docs/results/first-run.md
    python benchmarks/first_run.py --out candidates --only 0,4

Every candidate is a whole comparison of scikit-learn's digits, at seeds that no default has. It
serves as a default if it ends within three minutes on two cores and finds nothing against itself.
The rules of its findings (``keymix.compare.findings``) were fixed before. Apart from this the
machine should be idle. A candidate whose folder is there already is read, not run again; the
minutes are those of the first time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keymix
from measured import begin, options, table

FIRST = {"mixers": "softmax,static_key", "reference": False}
FIVE, OTHERS = (100, 101, 102, 103, 104), (110, 111, 112, 113, 114)


def recipe(rate: float, epochs: int, warmup: float = 1.0, least: float = 0.0) -> dict[str, Any]:
    """Name the learning rate, the epochs, how many are warm-up, and the rate at the end."""
    schedule = {"schedule.warmup_epochs": warmup, "schedule.min_lr": least}
    return {**FIRST, "epochs": epochs, "overrides": {"optim.lr": rate, **schedule}}


CANDIDATES: tuple[dict[str, Any], ...] = (
    recipe(4e-3, 80),
    {**recipe(4e-3, 80), "seeds": OTHERS[:3]},
    {**recipe(4e-3, 80), "mixers": "softmax,static_key,key_value"},
    recipe(8e-3, 80),
    {**recipe(8e-3, 80), "seeds": OTHERS[:3]},
    {**recipe(4e-3, 60, 6), "seeds": FIVE},
    {**recipe(8e-3, 60, 6), "seeds": FIVE},
    {**recipe(8e-3, 60, 6), "seeds": OTHERS},
    {**recipe(6e-3, 64, 6.4), "seeds": FIVE},
    {**recipe(6e-3, 64, 6.4), "seeds": OTHERS},
    recipe(5e-3, 104, 10.4),
    {**recipe(5e-3, 104, 10.4), "seeds": OTHERS[:3]},
    recipe(5e-3, 104, 10.4, 5e-4),
    {**recipe(5e-3, 104, 10.4, 5e-4), "seeds": OTHERS[:3]},
)
SEEDS = (100, 101, 102)


def named(candidate: dict[str, Any]) -> str:
    """Write what is not as in the recipe."""
    return ", ".join(f"{key}={value!r}" for key, value in candidate.items()) or "nothing named"


def tried(candidate: dict[str, Any], out: Path) -> list[str]:
    """Run a candidate, and write its row of the table."""
    began, took = time.perf_counter(), out.with_suffix(".minutes")
    result = keymix.compare(**{"seeds": SEEDS, **candidate, "out": out})
    if not took.exists():
        took.write_text(f"{(time.perf_counter() - began) / 60:.1f}", encoding="utf-8")
    means = result.scores.query("epoch == 'last' and split == 'test' and metric == 'top1'")
    accuracy = (100 * means.groupby("mixer", sort=False)["value"].mean()).map("{:.1f}".format)
    found = [each.kind for each in result.record.findings]
    decided = result.record.recommendation
    return [
        named(candidate),
        took.read_text(encoding="utf-8"),
        ", ".join(f"{mixer} {mean}" for mixer, mean in accuracy.items()),
        ", ".join(found) or "none",
        f"{decided.verdict} {decided.pick or ''} ({decided.reason})",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Try the candidates, and print the table."""
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=lambda text: [*map(int, text.split(","))])
    given = begin(parser, argv)
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = given.only or range(len(CANDIDATES))
    rows = ([str(i), *tried(CANDIDATES[i], given.out / str(i))] for i in chosen)
    heads = ("", "candidate", "minutes", "test accuracy, %", "findings", "decision")
    table(heads, rows, names=len(heads))


if __name__ == "__main__":
    main()
