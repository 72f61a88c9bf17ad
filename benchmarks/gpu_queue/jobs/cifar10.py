# SPDX-License-Identifier: Apache-2.0
"""Job 5: CIFAR-10 whole, the models of SKA Table 1, as many runs at once as the GPU takes best."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import multiprocessing
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_queue import store
from gpu_queue.job import Context, Job, Result, Step, table
from gpu_queue.processes import end_with_parent
from gpu_queue.training import PREDICTIONS, train_in_time

if TYPE_CHECKING:
    import numpy as np

    from keymix.analysis.statistics import Interval
    from keymix.train.recipe import Recipe
    from keymix.train.record import Tested

BASELINE = "softmax"
MIXERS = (BASELINE, "static_key", "conv_static_key")
SEEDS = (0, 1, 2)
EPOCHS, TRAIN, VAL, BATCH = 200, 45_000, 5_000, 512  # of the recipes; a tenth validates


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of SKA Table 1.

    Args:
        title: Its name there.
        recipe: Its recipe.
        macs: Multiply-adds of an image by mixer, as ``keymix.count`` has them.
        published: Top-1 on CIFAR-10 by mixer, percent.
    """

    title: str
    recipe: str
    macs: Mapping[str, int]
    published: Mapping[str, float]


def _by_mixer(*values: Any) -> dict[str, Any]:
    return dict(zip(MIXERS, values, strict=True))


MODELS = {
    "vit_small": Model(
        title="ViT-S",
        recipe="vit_small_cifar10",
        macs=_by_mixer(647_244_800, 545_008_640, 647_244_800),
        published=_by_mixer(83.4, 84.1, 87.0),
    ),
    "cait_small": Model(
        title="CaiT-S",
        recipe="cait_small_cifar10",
        macs=_by_mixer(704_273_664, 603_610_368, 704_273_664),
        published=_by_mixer(82.8, 83.5, 87.9),
    ),
    "swin_tiny": Model(
        title="Swin-T",
        recipe="swin_tiny_cifar10",
        macs=_by_mixer(528_391_680, 485_924_352, 503_225_856),
        published=_by_mixer(89.2, 89.7, 89.4),
    ),
    "cvt_13": Model(
        title="CvT-13",
        recipe="cvt_13_cifar10",
        macs=_by_mixer(100_397_312, 97_030_144, 97_996_800),
        published=_by_mixer(81.0, 81.3, 81.3),
    ),
}
FIRST = "vit_small"
TINY: dict[str, Any] = {
    "data.limit": 120,
    "data.batch_size": 32,
    "data.image_size": 16,
    "schedule.epochs": 2,
    "model.options.depth": 1,
    "model.options.embed_dim": 16,
    "model.options.num_heads": 2,
}

# ---- by arithmetic -----------------------------------------------------------------------------

PEAK = 790e12  # FLOP/s of an H200 in dense bfloat16 products, as measured on such GPUs
SHARE = 0.1  # of it, which layers of 384 channels in a whole training step may reach
LEAST_STEP = 0.02  # s: launches, augmentation and the update keep a step from being shorter
EPOCH_END = 0.7  # s: scores, 115 MB of checkpoint, the best weights
START = 90.0  # s: process 5, decoding 60,000 JPEGs 15, compiling 60, the tests at the end 10
LEASE = 24 * 60.0  # s in which a run must end: its checkpoint cannot leave the machine


def training_flops(model: str, mixer: str) -> float:
    """FLOPs of one image in training: forward, and twice as many backward."""
    return 3 * 2 * MODELS[model].macs[mixer]


def assumed_rate(model: str, mixer: str) -> float:
    """Images per second in training that the arithmetic assumes."""
    return min(SHARE * PEAK / training_flops(model, mixer), BATCH / LEAST_STEP)


def run_seconds(model: str, mixer: str) -> float:
    """Seconds of a run that has the GPU alone, by arithmetic."""
    rate = assumed_rate(model, mixer)
    return START + EPOCHS * (TRAIN / rate + VAL / (3 * rate) + EPOCH_END)


def arithmetic() -> str:
    """The sum of minutes on paper, in Markdown."""
    rows, total = [], 0.0
    for name, model in MODELS.items():
        for mixer in MIXERS:
            images = EPOCHS * (TRAIN + VAL / 3)
            minutes = run_seconds(name, mixer) / 60
            total += minutes * len(SEEDS)
            rows.append(
                [
                    f"{model.title}, {mixer}",
                    f"{training_flops(name, mixer) / 1e9:.2f}",
                    f"{training_flops(name, mixer) * images / 1e15:.1f}",
                    f"{assumed_rate(name, mixer):,.0f}",
                    f"{minutes:.1f}",
                    len(SEEDS),
                    f"{minutes * len(SEEDS):.0f}",
                ]
            )
    heads = ["model, mixer", "GFLOP per image", "PFLOP per run", "assumed images/s"]
    heads += ["minutes per run", "runs", "minutes"]
    first = len(SEEDS) * sum(run_seconds(FIRST, mixer) for mixer in MIXERS) / 60
    needed = EPOCHS * TRAIN / (8 * 60)
    share = needed * training_flops(FIRST, BASELINE) / PEAK
    return "\n\n".join(
        [
            f"By paper arithmetic {total / 60:.1f} hours for all, {first:.0f} minutes of them for "
            f"{MODELS[FIRST].title}, one run after the other:",
            table(heads, rows),
            f"An image costs three forward passes of two FLOPs per multiply-add in training, one "
            f"in validation; a run has {EPOCHS} epochs of {TRAIN:,} and {VAL:,} images. Assumed: "
            f"{SHARE:.0%} of {PEAK / 1e12:.0f} TFLOP/s in bfloat16, no step of {BATCH} images below"
            f" {1e3 * LEAST_STEP:.0f} ms, {EPOCH_END} s at the end of an epoch, {START:.0f} s for "
            f"start and tests. Training a {MODELS[FIRST].title} with {BASELINE} in 8 minutes would "
            f"take {needed:,.0f} images per second, {share:.0%} of that peak.",
        ]
    )


# ---- how many at once --------------------------------------------------------------------------

TOGETHER = (  # compiled, runs at once; what is likely to be chosen first
    (True, 1),
    (False, 1),
    (True, 2),
    (True, 3),
    (False, 2),
    (True, 4),
    (False, 4),
)
WINDOW = 20.0  # s
_WAIT = 300.0  # s at most until all of them have passed their first epoch


class _EnoughError(Exception):
    """Ends a run whose rate is known."""


def together(context: Context, *, compiled: bool, number: int) -> Result:
    """Train in several processes at once and count their epochs."""
    work = context.work / "together"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    fork = multiprocessing.get_context("fork")  # before threads, data and CUDA are in this process
    gate = fork.Barrier(number)
    children = [
        fork.Process(target=_train_a_while, args=(context, compiled, work / str(i), gate))
        for i in range(number)
    ]
    try:
        for child in children:
            child.start()
        while any(child.is_alive() for child in children):
            if any(child.exitcode for child in children):
                break
            time.sleep(0.05)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError(f"trainings ended with {[child.exitcode for child in children]}")
    found = [json.loads((work / f"{i}.json").read_text()) for i in range(number)]
    shutil.rmtree(work)
    epochs = [length for each in found for length in each["epochs"]]
    images = found[0]["images"]
    return {
        "together": number,
        "compiled": compiled,
        "precision": found[0]["precision"],
        "batch": found[0]["batch"],
        "images": images,
        "images_per_s": sum(images * len(each["epochs"]) / sum(each["epochs"]) for each in found),
        "epoch_s": statistics.median(epochs),
        "epoch_s_quartiles": _quartiles(epochs),
        "epochs": len(epochs),
        "first_epoch_s": max(each["first"] for each in found),
        "gpu_gib": _known(each["gpu_gib"] for each in found),
        "_files": sorted({file for each in found for file in each["files"]}),
    }


def _train_a_while(context: Context, compiled: bool, folder: Path, gate: Any) -> None:
    """Train until the time after a first epoch is over, and write how long each epoch took."""
    import torch

    from keymix.train.engine import train
    from keymix.train.model import load_data

    end_with_parent()
    torch.set_num_threads(1)
    recipe = recipe_of(context, FIRST, BASELINE, seed=0, compiled=compiled)
    data = load_data(recipe.data)
    began = time.monotonic()
    ends: list[float] = []
    first = 0.0

    def watch(line: Mapping[str, Any]) -> None:
        nonlocal first
        if not ends:  # this epoch compiled and warmed up; all count from the same moment
            first = time.monotonic() - began
            gate.wait(_WAIT)
        ends.append(time.monotonic())
        if len(ends) > 1 and ends[-1] - ends[0] >= (0.0 if context.tiny else WINDOW):
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        train(recipe, folder, progress=watch, data=data)
    entries = {
        "epochs": [after - before for before, after in itertools.pairwise(ends)],
        "first": first,
        "images": len(data.train),
        "precision": recipe.precision,
        "batch": recipe.data.batch_size,
        "gpu_gib": _gpu_gib(),
        "files": store.loaded_files(sys.modules, JOB),  # this process alone has keymix
    }
    folder.with_suffix(".json").write_text(json.dumps(entries))


def choice(results: Mapping[str, Result]) -> tuple[int, bool]:
    """How many runs share the GPU, and whether they are compiled.

    The largest rate in all, of those with which a run ends within a lease; the shortest run where
    none does, and one run that is not compiled where nothing is measured.
    """
    found = [result for name, result in results.items() if name.startswith("together/")]
    if not found:
        return 1, False
    fitting = [result for result in found if START + EPOCHS * result["epoch_s"] <= LEASE]
    best = (
        max(fitting, key=lambda result: (result["images_per_s"], -result["together"]))
        if fitting
        else min(found, key=lambda result: result["epoch_s"])
    )
    return best["together"], best["compiled"]


def estimate(step: Step, results: Mapping[str, Result]) -> float:
    """Seconds of a step: by runs alike, by the rates of several at once, or on paper."""
    kind, *rest = step.name.split("/")
    if kind == "together" or step.seconds < START:  # the latter in a dry run
        return step.seconds
    mixer, seed = rest
    alike = [results.get(f"{kind}/{mixer}/{other}") for other in SEEDS if str(other) != seed]
    took = [START + result["seconds"] for result in alike if result is not None]
    if took:
        return statistics.median(took)
    number, compiled = choice(results)
    chosen = results.get(_together_name(compiled, number))
    if chosen is None:
        return step.seconds
    work = training_flops(kind, mixer) / training_flops(FIRST, BASELINE)
    return START + EPOCHS * chosen["epoch_s"] * max(work, 0.5)


# ---- the runs ----------------------------------------------------------------------------------


def recipe_of(context: Context, model: str, mixer: str, *, seed: int, compiled: bool) -> Recipe:
    """The recipe of a run."""
    from keymix import recipes
    from keymix.train import task as train_task
    from keymix.train.recipe import replace_path

    changes: dict[str, Any] = {
        "data.spec": context.cifar10,
        "model.mixer": mixer,
        "seed": seed,
        "compile": compiled,
    }
    if context.tiny:
        changes |= TINY
        train_task._BACKEND = "eager"  # the same way, without half a minute of C++
    return replace_path(recipes.get(MODELS[model].recipe), changes)


def measure(context: Context, *, model: str, mixer: str, seed: int) -> Result:
    """Train one model, as far as time lets, and report how it answers the test images."""
    from keymix.train.files import read_json

    recipe = recipe_of(context, model, mixer, seed=seed, compiled=choice(context.results)[1])
    run = train_in_time(context, recipe)
    recipe, folder = run.recipe, run.folder
    summary, lines = run.summary, run.metrics()
    rates = [line["images_per_s"] for line in lines[1:]]  # the first compiles and warms up
    return {
        "model": model,
        "mixer": mixer,
        "seed": seed,
        "recipe": recipe.name,
        "compiled": recipe.compile,
        "together": choice(context.results)[0],
        "precision": recipe.precision,
        "batch": recipe.data.batch_size,
        "sizes": summary.data.sizes,
        "fingerprint": summary.data.fingerprint,
        "params": summary.params,
        "epochs": summary.epochs,
        "seconds": summary.seconds,
        "images_per_s": statistics.median(rates),
        "images_per_s_quartiles": _quartiles(rates),
        "gpu_gib": _gpu_gib(),
        "last": _told(summary.last),
        "best": _told(summary.best),
        "correct": _correct(folder / PREDICTIONS),
        "train_loss": [round(line["train_loss"], 4) for line in lines],
        "val_top1": [round(line["val_top1"], 4) for line in lines],
        "environment": read_json(folder / "environment.json"),
    }


def _told(of: Tested) -> Result:
    return {
        "epoch": None if of.epoch is None else of.epoch + 1,
        "val_top1": of.val["top1"],
        "top1": of.test.scores["top1"],
        "loss": of.test.scores["loss"],
    }


def _correct(path: Path) -> dict[str, str]:
    """Right and wrong of each test image in the order of their index, a bit each."""
    from keymix.tasks.classification.page import packed
    from keymix.train.files import read_arrays

    kept = read_arrays(path)
    order = kept["index"].argsort()
    return {
        which: packed((kept[f"{which}_pred"] == kept["target"])[order])
        for which in ("last", "best")
    }


def _gpu_gib() -> float | None:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def _known(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [*values, *values]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


# ---- telling -----------------------------------------------------------------------------------


def section(results: Mapping[str, Result]) -> str:
    """Report accuracies and times next to the published figures."""
    parts = []
    runs = [result for name, result in results.items() if not name.startswith("together/")]
    if runs:
        groups: dict[tuple[str, bool], list[Result]] = {}
        for run in sorted(runs, key=lambda r: [*MODELS].index(r["model"])):
            groups.setdefault((run["model"], run["compiled"]), []).append(run)
        parts += [" ".join(_answer(group) for group in groups.values())]
        parts += [_accuracies(groups), _protocol(runs), _rates(groups)]
    at_once = [result for name, result in results.items() if name.startswith("together/")]
    if at_once:
        parts += [_chosen(results), _sharing(at_once)]
    return "\n\n".join(parts)


def _answer(runs: Sequence[Result]) -> str:
    """Say of one model how its mixers differ from the baseline, last epoch."""
    title = _title(runs[0])
    if not any(run["mixer"] == BASELINE for run in runs):
        return f"{title}: {BASELINE} is not measured yet, so nothing is compared."
    said = []
    for mixer in MIXERS[1:]:
        over_seeds, over_images = _differences(runs, mixer, "last")
        if over_seeds is None or over_images is None:
            continue
        points = f"{100 * over_seeds.difference:+.1f} points"
        if over_seeds.n < 2:
            clear = _sides(over_images)
            said.append(
                f"{mixer} {points} at one seed, "
                + ("more than" if clear else "no more than")
                + " the choice of test images explains; another seed may say otherwise"
            )
        elif _sides(over_seeds) and _sides(over_images) == _sides(over_seeds):
            said.append(f"{mixer} {points} ({over_seeds.n} seeds; clear in both intervals)")
        else:
            said.append(f"{mixer} {points} ({over_seeds.n} seeds): no clear difference")
    if not said:
        return f"{title}: no mixer has a run at a seed of {BASELINE} yet."
    return f"{title} after the last epoch, against {BASELINE}: {'; '.join(said)}."


def _sides(interval: Interval) -> int:
    """1 or -1 if all of an interval lies on that side of 0, else 0."""
    if interval.low is None or interval.high is None:
        return 0
    return 1 if interval.low > 0 else -1 if interval.high < 0 else 0


def _differences(
    runs: Sequence[Result], mixer: str, which: str
) -> tuple[Interval | None, Interval | None]:
    """Compare a mixer with the baseline at the seeds of both, over seeds and over test images."""
    from keymix.analysis.statistics import over_images, over_seeds

    top1, correct = (
        {name: {run["seed"]: read(run) for run in runs if run["mixer"] == name} for name in MIXERS}
        for read in (lambda run: run[which]["top1"], lambda run: _unpacked(run, which))
    )
    return (
        over_seeds(top1[mixer], top1[BASELINE]),
        over_images(correct[mixer], correct[BASELINE]),
    )


def _unpacked(run: Result, which: str) -> np.ndarray[Any, Any]:
    import numpy as np

    bits = np.frombuffer(base64.b64decode(run["correct"][which]), dtype=np.uint8)
    return np.unpackbits(bits, count=run["sizes"]["test"]).astype(bool)


def _accuracies(groups: Mapping[tuple[str, bool], Sequence[Result]]) -> str:
    rows = []
    for (model, _), runs in groups.items():
        for mixer in MIXERS:
            own = [run for run in runs if run["mixer"] == mixer]
            if not own:
                continue
            differ = ["", "", ""]
            if mixer != BASELINE:
                seeds, images = _differences(runs, mixer, "last")
                if seeds is not None:
                    differ = [f"{100 * seeds.difference:+.1f}", _ends(seeds), _ends(images)]
            rows.append(
                [
                    f"{_title(own[0])}, {mixer}",
                    len(own),
                    *(
                        _mean([100 * run[which]["top1"] for run in own])
                        for which in ("last", "best")
                    ),
                    *differ,
                    f"{MODELS[model].published[mixer]:.1f}",
                    f"{own[0]['params'] / 1e6:.1f} M",
                ]
            )
    heads = ["model, mixer", "seeds", "last, %", "best on validation, %", "difference, points"]
    heads += ["95 % over seeds", "95 % over test images", "published, %", "parameters"]
    return table(heads, rows)


def _protocol(runs: Sequence[Result]) -> str:
    epochs, batch = (sorted({run[key] for run in runs}) for key in ("epochs", "batch"))
    sizes = runs[0]["sizes"]
    precision = sorted({_precision(run) for run in runs})
    return (
        f"Top-1 on {sizes['test']:,} test images after {_joined(epochs)} epochs of "
        f"{sizes['train']:,} images, batch {_joined(batch)}, {_joined(precision)}, mean ± standard "
        "deviation over seeds; differences of the last epoch, paired by seed and by image. The "
        "images are CIFAR-10's re-encoded as JPEG, so accuracies can lie a little under those on "
        "the original. Published: SKA Table 1, the best of all epochs on the test set, of one run "
        f"on all 50,000 training images; here {sizes['val']:,} of them choose the best epoch, and "
        "the last one is reported without any choice."
    )


def _rates(groups: Mapping[tuple[str, bool], Sequence[Result]]) -> str:
    rows = []
    for (model, _), runs in groups.items():
        for mixer in MIXERS:
            own = [run for run in runs if run["mixer"] == mixer]
            if not own:
                continue
            rates = [run["images_per_s"] for run in own]
            low, high = (
                statistics.median(run["images_per_s_quartiles"][end] for run in own)
                for end in (0, 1)
            )
            minutes = [run["seconds"] / 60 for run in own]
            gib = _known(run["gpu_gib"] for run in own)
            rows.append(
                [
                    f"{_title(own[0])}, {mixer}",
                    _joined(sorted({run["together"] for run in own})),
                    f"{statistics.median(rates):,.0f} ({low:,.0f} to {high:,.0f})",
                    f"{assumed_rate(model, mixer):,.0f}",
                    f"{statistics.median(minutes):.1f}",
                    f"{run_seconds(model, mixer) / 60:.1f}",
                    "" if gib is None else f"{gib:.1f}",
                ]
            )
    heads = ["model, mixer", "at once", "images/s each (quartiles)", "assumed alone"]
    heads += ["minutes", "assumed alone", "GPU, GiB"]
    message = (
        "Training rates are medians over epochs but the first, validation not counted; minutes "
    )
    return f"{table(heads, rows)}\n\n{message}are those of all epochs."


def _chosen(results: Mapping[str, Result]) -> str:
    """Say what sharing brings, by the rates."""
    number, compiled = choice(results)
    best = results[_together_name(compiled, number)]
    minutes = (START + EPOCHS * best["epoch_s"]) / 60
    how = "compiled" if compiled else "not compiled"
    runs = "one run has the GPU" if number == 1 else f"{number} runs share the GPU"
    said = f"Chosen for the runs: {runs}, {how}, {best['images_per_s']:,.0f} images/s in all, "
    said += f"about {minutes:.0f} minutes a run."
    alone = results.get(_together_name(compiled, 1))
    if number > 1 and alone is not None:
        gain = best["images_per_s"] / alone["images_per_s"] - 1
        said += f" That is {gain:+.0%} against one run at a time."
    eager = results.get(_together_name(False, 1))
    quick = results.get(_together_name(True, 1))
    if eager is not None and quick is not None:
        gain = quick["images_per_s"] / eager["images_per_s"]
        said += f" Compiling makes one run {gain:.2f} times as fast."
    return said


def _sharing(found: Sequence[Result]) -> str:
    rows = [
        [
            f"{'compiled' if one['compiled'] else 'eager'}, {one['together']} at once",
            f"{one['images_per_s']:,.0f}",
            f"{one['epoch_s']:.2f} ({' to '.join(f'{s:.2f}' for s in one['epoch_s_quartiles'])})",
            one["epochs"],
            f"{one['first_epoch_s']:.0f}",
            f"{(START + EPOCHS * one['epoch_s']) / 60:.0f}",
            "" if one["gpu_gib"] is None else f"{one['gpu_gib']:.1f}",
        ]
        for one in sorted(found, key=lambda one: (one["compiled"], one["together"]))
    ]
    heads = ["trainings", "images/s in all", "s per epoch (quartiles)", "epochs", "first epoch, s"]
    heads += [f"{EPOCHS} epochs, min", "GPU, GiB each"]
    one = found[0]
    return (
        f"{table(heads, rows)}\n\nWhole runs of `{MODELS[FIRST].recipe}` with {BASELINE} in "
        f"processes of their own ({one['images']:,} images per epoch, batch {one['batch']}, "
        f"{_precision(one)}), validation and checkpoints included, counted for {WINDOW:.0f} s after"
        f" the first epoch of all. A run must end within {LEASE / 60:.0f} minutes."
    )


def _joined(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _title(run: Result) -> str:
    title = MODELS[run["model"]].title
    return f"{title} (compiled)" if run["compiled"] else title


def _precision(run: Result) -> str:
    cuda = run["gpu_gib"] is not None
    return {"auto": "bfloat16 autocast" if cuda else "float32"}.get(
        run["precision"], str(run["precision"])
    )


def _ends(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "–"
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


# ---- the job -----------------------------------------------------------------------------------


def _together_name(compiled: bool, number: int) -> str:
    return f"together/{'compiled' if compiled else 'eager'}/{number}"


def _together_steps(kinds: Sequence[tuple[bool, int]]) -> list[Step]:
    """Steps that count images at once."""
    found = []
    for compiled, number in kinds:
        # start 5, decoding 15, CUDA 5, the window and the epochs around it 35, 5 more for each
        # run; compiling 60, or 20 where the code lies on the disk
        extra = 0 if not compiled else 60 if number == 1 else 20
        found.append(
            Step(
                name=_together_name(compiled, number),
                seconds=60.0 + 5 * number + extra,
                measure=partial(together, compiled=compiled, number=number),
                data=("cifar10",),
                gpu_gib=10.0 * number,
            )
        )
    return found


def _run_step(model: str, mixer: str, seed: int) -> Step:
    return Step(
        name=f"{model}/{mixer}/{seed}",
        seconds=run_seconds(model, mixer),
        measure=partial(measure, model=model, mixer=mixer, seed=seed),
        resumable=True,
        least=150.0,  # compiling and some epochs
        after_all=model != FIRST,
        data=("cifar10",),
        gpu_gib=10.0,
    )


def steps(tiny: bool) -> list[Step]:
    """Rates at once, then the runs: all mixers of a seed one after the other."""
    if tiny:
        kinds, runs = ((False, 2), (True, 1)), [(FIRST, mixer, 0) for mixer in MIXERS[:2]]
        found = [*_together_steps(kinds), *(_run_step(*run) for run in runs)]
        return [replace(step, seconds=10.0, gpu_gib=0.0) for step in found]
    first = [(FIRST, mixer, seed) for seed in SEEDS for mixer in MIXERS]
    others = [model for model in MODELS if model != FIRST]
    rest = [(model, mixer, seed) for seed in SEEDS for model in others for mixer in MIXERS]
    return [*_together_steps(TOGETHER), *(_run_step(*run) for run in (*first, *rest))]


JOB = Job(
    number=5,
    name="cifar10",
    title="CIFAR-10, 200 epochs",
    purpose=(
        "Do static keys answer better than softmax attention where the paper says so? The models "
        "of SKA Table 1 under its settings, three mixers, three seeds, and how many trainings "
        "share one GPU best."
    ),
    form={
        "together/HOW/K": "K runs at once: images_per_s in all, epoch_s and its quartiles, GiB",
        "MODEL/MIXER/SEED": "test top-1 of the last epoch and of the best on validation",
        "correct": "right and wrong of each test image, one bit each, base64",
        "train_loss, val_top1": "by epoch",
        "images_per_s, seconds": "training rate (median, quartiles), time of all epochs",
    },
    steps=steps,
    section=section,
    side_by_side=lambda results: choice(results)[0],
    estimate=estimate,
    always=arithmetic,
)
