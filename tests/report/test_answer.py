# SPDX-License-Identifier: Apache-2.0
"""The first screen: which answer is the title, its degree, its numbers, and what to do next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import make_record, render, typed

from keymix.analysis.certainty import Recommendation
from keymix.analysis.statistics import Interval
from keymix.records import to_json
from keymix.report.answer import Answer, answer
from keymix.report.record import ComparisonRecord, Diagnosis
from keymix.report.sections.mixers import decision
from keymix.report.wording import none_beats


def interval(difference: float, seeds: int, width: float = 0.01) -> Interval:
    return Interval(
        n=seeds, difference=difference, low=difference - width, high=difference + width, p=0.5
    )


def record_of(
    *,
    seeds: int = 5,
    pick: str | None = None,
    diagnoses: tuple[Diagnosis, ...] = (),
    macs: dict[str, float] | None = None,
    **rows: tuple[float, str, str | None],
) -> ComparisonRecord:
    """Make a record; `rows` are difference, degree and direction by mixer, others unclear."""
    record = typed(make_record(seeds=seeds))
    made = []
    for row in record.outcome.last:
        if row.mixer == record.baseline:
            made.append(row)
            continue
        difference, degree, direction = rows.get(row.mixer, (0.0, "unclear", None))
        changed: dict[str, Any] = {"degree": degree, "direction": direction}
        found = interval(difference, seeds)
        made.append(replace(row, interval=found, seeds=found, images=found, **changed))
    costs = {
        label: replace(
            cost, macs=(macs or {}).get(label, 100), params=100, step_ms=1.0, peak_mib=1.0
        )
        for label, cost in record.costs.items()
    }
    return replace(
        record,
        outcome=replace(record.outcome, last=tuple(made)),
        costs=costs,
        diagnoses=diagnoses,
        margin=0.02,
        recommendation=Recommendation(best=pick or "softmax", pick=pick, margin=0.02),
    )


def found(**more: Any) -> Answer:
    return answer(record_of(**more))


def test_a_recommended_mixer_that_is_better_is_the_title_with_its_cost() -> None:
    said = found(
        static_key=(0.065, "clear", "better"),
        conv_static_key=(0.071, "clear", "better"),
        pick="static_key",
        macs={"static_key": 89},
    )
    assert said.title == "static_key: 6.5 points above softmax, with 11\u00a0% fewer multiply-adds"
    assert (said.degree, said.subject) == ("clear", "static_key")
    assert said.next is not None
    assert (said.next.command, "clear" in said.next.text) == ("", True)


def test_more_cost_is_said_as_such_and_the_same_cost_too() -> None:
    better = {"static_key": (0.03, "clear", "better")}
    more = found(pick="static_key", macs={"static_key": 133}, **better)
    assert more.title.endswith("for 33\u00a0% more multiply-adds")
    assert found(pick="static_key", **better).title.endswith("at the same multiply-adds")


def test_equal_at_less_cost_is_an_answer() -> None:
    said = found(key_value=(0.001, "equal", None), pick="key_value", macs={"key_value": 80})
    assert (
        said.title
        == "key_value equals softmax within 2.0 points, with 20\u00a0% fewer multiply-adds"
    )


def test_where_all_is_unclear_no_mixer_is_distinguishable_and_a_saving_is_said() -> None:
    assert found().title == "No mixer is distinguishable from softmax"
    saving = found(pick="static_key", macs={"static_key": 50})
    assert saving.title.startswith("No mixer is distinguishable from softmax; static_key keeps up")
    assert saving.degree == "unclear"
    dear = found(pick="static_key", macs={"static_key": 150})
    assert dear.title == "No mixer is distinguishable from softmax"


def test_the_best_on_validation_keeps_up_with_nobody_but_the_baseline() -> None:
    worse = {"key_value": (-0.04, "provisional", "worse")}
    said = found(pick="static_key", **worse)  # which is the best, too
    assert said.title == "static_key is not distinguishable from softmax"
    saving = found(pick="static_key", macs={"static_key": 50}, **worse)
    assert saving.title.endswith("from softmax, with 50\u00a0% fewer multiply-adds")


def test_where_mixers_are_worse_the_baseline_is_not_beaten() -> None:
    said = found(key_value=(-0.04, "clear", "worse"), pick="softmax")
    assert said.title == "No mixer is shown to beat softmax"
    assert said.subject != "key_value"  # the worst is no headline while others are near
    others = ("static_key", "conv_static_key", "re_attention")
    all_worse = dict.fromkeys(others, (-0.03, "clear", "worse"))
    said = found(key_value=(-0.02, "clear", "worse"), pick="softmax", **all_worse)
    assert said.title.endswith("the best, key_value, is 2.0 points below it")
    assert said.tiles[0].text.startswith("softmax")  # the better of the two comes first


def test_a_better_mixer_comes_before_a_worse_one_that_differs_more() -> None:
    said = found(
        key_value=(-0.2, "clear", "worse"), static_key=(0.03, "provisional", "better"), seeds=3
    )
    assert said.subject == "static_key"
    assert said.degree == "provisional"


def test_where_nothing_is_certain_the_numbers_are_the_best_mixers() -> None:
    said = found(key_value=(-0.05, "unclear", None), static_key=(0.01, "unclear", None))
    assert said.subject == "static_key"


def test_nothing_learned_has_no_numbers() -> None:
    nothing = Diagnosis(kind="nothing_learned", heading="H", text="No model learned this data: x.")
    said = found(diagnoses=(nothing,), static_key=(0.065, "clear", "better"), pick="static_key")
    assert said.title == "No model learned this data"
    assert (said.degree, said.tiles, said.next) == ("none", (), None)


def test_a_control_that_keeps_up_is_the_title_even_where_a_mixer_is_better() -> None:
    level = Diagnosis(kind="control_level", heading="H", text="Mixing tokens buys nothing here: x.")
    said = found(diagnoses=(level,), static_key=(0.02, "clear", "better"), pick="static_key")
    assert "identity" in said.title
    assert said.title.startswith("Mixing tokens buys nothing here")
    assert all("softmax" in tile.text and "identity" in tile.text for tile in said.tiles)
    assert said.degree == "unclear"  # of the control, not of static_key
    open_still = replace(level, kind="control_unbeaten")
    title = found(diagnoses=(open_still,)).title
    assert title == "No mixer is shown to beat no mixing at all (identity)"


def test_of_several_controls_the_one_that_the_finding_names_is_the_title() -> None:
    heading = none_beats(["identity"], shown=False)
    record = record_of(
        diagnoses=(Diagnosis(kind="control_unbeaten", heading=heading, text="x."),),
        key_value=(0.03, "clear", "better"),
    )
    mixers = [replace(m, control=m.control or m.label == "key_value") for m in record.mixers]
    said = answer(replace(record, mixers=tuple(mixers)))
    assert said.title == heading  # key_value may well be beaten
    assert all("key_value" not in tile.text for tile in said.tiles)


def test_where_only_controls_were_compared_they_are_the_answer() -> None:
    record = record_of(identity=(-0.03, "clear", "worse"))
    kept = {"softmax", "identity"}
    mixers = [replace(m, control=True) for m in record.mixers if m.label in kept]
    last = [row for row in record.outcome.last if row.mixer in kept]
    outcome = replace(record.outcome, last=tuple(last))
    said = answer(replace(record, mixers=tuple(mixers), outcome=outcome))
    assert said.title == "No mixer is shown to beat softmax; identity is 3.0 points below it"
    assert said.certainty.startswith("Clear: 5 seeds")


def test_every_difference_of_the_first_screen_has_its_pair_and_one_direction() -> None:
    unbeaten = Diagnosis(kind="control_unbeaten", heading="H", text="x.")
    record = record_of(identity=(-0.03, "unclear", None))
    images, again = answer(replace(record, diagnoses=(unbeaten,))).tiles[1:]
    assert (images.value, again.value) == ("+2.0 to +4.0", "+2.0 to +4.0")
    assert all("softmax − identity" in tile.text for tile in (images, again))
    assert not any("multiply-adds" in tile.text for tile in (images, again))
    usual = answer(record_of(static_key=(0.03, "clear", "better"), pick="static_key")).tiles
    assert "static_key − softmax" in usual[1].text
    assert "static_key against softmax" in usual[3].text


def test_the_decision_names_the_mixer_by_the_rule_that_recommends_it() -> None:
    better = {"static_key": (0.03, "clear", "better")}
    take = found(pick="static_key", **better).decision
    assert take.startswith("Take static_key")
    assert "+3.0 points against softmax (+2.0 to +4.0), clear" in take
    keep = found(pick="softmax", key_value=(0.001, "unclear", None)).decision
    assert keep.startswith("Keep softmax")
    assert "Closest: key_value" in keep
    cheaper = record_of(pick="static_key", **better)
    behind = interval(-0.006, 5, 0.007)
    rule = Recommendation(
        best="conv_static_key", pick="static_key", pick_interval=behind, margin=0.02
    )
    said = answer(replace(cheaper, recommendation=rule)).decision
    assert "within 2.0 points" in said
    assert "conv_static_key, which is 0.6 points better on test (−0.1 to +1.3)" in said
    none = replace(rule, pick=None, pick_interval=None, reason="it is so")
    said = answer(replace(cheaper, recommendation=none)).decision
    assert said.startswith("No decision yet: keep the mixer you have, since it is so.")
    assert "static_key" in said


def test_what_is_next_is_one_thing_that_the_findings_do_not_contradict() -> None:
    def following(*given: Diagnosis, seeds: int = 3) -> str:
        said = answer(record_of(seeds=seeds, diagnoses=given)).next
        assert said is not None
        return said.text

    few = Diagnosis(kind="few_units", heading="H", text="x.", remedy="Get more test cases.")
    short = Diagnosis(
        kind="still_learning", heading="H", text="x.", remedy="Train longer.", epochs=334
    )
    easy = Diagnosis(kind="ceiling", heading="X", text="x.", remedy="Take harder images. More.")
    assert following(few, short).startswith("get more test cases; then train 334 epochs")
    assert "deleted" in following(short)
    assert following(easy) == "take harder images"
    assert following().startswith("train 5 seeds")
    assert following(seeds=5).startswith("nothing more to do")


def test_a_single_test_unit_says_nothing() -> None:
    record = record_of(pick="static_key")
    rows = [
        replace(row, images=None if row.images is None else replace(row.images, n=1))
        for row in record.outcome.last
    ]
    said = answer(replace(record, outcome=replace(record.outcome, last=tuple(rows))))
    assert said.title.startswith("The test split is a single image")
    assert said.degree == "none"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("keymix compare --seeds 3 --out a", "keymix compare --out a --seeds 5"),
        ("keymix compare --seeds=3 --out 'a b'", "keymix compare --out 'a b' --seeds 5"),
        ("keymix compare", "keymix compare --seeds 5"),
        ("keymix compare --mixers mhsa,mine", "keymix compare --mixers mhsa,mine --seeds 5"),
        (
            "keymix compare --mixers 'mhsa,ska(activation=relu)'",
            "keymix compare --mixers 'softmax,static_key(activation=relu)' --seeds 5",
        ),
        ("keymix compare --overwrite --out a", "keymix compare --out a --seeds 5"),
        ("keymix.compare(seeds=3)", ""),
    ],
)
def test_the_next_command_is_the_same_with_five_seeds(command: str, expected: str) -> None:
    said = answer(replace(record_of(seeds=3), command=command))
    assert said.next is not None
    assert said.next.command == expected


def test_too_short_a_training_comes_before_more_seeds() -> None:
    short = Diagnosis(kind="still_learning", heading="H", text="Training was too short: x.")
    record = replace(record_of(seeds=3, diagnoses=(short,)), command="keymix compare --epochs 4")
    said = answer(record)
    assert said.next is not None
    epochs = 2 * record.recipe.schedule.epochs
    assert said.next.command == f"keymix compare --epochs {epochs} --seeds 5 --overwrite"


def test_the_table_that_decides_has_the_best_first_and_marks_the_recommended() -> None:
    record = record_of(pick="static_key", macs={"static_key": 89})
    table = decision(record)
    scores = [row[1].value for row in table.rows]
    assert scores == sorted(scores, reverse=True)
    (marked,) = table.marked
    assert table.rows[marked][0] == "static_key"
    (line,) = (line for line in table.markdown().splitlines() if line.startswith("| static_key"))
    assert "−11" in line
    assert len(table.csv().splitlines()) == 1 + len(table.rows)


def test_where_nothing_was_learned_no_sentence_compares_mixers() -> None:
    nothing = Diagnosis(
        kind="nothing_learned", heading="No model learned this data", text="x.", remedy="Do `this`."
    )
    usual, empty = (render(to_json(record_of(diagnoses=given))) for given in ((), (nothing,)))
    for heading in ("By class", "Where they look", "Do deep layers repeat themselves?"):
        assert heading in usual
        assert heading not in empty
    sentence = "Each mixer in a sentence"
    assert sentence in usual
    assert sentence not in empty
    assert "<code>this</code>" in empty


def test_the_page_begins_with_the_answer() -> None:
    page = render(make_record())
    title = answer(typed(make_record())).title
    head = page.partition("</header>")[0]
    assert f"<title>{title}</title>" in head
    assert page.index("<h1>") < page.index('class="tiles"') < page.index("Every mixer against")
