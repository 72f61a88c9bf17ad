# SPDX-License-Identifier: Apache-2.0
"""The field's attentions in one small ViT: all of them ranked, then the best with intervals.

    python benchmarks/field.py --data parquet:data/cifar10 --out field

Stage 1 trains every dense mixer at two seeds and ranks them without verdicts, at one learning rate
of three that five mixers of as many families chose on validation at another seed. Stage 2 trains
softmax, static_key, conv_static_key and the three others that are best on stage 1's validation
images at that rate and five further seeds, with intervals: no run of it had a part in the choice.
All models read out the mean of the patches.

Rerun the command to resume. It begins with an estimate of its time (``--plan`` stops behind it)
and ends with one table: test accuracy against the time of a training step, which is measured of
all mixers in turns after their training. ``field.svg`` draws the same.

``nystrom`` and ``agent`` get a quarter of the 64 patches as landmarks and agents: their defaults
are for many tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a process, two processes

from matplotlib import pyplot as plt

from keymix.compare.events import Event
from keymix.compare.plan import resolve
from keymix.compare.question import Question
from keymix.compare.run import answer
from keymix.compare.tune import FACTORS
from keymix.mixers.registry import list_mixers
from keymix.report.comparison import Comparison
from keymix.report.part import Shown
from keymix.report.sections.cost import scatters
from keymix.report.svg import with_legend
from measured import begin, options, table

FEW = {"nystrom": "nystrom(landmarks=1/4)", "agent": "agent(agents=1/4)"}
MIXERS = tuple(FEW.get(name, name) for name in list_mixers(domain="dense"))
KEPT = ("softmax", "static_key", "conv_static_key")
TUNED = ("softmax", "static_key", "linear", "xca", "gfnet")  # which choose the learning rate
BEST = 3
RANKING, FURTHER = (0, 1), (2, 3, 4, 5, 6)  # seeds of the two stages


def said(event: Event) -> None:
    """Print what a comparison says, and a line for each run."""
    if event.kind in ("note", "estimate", "stage"):
        print(event.text, flush=True)
    elif event.kind in ("done", "failed"):
        print(f"  {event.mixer}, seed {event.seed}: {event.text or event.kind}", flush=True)


def minutes(whole: Question, tuned: Sequence[str], further: int) -> float:
    """Estimate the minutes of both stages from a few steps of each mixer; write nothing."""
    plan, _ = resolve(whole, None, say=lambda text: print(text, flush=True))
    seconds = plan.seconds
    runs = len(RANKING) * sum(seconds.values()) + len(FACTORS) * sum(seconds[m] for m in tuned)
    runs += len(FURTHER) * further * median(seconds.values())
    return (runs / plan.processes + 2 * plan.after) / 60


def means(result: Comparison, split: str) -> dict[str, float]:
    """Mean accuracy of each mixer in the last epoch, percent."""
    rows, key = result.scores, result.record.task_kind.score.key
    chosen = rows[(rows.epoch == "last") & (rows.split == split) & (rows.metric == key)]
    return {str(m): 100 * float(v) for m, v in chosen.groupby("mixer").value.mean().items()}


def best(result: Comparison, kept: Sequence[str]) -> list[str]:
    """The mixers that are best on validation, besides those that stay."""
    found = means(result, "val")
    return sorted((m for m in found if m not in kept), key=lambda m: -found[m])[:BEST]


def rows(ranked: Comparison, further: Comparison) -> list[list[object]]:
    """The table: the ranking and each step's time, then what five further seeds say."""
    tests, again = means(ranked, "test"), means(further, "test")
    steps = ranked.costs.set_index("mixer").step_ms
    base = ranked.record.baseline
    found = further.differences
    found = found[found.epoch == "last"].set_index("mixer")
    made = []
    for mixer in sorted(tests, key=lambda each: -tests[each]):
        row: list[object] = [f"`{mixer}`", f"{tests[mixer]:.1f}", f"{steps[mixer]:.1f}"]
        row.append(f"{steps[mixer] / steps[base]:.2f}")
        row.append(f"{again[mixer]:.1f}" if mixer in again else "")
        if mixer in found.index:
            low, at, high = (100 * found.loc[mixer, key] for key in ("low", "difference", "high"))
            degree = f"{found.loc[mixer, 'degree']} {found.loc[mixer, 'direction']}"
            row += [f"{at:+.1f} [{low:+.1f}, {high:+.1f}]", degree.strip()]
        else:
            row += ["", ""]
        made.append(row)
    return made


def draw(result: Comparison, path: Path) -> None:
    """Draw test accuracy against the time of a training step."""
    shown = Shown.of(result.record, result.pictures)
    figure, ax = plt.subplots(figsize=(8.0, 5.0), layout="constrained")
    with_legend(ax, scatters(result.record, shown.looks)["training step, ms"].draw)
    figure.savefig(path)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--data", required=True, help="data spec, e.g. parquet:data/cifar10")
    parser.add_argument("--out", type=Path, default=Path("field"), help="folder of both stages")
    parser.add_argument("--mixers", nargs="+", default=MIXERS, help="default: all dense ones")
    parser.add_argument("--limit", type=int, default=2_000, help="images (default 2000)")
    parser.add_argument("--epochs", type=int, default=6, help="default 6")
    parser.add_argument("--processes", type=int, help="runs side by side (default: by cores)")
    parser.add_argument("--plan", action="store_true", help="print the estimate and stop")
    given = begin(parser, argv)
    overrides: dict[str, Any] = {"model.global_pool": "avg"}
    shared: dict[str, Any] = {"data": given.data, "limit": given.limit, "epochs": given.epochs}
    shared |= {"baseline": KEPT[0], "controls": False, "images": False}
    shared |= {"processes": given.processes}
    first = Question(
        **shared,
        mixers=list(given.mixers),
        seeds=RANKING,
        overrides=overrides,
        tune="lr",
        reference=False,
        out=given.out / "ranking",
    )
    kept = [each for each in KEPT if each in given.mixers]
    tuned = [each for each in TUNED if each in given.mixers]
    if given.plan or not first.folder.exists():
        further = len(kept) + min(BEST, len(given.mixers) - len(kept)) + 1  # and a plain network
        print(f"both stages: about {minutes(first, tuned, further):.0f} minutes", flush=True)
    if given.plan:
        return 0
    answer(replace(first, mixers=tuned), progress=said)
    ranked = answer(first, progress=said)
    assert ranked.record.tuning is not None  # asked for
    chosen = [*kept, *best(ranked, kept)]
    second = Question(
        **shared,
        mixers=chosen,
        seeds=FURTHER,
        overrides={**overrides, "optim.lr": ranked.record.tuning.chosen},
        out=given.out / "further",
    )
    found = answer(second, progress=said)
    heads = ("mixer", f"test, %, {len(RANKING)} seeds", "step, ms", f"× {KEPT[0]}")
    heads = (*heads, f"test, %, {len(FURTHER)} further seeds")
    table((*heads, f"difference from {KEPT[0]}, points", "degree"), rows(ranked, found))
    known = {row.name: 100 * (row.scores.get("top1") or 0.0) for row in found.record.references}
    known |= {m: at for m, at in means(found, "test").items() if m not in chosen}
    print("for comparison: " + ", ".join(f"{name} {at:.1f} %" for name, at in known.items()))
    draw(ranked, given.out / "field.svg")
    print(f"{ranked.report}\n{found.report}\n{given.out / 'field.svg'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
