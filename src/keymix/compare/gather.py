# SPDX-License-Identifier: Apache-2.0
"""Read what the runs left behind and make the record that tables and report are rendered from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from keymix.compare import words
from keymix.compare.outcome import Scores, caution, lead, outcome
from keymix.compare.plan import Entrant, Plan
from keymix.report.html import FORMAT

if TYPE_CHECKING:
    from torch import nn

NOT_STARTED = "it was not started"


def is_done(plan: Plan, entrant: Entrant, seed: int) -> bool:
    """Whether a run is finished, so that it is not trained again."""
    from keymix.train.files import SUMMARY, read_json

    path = plan.folder(entrant, seed) / SUMMARY
    return path.exists() and read_json(path).get("status") == "done"


def read_run(plan: Plan, entrant: Entrant, seed: int, failure: str | None) -> dict[str, Any]:
    """Read one run as plain values; epochs are counted from 1."""
    from keymix.train.files import METRICS, SUMMARY, read_json, read_metrics

    folder = plan.folder(entrant, seed)
    run: dict[str, Any] = {
        "mixer": entrant.label,
        "seed": seed,
        "folder": folder.relative_to(plan.out).as_posix(),
    }
    if not is_done(plan, entrant, seed):
        return run | {"status": "failed", "reason": failure or NOT_STARTED}
    summary = read_json(folder / SUMMARY)
    history = [
        {
            "epoch": line["epoch"] + 1,
            **{key: _finite(line.get(key)) for key in ("train_loss", "val_loss", "val_top1")},
        }
        for line in read_metrics(folder / METRICS)
    ]
    marks = {which: _mark(summary[which]) for which in ("last", "best")}
    return run | {
        "status": "done",
        "reason": None,
        "seconds": summary["seconds"],
        **marks,
        "history": history,
    }


def _mark(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "epoch": told["epoch"] + 1,
        **{
            split: {metric: _finite(told[split].get(metric)) for metric in ("top1", "top5", "loss")}
            for split in ("val", "test")
        },
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def read_scores(
    plan: Plan, runs: list[dict[str, Any]], which: Literal["last", "best"]
) -> dict[str, dict[int, Scores]]:
    """Read what the finished runs scored, with every test image's answer."""
    from keymix.train.files import PREDICTIONS

    table: dict[str, dict[int, Scores]] = {label: {} for label in plan.labels}
    for run in runs:
        if run["status"] != "done":
            continue
        with np.load(plan.out / run["folder"] / PREDICTIONS) as stored:
            order = np.argsort(stored["index"], kind="stable")
            correct = (stored[f"{which}_pred"] == stored["target"])[order]
        table[run["mixer"]][run["seed"]] = Scores(
            val_top1=run[which]["val"]["top1"],
            top1=run[which]["test"]["top1"],
            top5=run[which]["test"]["top5"],
            correct=correct,
        )
    return table


def trained_models(plan: Plan, runs: list[dict[str, Any]]) -> tuple[int, dict[str, nn.Module]]:
    """Load every mixer's model of the first seed at which any run is done, last epoch.

    Returns:
        The seed, and the models by label; a mixer without that run is absent.
    """
    from keymix.train.runs import load_run

    done = {(run["mixer"], run["seed"]): run for run in runs if run["status"] == "done"}
    seed = next((s for s in plan.seeds if any((m, s) in done for m in plan.labels)), plan.seeds[0])
    models = {
        label: load_run(plan.out / done[label, seed]["folder"]).model("last")
        for label in plan.labels
        if (label, seed) in done
    }
    return seed, models


def environment_lines() -> dict[str, str]:
    """Return versions and machine as short lines."""
    from keymix.train.environment import environment

    found: Mapping[str, Any] = environment()
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    lines = {
        "keymix": str(found["keymix"]),
        "commit": str(found["commit"] or "not a checkout"),
        "python": str(found["python"]),
        "packages": packages,
        "machine": f"{found['cpu']}, {found['cores']} cores",
        "system": str(found["platform"]),
    }
    if found["device"] != "cpu":
        lines["device"] = f"{found['device']}, CUDA {found['cuda']}"
    return lines


def make_record(
    plan: Plan,
    data: Mapping[str, Any],
    runs: list[dict[str, Any]],
    *,
    command: str,
    costs: Mapping[str, Any],
    measured: Mapping[str, Any],
    attention: Mapping[str, Any] | None,
    collapse: Mapping[str, Any] | None,
    processes: int,
    threads: int,
) -> dict[str, Any]:
    """Make the content of ``results.json``: all that the report shows, plain values."""
    rows = {
        which: outcome(
            plan.labels,
            baseline=plan.baseline,
            seeds=plan.seeds,
            scores=read_scores(plan, runs, which),
        )
        for which in ("last", "best")
    }
    done = sum(run["status"] == "done" for run in runs)
    return {
        "format": FORMAT,
        "title": words.title(data),
        "facts": words.facts(plan, data),
        "lead": lead(rows["last"], baseline=plan.baseline),
        "caution": caution(len(plan.seeds)),
        "created": time.strftime("%Y-%m-%d %H:%M %Z"),
        "command": command,
        "environment": environment_lines(),
        "data": dict(data),
        "data_line": words.data_line(data),
        "recipe": plan.recipe.to_dict(),
        "match": plan.match,
        "readout": {"pooling": plan.pooling, "because": list(plan.unheard)},
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "processes": processes,
        "threads": threads,
        "mixers": [
            {"label": e.label, "slug": e.slug, "control": e.control, "note": e.note}
            for e in plan.entrants
        ],
        "outcome": rows,
        "costs": dict(costs),
        "measured": dict(measured),
        "method": words.method(
            plan,
            data,
            processes=processes,
            threads=threads,
            done=done,
            device=str(measured["device"]),
        ),
        "curves_note": words.curves_note(plan),
        "runs": runs,
        "attention": attention,
        "collapse": collapse,
    }
