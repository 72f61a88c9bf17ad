# SPDX-License-Identifier: Apache-2.0
"""Job 11: fewer static keys than tokens: accuracy against latency, at 64 and 256 tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean, median, stdev
from typing import Any

from gpu_queue.job import Context, Job, Result, Step, table
from gpu_queue.training import train_in_time

BASELINE = "softmax"
MIXERS = {  # by the name that a step may have
    BASELINE: BASELINE,
    "all-keys": "static_key",
    "quarter": "static_key(key_grid=1/4)",
    "sixteenth": "static_key(key_grid=1/16)",
    "pooled-to-a-sixteenth": "pooling(key_grid=1/16)",
    "identity": "identity",
}
PATCHES = {64: 4, 256: 2}  # side in pixels of a patch, by tokens of an image of 32 pixels
SEEDS = {64: (0, 1, 2, 3, 4), 256: (0, 1, 2)}
RATES = (5e-4, 1e-3, 2e-3)
SEARCH_SEED = 100
RECIPE = "small_images_vit"
EPOCHS, SEARCH_EPOCHS, TRAIN = 100, 20, 45_000
SETTINGS: dict[str, Any] = {
    "data.batch_size": 256,
    "schedule.warmup_epochs": 3,
    "augment.rand_augment": [2, 9],
}
TINY: dict[str, Any] = {
    "data.limit": 120,
    "data.batch_size": 32,
    "data.image_size": 16,
    "model.options.depth": 1,
    "model.options.embed_dim": 16,
    "model.options.num_heads": 2,
    "schedule.epochs": 2,
    "schedule.warmup_epochs": 1,
}
SIDE_BY_SIDE = 3
"""Runs on the GPU at once: models of 4 blocks and 128 channels leave it idle most of a step."""


# ---- measuring --------------------------------------------------------------------------------


def chosen_rate(results: Mapping[str, Result], tokens: int, mixer: str) -> float:
    """Return the learning rate that was best on validation in the search; the middle one if none.

    Args:
        results: Of the steps that are done, by name.
        tokens: Tokens of an image.
        mixer: One of `MIXERS`.
    """
    found = {
        rate: results[name]["val_last"]
        for rate in RATES
        if (name := _search_name(tokens, mixer, rate)) in results
    }
    return max(found, key=lambda rate: (found[rate], -rate)) if found else RATES[1]


def overrides(tokens: int, mixer: str, seed: int, rate: float, epochs: int) -> dict[str, Any]:
    """Return what a run changes of its recipe, by dotted key."""
    return {
        **SETTINGS,
        "model.mixer": MIXERS[mixer],
        "model.options.patch_size": PATCHES[tokens],
        "seed": seed,
        "optim.lr": rate,
        "schedule.epochs": epochs,
    }


def measure(
    context: Context, tokens: int, mixer: str, seed: int, epochs: int, rate: float | None = None
) -> Result:
    """Train one model, as far as the time lets, then time its evaluation."""
    from keymix import count, load, recipes
    from keymix.analysis.measure import measure_interleaved
    from keymix.train.recipe import replace_path

    lr = chosen_rate(context.results, tokens, mixer) if rate is None else rate
    changed = overrides(tokens, mixer, seed, lr, epochs) | {"data.spec": context.cifar10}
    recipe = replace_path(recipes.get(RECIPE), changed | (TINY if context.tiny else {}))
    run = train_in_time(context, recipe)
    summary, lines = run.summary, run.metrics()
    model = load(run.folder).model.to(context.device).eval()
    size = tuple(model.pretrained_cfg["input_size"])
    batch = 8 if context.tiny else 256
    took = measure_interleaved(
        {mixer: model},
        size,
        batch_size=batch,
        repeats=3 if context.tiny else 15,
    )[mixer]
    return {
        "tokens": tokens,
        "mixer": mixer,
        "seed": seed,
        "lr": lr,
        "epochs": summary.epochs,
        "batch": recipe.data.batch_size,
        "params": summary.params,
        "macs": count(model, size).macs,
        "top1_last": summary.last.test.scores["top1"],
        "val_last": lines[-1]["val_top1"],
        "val_before": lines[-max(1, len(lines) // 10) - 1]["val_top1"],
        "images_per_s": median([line["images_per_s"] for line in lines][1:] or [0.0]),
        "eval_images_per_s": took.images_per_s,
        "seconds": summary.seconds,
    }


# ---- telling ----------------------------------------------------------------------------------


def section(results: Mapping[str, Result]) -> str:
    """Say what fewer keys cost in accuracy and save in time, for both numbers of tokens."""
    runs: dict[tuple[int, str], list[Result]] = {}
    for name, result in results.items():
        if not name.startswith("search/"):
            runs.setdefault((result["tokens"], result["mixer"]), []).append(result)
    if not runs:
        return f"{len(results)} runs of the search for learning rates are done."
    parts = [_sentence(tokens, runs) for tokens in PATCHES]
    heads = ("tokens, mixer", "keys", "seeds", "test top-1, %", "against softmax, points")
    heads += ("MACs", "evaluation, images/s", "training, images/s", "lr", "still rising, points")
    rows = [
        _row(tokens, mixer, runs)
        for tokens in PATCHES
        for mixer in MIXERS
        if (tokens, mixer) in runs
    ]
    one = next(iter(runs.values()))[0]
    how = (
        f"CIFAR-10, {one['epochs']} epochs, batch {one['batch']}, weights of the last epoch; the "
        "learning rate of each mixer is the best of "
        f"{', '.join(f'{rate:g}' for rate in RATES)} on validation, of one run of "
        f"{SEARCH_EPOCHS} epochs at another seed. *Against softmax* is the mean of the "
        "differences at the same seed and their range; *still rising* is what validation gained in "
        "the last tenth of the epochs. Training rates share the GPU among "
        f"{SIDE_BY_SIDE} runs. One of these runs by itself:"
    )
    command = f"```bash\n{_command()}\n```"
    return "\n\n".join([" ".join(p for p in parts if p), table(heads, rows), how, command])


def _row(
    tokens: int, mixer: str, runs: Mapping[tuple[int, str], Sequence[Result]]
) -> tuple[object, ...]:
    found = runs[tokens, mixer]
    tops = [100 * run["top1_last"] for run in found]
    gains = _gains(tokens, mixer, runs)
    against = "" if mixer == BASELINE or not gains else _spread(gains)
    rising = mean(100 * (run["val_last"] - run["val_before"]) for run in found)
    return (
        f"{tokens}, `{MIXERS[mixer]}`",
        _keys(tokens, mixer),
        len(found),
        f"{mean(tops):.1f}" + (f" ± {stdev(tops):.1f}" if len(tops) > 1 else ""),
        against,
        f"{found[0]['macs'] / 1e6:.1f} M",
        f"{median(run['eval_images_per_s'] for run in found):,.0f}",
        f"{median(run['images_per_s'] for run in found):,.0f}",
        f"{found[0]['lr']:g}",
        f"{rising:+.1f}",
    )


def _gains(
    tokens: int, mixer: str, runs: Mapping[tuple[int, str], Sequence[Result]]
) -> list[float]:
    """Differences from softmax in points, of the seeds that both have."""
    base = {run["seed"]: run["top1_last"] for run in runs.get((tokens, BASELINE), [])}
    mine = {run["seed"]: run["top1_last"] for run in runs.get((tokens, mixer), [])}
    return [100 * (mine[seed] - base[seed]) for seed in sorted(mine.keys() & base.keys())]


def _spread(gains: Sequence[float]) -> str:
    if len(gains) == 1:
        return f"{gains[0]:+.1f} (one seed)"
    return f"{mean(gains):+.1f} ({min(gains):+.1f} to {max(gains):+.1f})"


def _sentence(tokens: int, runs: Mapping[tuple[int, str], Sequence[Result]]) -> str:
    """Say what a quarter and a sixteenth of the keys did, against all of them."""
    said = []
    whole = {run["seed"]: run["top1_last"] for run in runs.get((tokens, "all-keys"), [])}
    for mixer in ("quarter", "sixteenth"):
        few = {run["seed"]: run["top1_last"] for run in runs.get((tokens, mixer), [])}
        gains = [100 * (few[s] - whole[s]) for s in sorted(few.keys() & whole.keys())]
        if gains:
            said.append(f"a {mixer} of the keys {_spread(gains)} points")
    return f"At {tokens} tokens, against as many keys: {', '.join(said)}." if said else ""


def _keys(tokens: int, mixer: str) -> str:
    share = {"quarter": 4, "sixteenth": 16, "pooled-to-a-sixteenth": 16}.get(mixer, 1)
    return "–" if mixer == "identity" else str(tokens // share)


def _command() -> str:
    words = ["keymix train", RECIPE, "--data parquet:data/cifar10"]
    for key, value in overrides(64, "quarter", 0, RATES[1], EPOCHS).items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"--{key} {text!r}" if "(" in text else f"--{key} {text}")
    return " ".join([*words, "--out few-keys"])


# ---- the job ----------------------------------------------------------------------------------


def seconds(tokens: int, epochs: int) -> float:
    """Estimate a run beside two others: 6 ms a step of 256 images, twice that at 256 tokens."""
    step = 0.006 * (2 if tokens == 256 else 1) * SIDE_BY_SIDE
    return 60 + epochs * (TRAIN / SETTINGS["data.batch_size"] * step + 0.7)


def _search_name(tokens: int, mixer: str, rate: float) -> str:
    return f"search/{tokens}/{mixer}/{rate:g}"


def _step(name: str, estimate: float, **how: Any) -> Step:
    return Step(
        name=name,
        seconds=estimate,
        measure=partial(measure, **how),
        resumable=True,
        least=90.0,
        packages=("pyarrow",),
        data=("cifar10",),
        gpu_gib=4.0,
    )


def steps(tiny: bool) -> list[Step]:
    """The search first, then all mixers of a seed one after the other, 64 tokens before 256."""
    if tiny:
        few: dict[str, Any] = {"tokens": 64, "mixer": "quarter"}
        return [
            _step(_search_name(64, "quarter", RATES[0]), 5.0, **few, **_search(RATES[0])),
            _step("64/softmax/seed-0", 5.0, tokens=64, mixer=BASELINE, seed=0, epochs=EPOCHS),
            _step("64/quarter/seed-0", 5.0, **few, seed=0, epochs=EPOCHS),
        ]
    found = [
        _step(
            _search_name(tokens, mixer, rate),
            seconds(tokens, SEARCH_EPOCHS),
            tokens=tokens,
            mixer=mixer,
            **_search(rate),
        )
        for tokens in PATCHES
        for mixer in MIXERS
        for rate in RATES
    ]
    found += [
        _step(
            f"{tokens}/{mixer}/seed-{seed}",
            seconds(tokens, EPOCHS),
            tokens=tokens,
            mixer=mixer,
            seed=seed,
            epochs=EPOCHS,
        )
        for tokens in PATCHES
        for seed in SEEDS[tokens]
        for mixer in MIXERS
    ]
    return found


def _search(rate: float) -> dict[str, Any]:
    return {"seed": SEARCH_SEED, "epochs": SEARCH_EPOCHS, "rate": rate}


JOB = Job(
    number=11,
    name="few_keys",
    title="Fewer static keys than tokens",
    purpose=(
        "How many static keys are enough? Accuracy against time of `static_key` with all, "
        "a quarter and a sixteenth of the keys, beside softmax and two controls, on CIFAR-10 with "
        "64 and 256 tokens."
    ),
    form={
        "tokens, mixer, seed": "which run; `search/…` are of the search for learning rates",
        "lr, epochs, batch": "how it was trained",
        "params, macs": "trainable parameters; multiply-adds of one image",
        "top1_last, val_last": "test and validation accuracy of the last epoch's weights",
        "val_before": "validation accuracy a tenth of the epochs before the last",
        "images_per_s, eval_images_per_s": "median training rate of the epochs; evaluation alone",
        "seconds": "of all epochs",
    },
    steps=steps,
    section=section,
    side_by_side=lambda results: SIDE_BY_SIDE,
)
