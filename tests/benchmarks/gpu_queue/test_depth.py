# SPDX-License-Identifier: Apache-2.0
"""Job 7 trains, stops, resumes and reads the maps; its section follows from the numbers."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from dry import apart

from costs import cost
from gpu_queue.job import Result, Step, Unfinished
from gpu_queue.jobs import depth
from gpu_queue.jobs.depth import JOB, PLAIN, RE
from gpu_queue.training import PREDICTIONS, TEXTS
from keymix import recipes
from keymix.train.loop import EpochRecord
from keymix.train.recipe import Recipe, parse_value, replace_path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """What the dry run measures."""
    base = tmp_path_factory.mktemp("depth")
    return {step.name: step.measure(apart(base / step.name)) for step in JOB.steps(True)}


# ---- measuring --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_dry_run_measures_both_mixers(measured: dict[str, Result]) -> None:
    assert [result["mixer"] for result in measured.values()] == [PLAIN, RE]
    plain, re = measured.values()
    assert re["params"] > plain["params"]
    assert re["macs"] > plain["macs"]
    assert [len(result["neighbours"]) for result in measured.values()] == [1, 1]
    assert plain["neighbours"] != re["neighbours"]


def test_the_form_names_what_a_result_holds(measured: dict[str, Result]) -> None:
    named = {name for line in JOB.form for name in line.split(", ")}
    assert all(result.keys() == named for result in measured.values())


def test_a_run_that_is_stopped_resumes_to_the_same_result(
    measured: dict[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = JOB.steps(True)[1]
    whole = EpochRecord.latest

    def stopped(self: Any) -> dict[str, float | None]:
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(self)

    with monkeypatch.context() as patched:
        patched.setattr(EpochRecord, "latest", stopped)
        with pytest.raises(Unfinished) as stop:
            step.measure(apart(tmp_path))
    assert stop.value.progress == {"epochs": 1, "of": 2}
    again = step.measure(apart(tmp_path))
    timed = {"seconds", "images_per_s"}
    assert {k: v for k, v in again.items() if k not in timed} == {
        k: v for k, v in measured[step.name].items() if k not in timed
    }
    kept = {path.name for path in (tmp_path / "keep").iterdir()}
    assert kept == {*TEXTS, PREDICTIONS}


def test_both_mixers_train_alike_but_for_the_mixer() -> None:
    plain, re = (recipe_of(depth.overrides(32, mixer, 1)) for mixer in (PLAIN, RE))
    assert plain != re
    assert replace_path(plain, {"model.mixer": RE}) == re
    assert (re.schedule.epochs, re.data.batch_size, re.seed) == (40, 512, 1)


def recipe_of(changed: dict[str, Any]) -> Recipe:
    return replace_path(recipes.get(depth.RECIPE), changed)


def test_the_command_on_the_page_trains_the_same() -> None:
    words = shlex.split(depth._command())[2:]
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert (words[0], pairs.pop("--out")) == (depth.RECIPE, "deepvit-32b")
    entries = {"data.spec": pairs.pop("--data")}
    entries |= {key[2:]: parse_value(key[2:], text) for key, text in pairs.items()}
    wanted = depth.overrides(32, RE, 0) | {"data.spec": "parquet:data/cifar10"}
    assert recipe_of(entries) == recipe_of(wanted)


@pytest.mark.slow
def test_estimates_count_the_multiply_adds_of_a_block() -> None:
    for mixer in (PLAIN, RE):
        options = recipe_of(depth.overrides(2, mixer, 0)).model.options
        two, three = (
            cost("vit_micro_p4_32", mixer=mixer, **options | {"depth": blocks}).macs
            for blocks in (2, 3)
        )
        assert three - two == depth.MACS[mixer]


def test_the_first_seed_fits_into_half_an_hour_and_comes_first() -> None:
    steps = JOB.steps(False)
    first = [step for step in steps if step.name.endswith("seed-0")]
    assert steps[:8] == first
    assert len(steps) == 16
    assert sum(step.seconds for step in first) / JOB.side_by_side({}) < 25 * 60
    assert all(step.resumable and step.seconds < 20 * 60 for step in steps)


def test_runs_that_are_done_correct_the_estimates() -> None:
    step = next(step for step in JOB.steps(False) if step.name == "16-blocks/softmax/seed-0")
    assert JOB.estimate(step, {}) == step.seconds
    slow = made(32, PLAIN, seconds=2 * depth.training_seconds(32, PLAIN))
    other = made(32, RE, seconds=9 * depth.training_seconds(32, RE))
    twice = JOB.estimate(step, named(slow, other))
    assert twice - step.seconds == pytest.approx(depth.training_seconds(16, PLAIN))
    assert JOB.estimate(step, named(other)) > twice


# ---- telling ----------------------------------------------------------------------------------


def made(
    blocks: int,
    mixer: str,
    *,
    seed: int = 0,
    top1: float = 0.8,
    alike: int = 0,
    centred: float = 0.1,
    seconds: float = 100.0,
) -> Result:
    """A result, with so many neighbours alike in 85 % of their columns, the others in 10 %."""
    pair = {"cosine": 0.9 if alike else 0.1, "centred": centred}
    shares = [0.85] * alike + [0.1] * (blocks - 1 - alike)
    return {
        "depth": blocks,
        "mixer": mixer,
        "seed": seed,
        "epochs": 40,
        "batch": 512,
        "precision": "bf16",
        "params": 1,
        "top1_last": top1,
        "top1_best": top1 - 0.01,
        "best_epoch": 38,
        "test_images": 10_000,
        "seconds": seconds,
        "images_per_s": 12_345.6,
        "gpu_gib": 20.25,
        "macs": 1,
        "images": 256,
        "neighbours": [{**pair, "share": share} for share in shares],
        "like_nearest": 3,
        "entropy": 0.97,
        "headline": "",
    }


def named(*results: Result) -> dict[str, Result]:
    return {f"{r['depth']}-blocks/{r['mixer']}/seed-{r['seed']}": r for r in results}


def answer(*results: Result) -> str:
    return JOB.section(named(*results)).partition("\n\n")[0]


def test_the_section_answers_at_the_greatest_depth() -> None:
    text = answer(
        made(12, PLAIN, alike=2, top1=0.81),
        made(12, RE, top1=0.80),
        made(32, PLAIN, alike=27, top1=0.78),
        made(32, RE, alike=1, top1=0.83, centred=0.02),
    )
    assert text.startswith(
        "Without Re-attention 27 of 31 neighbouring maps are alike at 32 blocks; with it, 1. Test "
        "accuracy there: 78.0 % against 83.0 %; one seed, so which of them is better is not "
        "certain."
    )
    assert "0.10 against 0.02 there, so what the plain maps share is mostly even attention" in text
    assert "Without Re-attention accuracy changes from 12 to 32 blocks by -3.0 points." in text
    assert "With Re-attention accuracy changes from 12 to 32 blocks by +3.0 points." in text


def test_a_common_pattern_is_called_one() -> None:
    text = answer(made(32, PLAIN, alike=31, centred=0.7), made(32, RE))
    assert "share is a common pattern too." in text


def test_where_nothing_is_alike_no_pattern_is_spoken_of() -> None:
    assert "share is" not in answer(made(32, PLAIN), made(32, RE))


def test_a_difference_within_the_test_sets_error_is_no_difference() -> None:
    text = answer(made(32, PLAIN, top1=0.800), made(32, RE, top1=0.805))
    # 1.96 sqrt((0.8 x 0.2 + 0.805 x 0.195) / 10,000) = 1.10 points
    assert "one seed, and 10,000 images distinguish no less than 1.1 points." in text


def test_two_seeds_agree_or_they_do_not() -> None:
    plain = [made(24, PLAIN, seed=seed, top1=0.80) for seed in (0, 1)]
    ahead = answer(*plain, made(24, RE, top1=0.82), made(24, RE, seed=1, top1=0.81))
    assert "80.0 / 80.0 % against 82.0 / 81.0 %" in ahead
    assert "Re-attention is ahead in each of 2 seeds, by 1.0 to 2.0 points: likely" in ahead
    behind = answer(*plain, made(24, RE, top1=0.78), made(24, RE, seed=1, top1=0.79))
    assert "the plain model is ahead in each of 2 seeds, by 1.0 to 2.0 points" in behind
    split = answer(*plain, made(24, RE, top1=0.82), made(24, RE, seed=1, top1=0.79))
    assert "2 seeds do not agree on which is better: no clear difference." in split


def test_one_run_makes_a_section() -> None:
    section = JOB.section(named(made(32, PLAIN, alike=30)))
    assert section.startswith(
        "At 32 blocks without Re-attention 30 of 31 neighbouring maps are alike, and test accuracy "
        "is 80.0 %.\n\n| blocks |"
    )
    assert "\n| 32 | 80.0 | – | 30 of 31 | – | 79.3, 80.9 | 16, 0 of 32 |\n" in section
    row = "\n| 32, softmax | 79.0 | 0 of 31 | 3 of 32 | 0.90 | 0.10 | 0.97 | 12,346 |\n"
    assert row in section
    assert "Seed 0 alone" in section
    assert "at most 20.2 GiB" in section


def test_seeds_that_only_one_mixer_has_are_not_compared() -> None:
    text = answer(made(32, PLAIN, top1=0.7), made(32, RE, seed=1, top1=0.9))
    assert "against" not in text
    assert "At 32 blocks with Re-attention 0 of 31" in text


@pytest.mark.parametrize("many", range(1, 9))
def test_any_beginning_of_the_queue_makes_a_section(many: int) -> None:
    steps: list[Step] = JOB.steps(False)[:many]
    found = []
    for step in steps:
        blocks, mixer, seed = step.name.split("/")
        found.append(made(int(blocks.split("-")[0]), mixer, seed=int(seed.split("-")[1])))
    section = JOB.section(named(*found))
    depths, runs = (
        [line.count("|") for line in part.splitlines()] for part in section.split("\n\n")[1:3]
    )
    assert (len(depths), len(runs)) == (2 + (many + 1) // 2, 2 + many)
    assert len({*depths}) == len({*runs}) == 1


def test_all_seeds_are_on_the_page() -> None:
    found = [
        made(blocks, mixer, seed=seed, top1=0.5 + seed / 10)
        for blocks, mixer, seed in itertools.product(depth.DEPTHS, (PLAIN, RE), depth.SEEDS)
    ]
    section = JOB.section(named(*found))
    assert section.count("50.0 / 60.0") == 8 + 2
    assert "Seeds 0, 1, apart by /" in section
