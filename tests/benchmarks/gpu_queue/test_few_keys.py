# SPDX-License-Identifier: Apache-2.0
"""Job 11 searches a learning rate, trains with it, and sets fewer keys beside all of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from dry import apart

from gpu_queue.job import Result
from gpu_queue.jobs import few_keys, jobs
from gpu_queue.jobs.few_keys import BASELINE, EPOCHS, JOB, MIXERS, PATCHES, RATES, SEEDS
from keymix import recipes
from keymix.mixers.spec import parse_mixer
from keymix.train.recipe import Recipe, parse_value, replace_path


def recipe_of(changed: dict[str, Any]) -> Recipe:
    return replace_path(recipes.get(few_keys.RECIPE), changed)


@pytest.mark.slow
def test_the_dry_run_trains_with_the_rate_that_the_search_found(tmp_path: Path) -> None:
    results: dict[str, Result] = {}
    for step in JOB.steps(True):
        where = apart(tmp_path / step.name, results=dict(results))
        results[step.name] = step.measure(where)
    named = {name for line in JOB.form for name in line.split(", ")}
    assert all(result.keys() == named for result in results.values())
    few, plain = results["64/quarter/seed-0"], results["64/softmax/seed-0"]
    assert (few["lr"], plain["lr"]) == (RATES[0], RATES[1])  # searched, and not
    assert few["macs"] < plain["macs"]
    page = JOB.section(results)
    assert all(MIXERS[mixer] in page for mixer in (BASELINE, "quarter"))


def test_every_mixer_has_a_search_and_every_seed() -> None:
    assert JOB in jobs()
    names = [step.name for step in JOB.steps(False)]
    assert len(set(names)) == len(names)
    for tokens, seeds in SEEDS.items():
        for mixer in MIXERS:
            assert sum(f"search/{tokens}/{mixer}/" in name for name in names) == len(RATES)
            assert sum(name.startswith(f"{tokens}/{mixer}/") for name in names) == len(seeds)
    for mixer in MIXERS.values():
        parse_mixer(mixer)
    searches = [step.name.startswith("search/") for step in JOB.steps(False)]
    assert searches == sorted(searches, reverse=True)  # first, since the runs take their rates


def test_patches_make_as_many_tokens() -> None:
    assert {tokens: (32 // side) ** 2 for tokens, side in PATCHES.items()} == {64: 64, 256: 256}


def test_the_command_on_the_page_trains_the_same() -> None:
    words = shlex.split(few_keys._command())[2:]
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert (words[0], pairs.pop("--out")) == (few_keys.RECIPE, "few-keys")
    entries = {"data.spec": pairs.pop("--data")}
    entries |= {key[2:]: parse_value(key[2:], text) for key, text in pairs.items()}
    wanted = few_keys.overrides(64, "quarter", 0, RATES[1], EPOCHS)
    assert recipe_of(entries) == recipe_of(wanted | {"data.spec": "parquet:data/cifar10"})


def result(mixer: str, seed: int, top1: float) -> Result:
    return {
        "tokens": 64,
        "mixer": mixer,
        "seed": seed,
        "lr": 1e-3,
        "epochs": 100,
        "batch": 256,
        "params": 1,
        "macs": 10_000_000,
        "top1_last": top1,
        "val_last": top1,
        "val_before": top1 - 0.002,
        "images_per_s": 1000.0,
        "eval_images_per_s": 5000.0,
        "seconds": 60.0,
    }


def test_the_section_compares_at_the_same_seeds() -> None:
    found = [
        *(result(BASELINE, seed, 0.80) for seed in (0, 1)),
        *(result("all-keys", seed, 0.82) for seed in (0, 1, 2)),
        *(result("quarter", seed, 0.81 + 0.01 * seed) for seed in (0, 1)),
    ]
    page = JOB.section({f"64/{r['mixer']}/seed-{r['seed']}": r for r in found})
    assert "a quarter of the keys -0.5 (-1.0 to +0.0) points" in page
    assert "+2.0 (+2.0 to +2.0)" in page  # of the two seeds that softmax has
    assert "+0.2" in page  # still rising
    assert "search" in JOB.section({"search/64/quarter/0.001": result("quarter", 100, 0.5)})
