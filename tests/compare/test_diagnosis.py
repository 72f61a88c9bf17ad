# SPDX-License-Identifier: Apache-2.0
"""What a comparison finds out about itself, on answers whose truth is planted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from few_digits import small
from PIL import Image

from keymix.analysis.answers import whole
from keymix.analysis.certainty import MARGIN
from keymix.compare import diagnosis
from keymix.compare.defaults import updates
from keymix.compare.diagnosis import Found, diagnose, slope_at_end
from keymix.compare.references import References
from keymix.compare.results import Rules, outcome, recommended
from keymix.compare.runs import Scores
from keymix.data.kinds import IMAGE
from keymix.recipes import resolve
from keymix.report.answer import answer
from keymix.report.checked import Checked, Finding
from keymix.report.record import HistoryLine, ReferenceRow, opened
from keymix.task import get_task
from keymix.tasks.classification.answers import ClassAnswers
from keymix.train.recipe import replace_path

TASK = get_task("classification")
N = 2_000
KINDS = {"softmax": "mixer", "static_key": "mixer", "identity": "control", "plain": "reference"}


def target(share: float = 0.5) -> np.ndarray:
    return (np.arange(N) < share * N).astype(np.int64)


def answered(accuracy: float, seed: int, *, true: np.ndarray) -> ClassAnswers:
    right = np.random.default_rng(seed).random(N) < accuracy
    return of(np.where(right, true, 1 - true), true)


def of(predicted: np.ndarray, true: np.ndarray) -> ClassAnswers:
    return ClassAnswers(
        index=np.arange(N), target=true, predicted=predicted, top5=None, classes=("a", "b")
    )


def history(rise: float, *, epochs: int = 20) -> tuple[HistoryLine, ...]:
    flat = [min(0.5 + rise * i, 0.5 + rise * epochs) for i in range(epochs)]
    return tuple(HistoryLine(epoch=i + 1, values={"val_top1": v}) for i, v in enumerate(flat))


def found(
    accuracy: dict[str, float],
    *,
    seeds: int = 3,
    share: float = 0.5,
    rise: float = 0.0,
    epochs: int = 1_000,
    answers: dict[str, np.ndarray] | None = None,
    linear: float | None = None,
    checked: Checked | None = None,
    margin: float | None = MARGIN,
) -> Found:
    """Make what a comparison found, of models of some accuracy on two classes."""
    true = target(share)
    done = []
    for k, (label, p) in enumerate(accuracy.items()):
        for seed in range(seeds):
            given = (answers or {}).get(label)
            last = answered(p, 100 * k + seed, true=true) if given is None else of(given, true)
            done.append(
                SimpleNamespace(
                    run=SimpleNamespace(
                        mixer=label, seed=seed, history=history(rise + seed * 1e-5)
                    ),
                    answers={"last": last},
                    scores=lambda which, p=p: SimpleNamespace(val=p),
                )
            )
    rows, references = [], {}
    for name, learned, given in (
        ("largest class", False, np.full(N, int(share > 0.5))),
        ("logistic regression", True, None),
    ):
        if learned and linear is None:
            continue
        references[name] = (
            of(given, true) if given is not None else answered(linear or 0.0, 7, true=true)
        )
        rows.append(
            ReferenceRow(
                name=name, about="", learned=learned, seconds=1.5, low=None, high=None, scores={}
            )
        )
    recipe = replace_path(
        resolve("digits_vit"), {"schedule.epochs": epochs, "schedule.warmup_epochs": 0}
    )
    mixers = [
        SimpleNamespace(
            label=label,
            control=KINDS[label] == "control",
            reference=KINDS[label] == "reference",
        )
        for label in accuracy
    ]
    made: Any = {
        "plan": SimpleNamespace(recipe=recipe, mixers=mixers, margin=margin),
        "data": SimpleNamespace(
            task_kind=TASK,
            kind=IMAGE,
            sizes={"train": 200, "test": N},
            limit=None,
            test_fraction=None,
        ),
        "done": done,
        "references": References(rows=tuple(rows), answers=references),
        "costs": {},
        "checked": checked,
    }
    return Found(**made)


def kinds(given: Found) -> list[str]:
    return [each.kind for each in diagnose(given)]


GOOD = {"softmax": 0.8, "static_key": 0.8, "identity": 0.7}


def test_models_that_learned_and_differ_from_the_control_raise_nothing() -> None:
    assert kinds(found(GOOD, linear=0.6)) == []


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_guesses_learned_nothing_whatever_the_classes_shares_are(share: float) -> None:
    made = diagnose(found(dict.fromkeys(GOOD, 0.5), share=share, linear=0.5))
    assert made[0].kind == "nothing_learned"
    assert not {"control_level", "reference_ahead"} & {each.kind for each in made}


def test_one_answer_for_all_learned_nothing_though_its_accuracy_is_high() -> None:
    larger = dict.fromkeys(GOOD, np.ones(N, dtype=np.int64))
    made = diagnose(found(GOOD, share=0.72, answers=larger))
    assert [each.kind for each in made[:2]] == ["nothing_learned", "constant_predictions"]
    assert "softmax (3 of 3 runs)" in made[1].text


def test_few_updates_are_named_with_the_epochs_that_make_enough() -> None:
    few = found(dict.fromkeys(GOOD, 0.5), epochs=4)
    (made, *_) = diagnose(few)
    done = updates(few.plan.recipe, 200)
    assert f"{done} updates" in made.remedy
    assert "--epochs 250" in made.remedy  # of four steps each


def test_one_model_that_learned_is_enough_for_the_others_to_be_compared() -> None:
    assert "nothing_learned" not in kinds(found({**dict.fromkeys(GOOD, 0.5), "softmax": 0.6}))


def test_some_constant_runs_are_named_with_their_number() -> None:
    made = diagnose(found(GOOD, answers={"static_key": np.zeros(N, dtype=np.int64)}))
    assert [each.kind for each in made] == ["constant_predictions"]
    assert "static_key (3 of 3 runs)" in made[0].text


def test_leaks_come_before_what_the_models_did() -> None:
    leak = Finding(
        level="falsifies", what="images in more than one split", count=7, where=(), remedy="split"
    )
    checked = Checked(findings=(leak,), too_narrow=False, looked_at={}, not_looked_at=())
    made = diagnose(found(GOOD, rise=0.01, checked=checked))
    assert [each.kind for each in made] == ["data_problem", "still_learning"]
    assert "images in more than one split (7)" in made[0].text


def test_frames_of_one_video_are_a_problem_of_the_data() -> None:
    checked = Checked(findings=(), too_narrow=True, looked_at={}, not_looked_at=())
    assert kinds(found(GOOD, checked=checked)) == ["data_problem"]


def test_a_test_split_of_one_unit_shows_nothing() -> None:
    given = found(GOOD)
    for reading in given.done:
        one: Any = reading.answers
        one["last"] = replace(one["last"], index=np.arange(1), target=np.zeros(1, dtype=np.int64))
        one["last"] = replace(one["last"], predicted=np.zeros(1, dtype=np.int64))
    (made,) = diagnose(given)
    assert made.kind == "data_problem"
    assert "a single image" in made.said


@pytest.mark.parametrize(("rise", "says"), [(0.01, True), (0.0, False), (0.001, False)])
def test_a_training_that_was_too_short_is_called_so(rise: float, says: bool) -> None:
    given = found(GOOD, rise=rise, epochs=20)
    assert (kinds(given) == ["still_learning"]) is says


@pytest.mark.parametrize("epochs", [1, 2])
def test_few_updates_in_too_few_epochs_for_a_slope_are_too_short(
    epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = found(GOOD, epochs=epochs)
    (made,) = diagnose(few)
    done = updates(few.plan.recipe, 200)
    assert (made.kind, made.epochs) == ("still_learning", 250)
    assert f"{done} updates" in made.text
    monkeypatch.setattr(diagnosis, "FLOOR", done)
    assert not kinds(few)  # many images make enough updates in an epoch


def test_from_three_epochs_on_the_slope_decides_and_no_number_of_updates() -> None:
    assert not kinds(found(GOOD, epochs=3))


def test_a_rise_is_that_of_a_tenth_of_the_training() -> None:
    (made,) = diagnose(found(GOOD, rise=0.004, epochs=20))
    assert "0.8 points per 2 epochs" in made.text
    (made,) = diagnose(found(GOOD, rise=0.008, epochs=8))
    assert "0.8 points per epoch" in made.text


def test_the_slope_is_that_of_the_last_fifth_and_needs_three_epochs() -> None:
    bent = [*history(0.02, epochs=8), *history(0.0, epochs=2)]
    lines = [HistoryLine(epoch=i, values={"val_top1": 0.5 + 0.1 * i}) for i in range(2)]
    assert slope_at_end([lines], "val_top1") is None
    slope = slope_at_end([bent[:8]], "val_top1")
    assert slope is not None
    assert slope[0] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("control", "kind"), [(0.8, "control_unbeaten"), (0.87, "control_level"), (0.7, None)]
)
def test_a_control_that_no_mixer_beats_is_named(control: float, kind: str | None) -> None:
    """At 2,000 images intervals are 3 points wide: only a control ahead closes the question."""
    made = diagnose(found({"softmax": 0.8, "static_key": 0.8, "identity": control}))
    assert [each.kind for each in made] == ([] if kind is None else [kind])
    assert all("identity" in each.said for each in made)


@pytest.mark.parametrize(("margin", "kind"), [(0.02, "unbeaten"), (0.1, "level")])
def test_the_margin_of_the_plan_says_how_near_the_control_must_be(margin: float, kind: str) -> None:
    equal = {"softmax": 0.8, "static_key": 0.8, "identity": 0.8}
    assert kinds(found(equal, margin=margin)) == [f"control_{kind}"]


@pytest.mark.parametrize(
    ("known", "option"), [({"limit": 500}, "--limit"), ({"test_fraction": 0.1}, "test_fraction")]
)
def test_more_test_images_come_by_the_option_that_the_data_have(
    known: dict[str, float], option: str
) -> None:
    given = found({"softmax": 0.8, "static_key": 0.81, "identity": 0.8})
    (made,) = diagnose(given)
    assert "`--" not in made.remedy  # a test split of the data's own
    vars(given.data).update(known)
    (made,) = diagnose(given)
    assert f"{option}`" in made.remedy


def test_a_control_is_level_where_no_mixer_can_be_better_by_the_margin() -> None:
    true = target()
    same = {name: answered(0.8, 7, true=true).predicted for name in ("softmax", "identity")}
    (made,) = diagnose(found({"softmax": 0.8, "identity": 0.8}, answers=same))
    assert made.kind == "control_level"


def test_no_mixer_is_recommended_where_only_controls_were_compared() -> None:
    level = recommended(found({"identity": 0.8}), 0.02, set())
    assert level is not None
    assert (level.pick, level.reason) == (None, "only controls were compared")


@pytest.mark.parametrize(("seeds", "words"), [(1, "1 seed leave"), (3, "3 seeds leave")])
def test_what_is_left_open_counts_the_seeds(seeds: int, words: str) -> None:
    (made,) = diagnose(found({"softmax": 0.8, "static_key": 0.81, "identity": 0.8}, seeds=seeds))
    assert words in made.text


def test_no_mixer_is_recommended_where_none_beats_the_control() -> None:
    given = found({"softmax": 0.8, "static_key": 0.8, "identity": 0.8})
    for kind in ("control_level", "control_unbeaten"):
        level = recommended(given, 0.02, {kind})
        assert level is not None
        assert level.pick is None
        assert "identity" in level.reason
    usual = recommended(given, 0.02, {"still_learning"})
    assert usual is not None
    assert "identity" not in usual.reason


@pytest.mark.parametrize("which", ["logistic regression", "plain"])
def test_a_reference_that_beats_the_best_mixer_is_named(which: str) -> None:
    if which == "plain":
        made = diagnose(found({**GOOD, "plain": 0.9}))
    else:
        made = diagnose(found(GOOD, linear=0.9))
    assert [each.kind for each in made] == ["reference_ahead"]
    assert which in made[0].said.lower()


def cut(given: Found, images: int) -> Found:
    """Leave every run the answers to so many images, evenly spread."""

    def some(answers: Any) -> Any:
        kept = ("index", "target", "predicted")
        return replace(answers, **{key: getattr(answers, key)[:: N // images] for key in kept})

    for reading in given.done:
        all_of: Any = reading.answers
        all_of["last"] = some(all_of["last"])
    named: Any = given.references.answers
    named |= {name: some(answers) for name, answers in named.items()}
    return given


def solved(wrong: int, linear: float, *, images: int = 125) -> Found:
    """Two mixers that get some images wrong, others each, whatever the seed."""
    true, step = target(), N // images
    given = {}
    for k, label in enumerate(("softmax", "static_key")):
        given[label] = true.copy()
        places = [step * (10 + 40 * i + 20 * k) for i in range(wrong)]
        given[label][places] = 1 - given[label][places]
    return cut(found(dict.fromkeys(given, 0.98), answers=given, linear=linear), images)


def test_a_task_that_all_solve_is_too_easy_where_no_seeds_would_help() -> None:
    assert kinds(solved(2, 0.98)) == ["ceiling"]
    assert kinds(solved(2, 0.8)) == []  # a linear model does not solve it
    assert kinds(solved(2, 0.98, images=N)) == []  # so many images show that they are equal


def test_few_test_units_come_before_a_longer_training() -> None:
    made = kinds(cut(found(GOOD, rise=0.01), 9))
    assert made.index("few_units") < made.index("still_learning")


@pytest.mark.parametrize(("fall", "first"), [(0.0, "Check the labels"), (0.02, "Train longer")])
def test_labels_come_first_where_nothing_falls_and_nothing_linear_is_learned(
    fall: float, first: str
) -> None:
    given = found(dict.fromkeys(GOOD, 0.5), linear=0.5, epochs=4)
    for reading in given.done:
        run: Any = reading.run
        run.history = tuple(
            replace(line, values={**line.values, "val_loss": 0.7 - fall * i})
            for i, line in enumerate(run.history)
        )
    (made, *_) = diagnose(given)
    assert made.kind == "nothing_learned"
    assert made.remedy.startswith(first)


def test_a_reference_that_is_equal_is_no_news() -> None:
    assert kinds(found({**GOOD, "plain": 0.8}, linear=0.8)) == []


# ---- the first line -------------------------------------------------------------------------


def answered_alike(level: float, seed: int, *, true: np.ndarray, loss: float = 0.0) -> ClassAnswers:
    """Answer most images as every retraining does, and lose some of those that are right."""
    difficulty, again = np.random.default_rng(0).random(N), np.random.default_rng(seed + 1)
    right = 0.9 * difficulty + 0.1 * again.random(N) < level  # 83 % where it is 0.8
    right &= again.random(N) >= loss
    return of(np.where(right, true, 1 - true), true)


def first_line(given: Found, finished: Path) -> str:
    """What stands first on page and terminal: what is wrong, else the title."""
    labels = [each.label for each in given.plan.mixers]
    seeds = sorted({each.run.seed for each in given.done})
    controls, references = given.labels("control"), given.labels("reference")
    scores: dict[str, dict[int, Scores]] = {
        label: {
            seed: Scores(val=whole(each), test={"top1": whole(each)}, answers=each)
            for seed, each in given.answers(label).items()
        }
        for label in labels
    }
    rules = Rules(margin=MARGIN, controls=controls, references=references)
    rows = outcome(labels, baseline="softmax", scores=scores, task=TASK, rules=rules)
    diagnoses = diagnose(given)
    shell = opened(json.loads((finished / "results.json").read_text()), where="the record")
    record = replace(
        shell,
        mixers=tuple(
            replace(shell.mixers[0], label=label, control=label in controls) for label in labels
        ),
        outcome=replace(shell.outcome, last=rows),
        diagnoses=diagnoses,
        recommendation=recommended(given, MARGIN, {each.kind for each in diagnoses}),
        margin=MARGIN,
        baseline="softmax",
        costs={},
        seeds=tuple(seeds),
    )
    return " ".join([*(each.said for each in diagnoses[:1]), answer(record).title])


def lossy(loss: float, seeds: int) -> Found:
    """Three mixers of one accuracy, of which static_key then loses a share of its right answers."""
    given, true = found(GOOD, seeds=seeds), target()
    for k, each in enumerate(given.done):
        less = loss if each.run.mixer == "static_key" else 0.0
        level = 0.6 if each.run.mixer == "identity" else 0.8
        answers: Any = each.answers
        answers["last"] = answered_alike(level, k, true=true, loss=less)
    return given


@pytest.mark.parametrize("share", [0.7, 0.9])
def test_first_line_says_that_guesses_learned_nothing(share: float, finished: Path) -> None:
    line = first_line(found(dict.fromkeys(GOOD, 0.5), share=share, linear=0.5), finished)
    assert line.startswith("No model learned this data")


def test_first_line_says_that_equal_mixers_are_equal(finished: Path) -> None:
    assert first_line(lossy(0.0, 5), finished).startswith("static_key equals softmax within 2.0")


def test_first_line_says_what_a_worse_mixer_loses(finished: Path) -> None:
    line = first_line(lossy(0.08, 5), finished)
    assert line.startswith("No mixer is shown to beat softmax; static_key is ")
    points = float(line.partition("static_key is ")[2].split()[0])
    assert points == pytest.approx(100 * 0.08 * 0.83, abs=1)


def test_first_line_says_that_data_leak_or_training_was_short(finished: Path) -> None:
    leak = Finding(
        level="falsifies", what="images in more than one split", count=7, where=(), remedy="split"
    )
    checked = Checked(findings=(leak,), too_narrow=False, looked_at={}, not_looked_at=())
    assert first_line(found(GOOD, checked=checked), finished).startswith("The data falsify")
    assert first_line(found(GOOD, rise=0.01), finished).startswith("Training was too short")


# ---- with trained models --------------------------------------------------------------------


Planted = Literal["noise", "pattern", "shuffled"]


def noise(folder: Path, counts: dict[str, int], planted: Planted) -> Path:
    """Write images of noise, or with a dark half that says the class, or would say it."""
    rng = np.random.default_rng(0)
    for k, (name, count) in enumerate(counts.items()):
        for i in range(count):
            pixels = rng.integers(0, 256, (12, 12), dtype=np.uint8)
            half = int(rng.integers(2)) if planted == "shuffled" else k
            if planted != "noise":
                pixels[:, 6 * half : 6 * half + 6] //= 4
            path = folder / "train" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "planted"),
    [((140, 60), "noise"), ((100, 100), "pattern"), ((100, 100), "shuffled")],
)
def test_noise_is_said_to_be_unlearnable_and_a_pattern_is_learned(
    tmp_path: Path, counts: tuple[int, int], planted: Planted
) -> None:
    data = noise(tmp_path / "data", dict(zip("ab", counts, strict=True)), planted)
    done = small(
        tmp_path / "out",
        data=f"folder:{data}",
        recipe="digits_vit",
        limit=None,
        epochs=12,
        seeds=2,
        reference=True,
        overrides={"data.batch_size": 16, "data.channels": 1},
    )
    record = done.record
    assert record.data.task_kind.score.key == ("balanced" if planted == "noise" else "top1")
    if planted == "pattern":
        assert "nothing_learned" not in [each.kind for each in record.diagnoses]
        return
    assert record.diagnoses[0].kind == "nothing_learned"
    assert record.recommendation is not None
    assert record.recommendation.pick is None
    page = done.report.read_text(encoding="utf-8")
    assert 'id="nothing_learned"' in page
