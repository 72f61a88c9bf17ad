# SPDX-License-Identifier: Apache-2.0
"""What a comparison finds out about itself, on answers whose truth is planted."""

from __future__ import annotations

import json
import re
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
from keymix.compare.findings import (
    ALWAYS,
    OF_DIFFERENCES,
    Found,
    decide,
    findings,
    slope_at_end,
)
from keymix.compare.references import References
from keymix.compare.results import Rules, outcome
from keymix.compare.runs import Scores
from keymix.data.findings import IN_SEQUENCES
from keymix.data.kinds import IMAGE
from keymix.recipes import resolve
from keymix.report.answer import answer
from keymix.report.checked import Checked, DataFinding
from keymix.report.comparison_page import render
from keymix.report.record import (
    Finding,
    HistoryLine,
    ReferenceRow,
    Results,
    opened,
)
from keymix.report.words import finding_text
from keymix.task import get_task
from keymix.tasks.classification.answers import ClassAnswers
from keymix.train.recipe import replace_path

TASK = get_task("classification")
N = 2_000
KINDS = {
    "softmax": "mixer",
    "static_key": "mixer",
    "key_value": "mixer",
    "identity": "control",
    "plain": "reference",
}


def target(share: float = 0.5) -> np.ndarray:
    return (np.arange(N) < share * N).astype(np.int64)


def answered(accuracy: float, seed: int, *, true: np.ndarray) -> ClassAnswers:
    right = np.random.default_rng(seed).random(N) < accuracy
    return of(np.where(right, true, 1 - true), true)


def of(predicted: np.ndarray, true: np.ndarray) -> ClassAnswers:
    return ClassAnswers(
        index=np.arange(N),
        target=true,
        predicted=predicted,
        top5=np.ones(N, dtype=bool),
        confidence=np.ones(N, dtype=np.float16),
        classes=("a", "b"),
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
    check: Checked | None = None,
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
        "plan": SimpleNamespace(
            recipe=recipe, mixers=mixers, margin=margin, baseline="softmax", start=None
        ),
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
        "checked": check,
    }
    return Found(**made)


def kinds(given: Found) -> list[str]:
    return [each.kind for each in findings(given)]


def the(kind: str, given: Found) -> dict[str, Any]:
    """Return the numbers of the finding of a kind."""
    (made,) = (each for each in findings(given) if each.kind == kind)
    return dict(made.numbers)


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


def checked(
    level: Literal["falsifies", "warning"] = "falsifies",
    *,
    what: str = "images in more than one split",
    narrow: bool = False,
) -> Checked:
    """Return a check that found copies in several splits, or something else."""
    leak = DataFinding(level=level, what=what, count=7, where=(), remedy="split")
    return Checked(findings=(leak,), too_narrow=narrow, looked_at={}, not_looked_at=())


GOOD = {"softmax": 0.8, "static_key": 0.8, "identity": 0.7}
FACES = {"softmax": 0.52, "static_key": 0.77, "key_value": 0.68, "identity": 0.51}


def test_models_that_learned_and_differ_from_the_control_raise_nothing() -> None:
    assert kinds(found(GOOD, linear=0.6)) == []


# ---- did anything learn? --------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_guesses_learned_nothing_whatever_the_classes_shares_are(share: float) -> None:
    made = kinds(found(dict.fromkeys(GOOD, 0.5), share=share, linear=0.5))
    assert made[0] == "nothing_learned"
    assert not {"control_level", "control_open", "reference_ahead", "few_seeds"} & {*made}


def test_one_answer_for_all_learned_nothing_though_its_accuracy_is_high() -> None:
    larger = dict.fromkeys(GOOD, np.ones(N, dtype=np.int64))
    given = found(GOOD, share=0.72, answers=larger)
    assert kinds(given)[:2] == ["nothing_learned", "constant_predictions"]
    assert the("constant_predictions", given)["every"]


def test_two_seeds_that_differ_much_have_still_learned() -> None:
    """The interval over seeds is of other trainings; these two models are far above chance."""
    given = found({"softmax": 0.6, "static_key": 0.6}, seeds=2)
    for each in given.done[::2]:
        answers: Any = each.answers
        answers["last"] = answered(0.95, each.run.seed, true=target())
    assert not {"nothing_learned", "baseline_at_chance"} & {*kinds(given)}


def test_a_baseline_at_chance_is_the_first_thing_to_say() -> None:
    given = cut(found(FACES, seeds=2, epochs=128), 250)
    assert kinds(given)[0] == "baseline_at_chance"
    numbers = the("baseline_at_chance", given)
    assert numbers["mixer"] == "softmax"
    assert numbers["low"] < 0 < numbers["high"]
    assert "baseline_at_chance" not in kinds(found({**FACES, "softmax": 0.6}))


def test_a_baseline_whose_interval_reaches_chance_is_there_whatever_its_share_is() -> None:
    numbers = the("baseline_at_chance", cut(found({**FACES, "softmax": 0.55}), 250))
    assert numbers["gain"] > 0.1 * numbers["best_gain"]
    assert numbers["low"] < 0


def test_a_baseline_that_gives_nearly_one_answer_is_at_chance_whatever_its_interval_says() -> None:
    true = target()
    nearly = np.where(np.arange(N) % 25 == 0, true, 0)  # right where it does not answer 0
    given = found(FACES, answers={"softmax": nearly})
    assert the("baseline_at_chance", given)["low"] > 0


def test_one_model_that_learned_is_enough_for_the_others_to_be_compared() -> None:
    assert "nothing_learned" not in kinds(found({**dict.fromkeys(GOOD, 0.5), "softmax": 0.6}))


@pytest.mark.parametrize(("fall", "labels"), [(0.0, True), (0.02, False)])
def test_labels_come_first_where_nothing_falls_and_nothing_linear_is_learned(
    fall: float, labels: bool
) -> None:
    given = found(dict.fromkeys(GOOD, 0.5), linear=0.5, epochs=4)
    for reading in given.done:
        run: Any = reading.run
        run.history = tuple(
            replace(line, values={**line.values, "val_loss": 0.7 - fall * i})
            for i, line in enumerate(run.history)
        )
    numbers = the("nothing_learned", given)
    assert numbers["check_labels"] is labels
    assert numbers["epochs"] == (None if labels else 250)  # of four updates each


# ---- are the data fit? ----------------------------------------------------------------------


def test_leaks_come_before_what_the_models_did() -> None:
    given = found(GOOD, rise=0.01, check=checked())
    assert kinds(given) == ["data_problem", "still_learning"]
    assert the("data_problem", given)["what"] == [["images in more than one split", 7]]


def test_what_the_check_calls_a_warning_falsifies_nothing_here() -> None:
    assert kinds(found(GOOD, check=checked("warning"))) == []
    assert kinds(found(GOOD, check=checked("warning", narrow=True))) == ["narrow_intervals"]


def test_frames_that_keymix_split_falsify_and_are_said_once() -> None:
    drawn = checked(what=IN_SEQUENCES, narrow=True)
    assert kinds(found(GOOD, check=drawn)) == ["data_problem"]


def test_a_test_split_of_one_unit_shows_nothing() -> None:
    given = found(GOOD)
    for reading in given.done:
        one: Any = reading.answers
        one["last"] = replace(one["last"], index=np.arange(1), target=np.zeros(1, dtype=np.int64))
        one["last"] = replace(one["last"], predicted=np.zeros(1, dtype=np.int64))
    assert kinds(given) == ["one_unit"]


@pytest.mark.parametrize(("images", "few"), [(18, True), (20, False)])
def test_few_test_units_come_before_a_longer_training(images: int, few: bool) -> None:
    made = kinds(cut(found(GOOD, rise=0.01), images))  # 18 gives 19
    assert ("few_units" in made) is few
    assert not few or made.index("few_units") < made.index("still_learning")


def test_some_constant_runs_are_named_with_their_number() -> None:
    given = found(GOOD, answers={"static_key": np.zeros(N, dtype=np.int64)})
    assert kinds(given) == ["constant_predictions"]
    numbers = the("constant_predictions", given)
    assert (numbers["runs"], numbers["every"]) == ({"static_key": [3, 3]}, False)


# ---- was it trained long enough? ------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "few"), [(1, True), (127, True), (199, True), (200, False)])
def test_few_updates_are_few_however_flat_the_end_is(epochs: int, few: bool) -> None:
    given = found(GOOD, epochs=epochs, rise=0.0)
    assert kinds(given) == (["few_updates"] if few else [])  # 800 of four an epoch are enough
    if few:
        numbers = the("few_updates", given)
        assert (numbers["updates"], numbers["epochs"]) == (4 * epochs, 250)


@pytest.mark.parametrize(("rise", "says"), [(0.01, True), (0.0, False), (0.001, False)])
def test_models_that_still_rise_are_called_so_after_any_number_of_updates(
    rise: float, says: bool
) -> None:
    made = kinds(found(GOOD, rise=rise, epochs=20))
    assert ("still_learning" in made) is says
    assert (kinds(found(GOOD, rise=rise / 50)) == ["still_learning"]) is says  # of 1,000 epochs


def test_a_rise_is_that_of_a_tenth_of_the_training() -> None:
    numbers = the("still_learning", found(GOOD, rise=0.004, epochs=20))
    assert (numbers["change"], numbers["per"]) == (pytest.approx(0.008, abs=1e-4), 2)
    numbers = the("still_learning", found(GOOD, rise=0.008, epochs=8))
    assert (numbers["change"], numbers["per"]) == (pytest.approx(0.008, abs=1e-4), 1)


def test_the_slope_is_that_of_the_last_fifth_and_needs_three_epochs() -> None:
    bent = [*history(0.02, epochs=8), *history(0.0, epochs=2)]
    lines = [HistoryLine(epoch=i, values={"val_top1": 0.5 + 0.1 * i}) for i in range(2)]
    assert slope_at_end([lines], "val_top1") is None
    slope = slope_at_end([bent[:8]], "val_top1")
    assert slope is not None
    assert slope[0] == pytest.approx(0.02)


# ---- can differences be read? ---------------------------------------------------------------


def test_too_few_seeds_under_a_large_difference_are_asked_for() -> None:
    given = cut(found(FACES, seeds=2), 250)
    numbers = the("few_seeds", given)
    assert (numbers["mixer"], numbers["seeds"], numbers["more"]) == ("static_key", 2, 3)
    assert numbers["difference"] == pytest.approx(0.25, abs=0.06)
    assert 0.02 < numbers["low"] < numbers["difference"] < numbers["high"]


@pytest.mark.parametrize(
    ("models", "seeds"), [(GOOD, 2), ({**GOOD, "static_key": 0.9}, 3), ({"softmax": 0.8}, 1)]
)
def test_seeds_are_enough_where_nothing_differs_or_all_agree(
    models: dict[str, float], seeds: int
) -> None:
    given = found({label: p for label, p in models.items() if label != "identity"}, seeds=seeds)
    assert "few_seeds" not in kinds(given)


def test_three_seeds_are_few_where_they_do_not_agree() -> None:
    given = found({"softmax": 0.7, "static_key": 0.7}, seeds=3)
    for p, each in zip((0.6, 0.75, 0.99), given.done[3:], strict=True):
        answers: Any = each.answers
        answers["last"] = answered(p, each.run.seed, true=target())
    assert the("few_seeds", given)["more"] == 2


@pytest.mark.parametrize(
    ("control", "kind"), [(0.8, "control_open"), (0.87, "control_level"), (0.7, None)]
)
def test_a_control_that_no_mixer_beats_is_named(control: float, kind: str | None) -> None:
    """At 2,000 images intervals are 3 points wide: only a control ahead closes the question."""
    given = found({"softmax": 0.8, "static_key": 0.8, "identity": control})
    assert kinds(given) == ([] if kind is None else [kind])
    assert kind is None or the(kind, given)["control"] == "identity"


@pytest.mark.parametrize(
    ("seeds", "epochs", "rise", "kind"),
    [
        (3, 1_000, 0.0, "control_level"),
        (2, 1_000, 0.0, "control_open"),
        (3, 30, 0.0, "control_open"),  # 120 updates
        (3, 1_000, 0.01, "control_open"),  # still rising
        (1, 22, 0.0, "control_open"),  # one seed, 88 updates
    ],
)
def test_that_mixing_buys_nothing_is_said_of_finished_trainings_of_three_seeds(
    seeds: int, epochs: int, rise: float, kind: str
) -> None:
    true = target()
    same = {name: answered(0.8, 7, true=true).predicted for name in ("softmax", "identity")}
    given = found(
        {"softmax": 0.8, "identity": 0.8}, answers=same, seeds=seeds, epochs=epochs, rise=rise
    )
    assert {each for each in kinds(given) if each.startswith("control")} == {kind}


@pytest.mark.parametrize(("margin", "kind"), [(0.02, "open"), (0.1, "level")])
def test_the_margin_of_the_plan_says_how_near_the_control_must_be(margin: float, kind: str) -> None:
    equal = {"softmax": 0.8, "static_key": 0.8, "identity": 0.8}
    assert kinds(found(equal, margin=margin)) == [f"control_{kind}"]


@pytest.mark.parametrize("which", ["logistic regression", "plain"])
def test_a_reference_that_beats_the_best_mixer_is_named(which: str) -> None:
    given = found({**GOOD, "plain": 0.9}) if which == "plain" else found(GOOD, linear=0.9)
    assert kinds(given) == ["reference_ahead"]
    numbers = the("reference_ahead", given)
    assert numbers["reference"] == which
    assert 0 < numbers["low"] < numbers["difference"] < numbers["high"]


def test_a_reference_that_is_equal_is_no_news() -> None:
    assert kinds(found({**GOOD, "plain": 0.8}, linear=0.8)) == []


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


# ---- what is made of them -------------------------------------------------------------------


def recorded(given: Found, finished: Path) -> Results:
    """Make the record of what was found, by way of the rows of the result."""
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
    made = findings(given)
    intervals = {row.mixer: row.interval for row in rows}
    shell = opened(json.loads((finished / "results.json").read_text()), where="the record")
    return replace(
        shell,
        mixers=tuple(
            replace(shell.mixers[0], label=label, control=label in controls) for label in labels
        ),
        outcome=replace(shell.outcome, last=rows),
        findings=made,
        recommendation=decide(given, {each.kind for each in made}, intervals),
        margin=MARGIN,
        baseline="softmax",
        costs={},
        seeds=tuple(seeds),
    )


def lossy(loss: float, seeds: int) -> Found:
    """Mixers of one accuracy, of which static_key then loses a share of its right answers.

    Most images are answered as every retraining does.
    """
    given, true = found(GOOD, seeds=seeds), target()
    difficulty = np.random.default_rng(0).random(N)
    for k, each in enumerate(given.done):
        less = loss if each.run.mixer == "static_key" else 0.0
        level = 0.6 if each.run.mixer == "identity" else 0.8
        again = np.random.default_rng(k + 1)
        right = 0.9 * difficulty + 0.1 * again.random(N) < level  # 83 % where it is 0.8
        right &= again.random(N) >= less
        answers: Any = each.answers
        answers["last"] = of(np.where(right, true, 1 - true), true)
    return given


def test_two_seeds_of_faces_are_undecided_and_say_what_leads_so_far(finished: Path) -> None:
    record = recorded(cut(found(FACES, seeds=2, epochs=128), 250), finished)
    shown = answer(record)
    assert shown.title.startswith("Undecided: so far static_key is ")
    assert "points above softmax" in shown.title
    assert "did not learn" in shown.title
    assert record.recommendation.verdict == "undecided"
    assert record.recommendation.subject == "static_key"
    assert "static_key, +" in shown.decision


def test_equal_mixers_are_equal_and_a_worse_one_loses_what_it_loses(finished: Path) -> None:
    title = answer(recorded(lossy(0.0, 5), finished)).title
    assert title.startswith("static_key equals softmax within 2.0")
    title = answer(recorded(lossy(0.08, 5), finished)).title
    assert title.startswith("softmax is better than static_key by ")
    points = float(title.partition(" by ")[2].split()[0])
    assert points == pytest.approx(100 * 0.08 * 0.83, abs=1)


@pytest.mark.parametrize("kind", ["nothing_learned", "few_updates", "control_level"])
def test_what_leaves_nothing_to_decide_is_the_reason(kind: str) -> None:
    decided = decide(found(GOOD), {kind, "still_learning"}, {})
    assert (decided.verdict, decided.reason, decided.pick) == ("undecided", kind, None)
    assert decided.best is not None
    usual = decide(found(GOOD), {"still_learning"}, {})
    assert usual.reason != kind


def test_no_mixer_is_recommended_where_only_controls_were_compared() -> None:
    decided = decide(found({"identity": 0.8}), set(), {})
    assert (decided.verdict, decided.reason) == ("undecided", "only_controls")


def every_kind() -> dict[str, Finding]:
    """Plant every finding at least once."""
    equal = {"softmax": 0.8, "static_key": 0.8, "identity": 0.8}
    alone = found(GOOD)
    for reading in alone.done:
        one: Any = reading.answers
        one["last"] = replace(one["last"], index=np.arange(1), target=np.zeros(1, dtype=np.int64))
        one["last"] = replace(one["last"], predicted=np.zeros(1, dtype=np.int64))
    planted = (
        found(dict.fromkeys(GOOD, 0.5), linear=0.5, epochs=4),
        alone,
        cut(found(FACES, seeds=2, epochs=128), 250),
        found(GOOD, rise=0.01, check=checked(narrow=True)),
        cut(found(GOOD), 9),
        found(GOOD, answers={"static_key": np.zeros(N, dtype=np.int64)}),
        solved(2, 0.98),
        found(equal),
        found(equal, margin=0.1),
        found(GOOD, linear=0.9),
    )
    return {each.kind: each for given in planted for each in findings(given)}


def test_every_finding_has_a_heading_a_sentence_and_a_remedy(finished: Path) -> None:
    made = every_kind()
    rules = {rule.__name__ for rule in (*ALWAYS, *OF_DIFFERENCES)}
    assert {*made} == {*rules, "nothing_learned", "baseline_at_chance", "control_open"}
    record = recorded(found(GOOD), finished)
    record = replace(record, findings=tuple(made.values()))
    for each in made.values():
        words = finding_text(record, each)
        assert not words.heading.endswith(".")
        assert words.text.endswith(".")
        assert words.remedy.endswith(".")
        assert not re.search(r"None|\{|  |\.\.|&#|<|>|Undefined", " ".join(vars(words).values()))
    page = render(record)
    assert all(f'<li id="{kind}">' in page for kind in made)


@pytest.mark.parametrize(
    ("known", "option"), [({"limit": 500}, "--limit"), ({"test_fraction": 0.1}, "test_fraction")]
)
def test_more_test_images_come_by_the_option_that_the_data_have(
    known: dict[str, float], option: str, finished: Path
) -> None:
    few = Finding(kind="few_units", numbers={"units": 9})
    record = recorded(found(GOOD), finished)
    plain = {"limit": None, "test_fraction": None}
    own = replace(record, data=replace(record.data, **plain))  # type: ignore[arg-type]
    assert "`--" not in finding_text(own, few).remedy
    drawn = replace(record, data=replace(record.data, **plain | known))  # type: ignore[arg-type]
    assert f"{option}`" in finding_text(drawn, few).remedy


# ---- with trained models --------------------------------------------------------------------


Planted = Literal["noise", "pattern"]


def noise(folder: Path, counts: dict[str, int], planted: Planted) -> Path:
    """Write images of noise, or with a dark half that says the class."""
    rng = np.random.default_rng(0)
    for k, (name, count) in enumerate(counts.items()):
        for i in range(count):
            pixels = rng.integers(0, 256, (12, 12), dtype=np.uint8)
            if planted == "pattern":
                pixels[:, 6 * k : 6 * k + 6] //= 4
            path = folder / "train" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "planted"), [((140, 60), "noise"), ((100, 100), "pattern")])
def test_noise_is_said_to_be_unlearnable_and_a_pattern_is_learned(
    tmp_path: Path, counts: tuple[int, int], planted: Planted
) -> None:
    data = noise(tmp_path / "data", dict(zip("ab", counts, strict=True)), planted)
    done = small(
        tmp_path / "out",
        data=f"folder:{data}",
        recipe="digits_vit",
        limit=None,
        epochs=12 if planted == "pattern" else 3,
        seeds=1 if planted == "pattern" else 2,
        reference=True,
        overrides={"data.batch_size": 16, "data.channels": 1},
    )
    record = done.record
    assert record.data.task_kind.score.key == ("balanced" if planted == "noise" else "top1")
    if planted == "pattern":
        assert record.learned
        return
    assert record.findings[0].kind == "nothing_learned"
    assert record.recommendation.reason == "nothing_learned"
    page = done.report.read_text(encoding="utf-8")
    assert 'id="nothing_learned"' in page
