# SPDX-License-Identifier: Apache-2.0
"""The first screen: which answer is the title, its degree, its numbers, and what to do next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import SEEN, make_record, render, typed

from keymix.analysis.certainty import Decision, Settle
from keymix.analysis.statistics import Interval
from keymix.records import to_json
from keymix.report.answer import Answer, answer
from keymix.report.record import Finding, Results
from keymix.report.sections.mixers import decision

pytestmark = pytest.mark.usefixtures("undrawn")


def interval(difference: float, seeds: int, width: float = 0.01) -> Interval:
    return Interval(
        n=seeds, difference=difference, low=difference - width, high=difference + width, p=0.5
    )


def finding(kind: str, **numbers: Any) -> Finding:
    """A finding with the numbers that its sentence needs."""
    made = {
        "nothing_learned": {"linear": "", "linear_score": None, "check_labels": False},
        "baseline_at_chance": {"best": "static_key", "best_gain": 0.25},
        "few_updates": {"updates": 510, "enough": 1_000, "epochs": 334},
        "still_learning": {"change": 0.01, "per": 1, "epochs": 24},
        "few_units": {"units": 9},
        "few_seeds": {"mixer": "static_key", "seeds": 2, "more": 3},
        "ceiling": {"linear": ["logistic regression"], "least": 0.98, "most": 1.0},
        "control_level": {"control": "identity", "seeds": 3, "units": 360, "short": False},
        "control_open": {"control": "identity", "seeds": 3, "units": 360, "short": False},
    }.get(kind, {})
    skill = {"chance": "", "gain": 0.01, "epochs": None, "difference": 0.01}
    ends = {"mixer": "softmax", "low": -0.01, "high": 0.02}
    return Finding(kind=kind, numbers={**skill, **ends, **made, **numbers})


def record_of(
    *,
    seeds: int = 5,
    decided: Decision | None = None,
    findings: tuple[Finding, ...] = (),
    macs: dict[str, float] | None = None,
    **rows: tuple[float, str, str | None],
) -> Results:
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
        findings=findings,
        margin=0.02,
        recommendation=decided or undecided("static_key", seeds=seeds),
    )


def taken(mixer: str, difference: float = 0.0, **more: Any) -> Decision:
    """A decision for a mixer."""
    numbers = {"best": mixer, "subject": mixer, "reason": "ahead", "seeds": 5, "margin": 0.02}
    numbers |= {"verdict": "take", "pick": mixer, "interval": interval(difference, 5)}
    return Decision(**{**numbers, **more})  # type: ignore[arg-type]


def undecided(leader: str, difference: float = 0.0, **more: Any) -> Decision:
    """No decision, with a leader so far."""
    return taken(
        leader, difference, **{"reason": "seeds", **more, "verdict": "undecided", "pick": None}
    )


def found(**more: Any) -> Answer:
    return answer(record_of(**more))


# ---- the titles -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nothing_learned", "one_unit"])
def test_where_nothing_can_be_said_there_are_no_numbers(kind: str) -> None:
    said = found(
        findings=(finding(kind),),
        static_key=(0.065, "clear", "better"),
        decided=undecided("static_key", 0.065, reason=kind),
    )
    assert said.title in ("No model learned this data", "The test split is a single image")
    assert (said.degree, said.tiles, said.subject, said.means_nothing) == ("none", (), "", True)
    assert "static_key" not in said.decision


def test_a_control_that_keeps_up_is_the_title_even_where_a_mixer_is_better() -> None:
    better = {"static_key": (0.02, "clear", "better")}
    said = found(findings=(finding("control_level"),), **better)
    assert (
        said.title == "Mixing tokens buys nothing here: no mixer beats no mixing at all (identity)"
    )
    assert all("softmax" in tile.text and "identity" in tile.text for tile in said.tiles)
    assert said.degree == "unclear"  # of the control, not of static_key
    said = found(findings=(finding("control_open"),), **better)
    assert said.title == "No mixer is shown to beat no mixing at all (identity)"


def test_of_several_controls_the_one_that_the_finding_names_is_the_title() -> None:
    record = record_of(findings=(finding("control_open"),), key_value=(0.03, "clear", "better"))
    mixers = [replace(m, control=m.control or m.label == "key_value") for m in record.mixers]
    said = answer(replace(record, mixers=tuple(mixers)))
    assert said.title.endswith("(identity)")  # key_value may well be beaten
    assert all("key_value" not in tile.text for tile in said.tiles)


@pytest.mark.parametrize(
    ("macs", "cost"),
    [
        (89, "with 11\u00a0% fewer multiply-adds"),
        (133, "for 33\u00a0% more multiply-adds"),
        (100, "at the same multiply-adds"),
    ],
)
def test_a_better_mixer_is_the_title_with_its_cost(macs: float, cost: str) -> None:
    said = found(
        static_key=(0.065, "clear", "better"),
        conv_static_key=(0.071, "clear", "better"),
        decided=taken("static_key", 0.065),
        macs={"static_key": macs},
    )
    assert said.title == f"static_key is better than softmax by 6.5 points, {cost}"
    assert (said.degree, said.subject) == ("clear", "static_key")
    assert said.next is not None
    assert (said.next.command, "clear" in said.next.text) == ("", True)


def test_a_shorter_step_is_the_cost_where_multiply_adds_are_the_same() -> None:
    record = record_of(decided=taken("static_key"), static_key=(0.03, "clear", "better"))
    costs = {**record.costs, "static_key": replace(record.costs["static_key"], step_ms=0.8)}
    title = answer(replace(record, costs=costs)).title
    assert title.endswith("with training steps 20\u00a0% shorter")


def test_where_all_others_are_worse_the_baseline_is_better() -> None:
    others = ("static_key", "conv_static_key", "re_attention")
    worse = dict.fromkeys(others, (-0.03, "clear", "worse"))
    said = found(
        key_value=(-0.02, "clear", "worse"),
        decided=taken("softmax", subject="key_value", verdict="keep"),
        **worse,
    )
    assert said.title.startswith("softmax is better than every other mixer")
    assert said.title.endswith("than the best of them, key_value, by 2.0 points")
    assert said.tiles[0].text.startswith("softmax")  # the better of the two comes first
    some = found(key_value=(-0.04, "clear", "worse"), decided=undecided("static_key"))
    assert some.title == "No mixer is shown to be better than softmax"


def test_equal_at_less_cost_is_an_answer() -> None:
    said = found(
        key_value=(0.001, "equal", None), decided=taken("key_value"), macs={"key_value": 80}
    )
    assert (
        said.title
        == "key_value equals softmax within 2.0 points, with 20\u00a0% fewer multiply-adds"
    )


@pytest.mark.parametrize(
    ("difference", "macs", "starts"),
    [
        (0.0, 50, "static_key keeps up with softmax within 2.0 points, with 50"),
        (0.0, 150, "No mixer is shown to differ from softmax"),  # it costs more
        (-0.015, 50, "No mixer is shown to differ from softmax"),  # it may be 2.5 points behind
    ],
)
def test_what_keeps_up_within_the_margin_and_costs_less_is_the_title(
    difference: float, macs: float, starts: str
) -> None:
    said = found(
        static_key=(difference, "unclear", None),
        decided=taken("static_key", difference),
        macs={"static_key": macs},
        seeds=3,
    )
    assert said.title.startswith(starts)


def test_a_large_difference_of_few_seeds_is_undecided_with_its_size() -> None:
    large = {"static_key": (0.249, "unclear", None)}
    findings = (finding("few_seeds"),)
    decided = undecided("static_key", 0.249, seeds=2)
    said = found(findings=findings, seeds=2, decided=decided, **large)
    assert said.title == "Undecided: so far static_key is 24.9 points above softmax"
    assert said.next is not None
    assert said.next.text.startswith("train 5 seeds")
    first = (finding("baseline_at_chance"), *findings)
    said = found(findings=first, seeds=2, decided=decided, **large)
    assert said.title.endswith("above softmax, which did not learn")


def test_where_nothing_is_certain_no_mixer_is_shown_to_differ() -> None:
    said = found(static_key=(0.01, "unclear", None))
    assert said.title == "No mixer is shown to differ from softmax"
    assert (said.subject, said.degree) == ("static_key", "unclear")


def test_no_title_says_that_none_differs_where_one_does() -> None:
    better = {"key_value": (0.03, "clear", "better")}
    said = found(decided=undecided("static_key"), **better)
    assert said.title.startswith("key_value is better than softmax")
    said = found(decided=taken("static_key"), **better)  # which may cost less
    assert said.title == "static_key is not shown to differ from softmax"


def test_where_only_controls_were_compared_they_are_the_answer() -> None:
    record = record_of(identity=(-0.03, "clear", "worse"))
    kept = {"softmax", "identity"}
    mixers = [replace(m, control=True) for m in record.mixers if m.label in kept]
    last = [row for row in record.outcome.last if row.mixer in kept]
    outcome = replace(record.outcome, last=tuple(last))
    decided = Decision(verdict="undecided", reason="only_controls")
    said = answer(replace(record, mixers=tuple(mixers), outcome=outcome, recommendation=decided))
    assert said.title == "softmax is better than identity by 3.0 points"
    assert said.certainty.startswith("Clear: 5 seeds")


# ---- the decision ---------------------------------------------------------------------------


def test_take_says_difference_and_cost() -> None:
    said = found(
        decided=taken("static_key", 0.03),
        static_key=(0.03, "clear", "better"),
        macs={"static_key": 89},
    )
    assert said.decision == (
        "Take static_key: +3.0 points against softmax (+2.0 to +4.0; 5 seeds), "
        "with 11\u00a0% fewer multiply-adds."
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"reason": "alone"}, "no other mixer was compared."),
        ({"reason": "ahead"}, "it is the best on validation, and every cheaper mixer is worse."),
        ({"reason": "cheapest"}, "it is the best on validation, and no mixer is cheaper."),
        (
            {"reason": "cheaper", "best": "key_value", "against_best": interval(-0.006, 5)},
            "it costs less than key_value, the best on validation, and keeps up with it within "
            "2.0 points (−1.6 to +0.4).",
        ),
    ],
)
def test_keep_says_why(more: dict[str, Any], why: str) -> None:
    assert found(decided=taken("softmax", verdict="keep", **more)).decision == (
        f"Keep softmax: {why}"
    )


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({"reason": "seeds", "seeds": 2}, "takes 3 seeds of every mixer, and there are 2; so far"),
        ({"reason": "margin"}, "`--margin`"),
        ({"reason": "costs"}, "the cost of static_key is not known"),
        ({"reason": "baseline_at_chance"}, "the baseline softmax did not learn"),
        ({"reason": "runs", "interval": None}, "no mixer has finished a run."),
        ({"reason": "only_controls", "interval": None}, "only controls were compared."),
        (
            {
                "reason": "open",
                "rival": "key_value",
                "against_best": interval(-0.01, 3, 0.03),
                "settle": Settle(seeds=(5, 12), units=None),
            },
            "key_value is cheaper than static_key, and it is open whether it keeps up within "
            "2.0 points (−4.0 to +2.0); 5 to 12 seeds may settle it; so far",
        ),
    ],
)
def test_undecided_says_what_is_missing_and_what_leads_so_far(
    more: dict[str, Any], missing: str
) -> None:
    decided = undecided("static_key", 0.02, **more)
    said = found(decided=decided).decision
    assert said.startswith("Undecided: ")
    assert missing in said
    leads = "so far static_key, +2.0 points against softmax (+1.0 to +3.0; 5 seeds)."
    assert said.endswith(leads) is (decided.interval is not None)


# ---- the rest of the first screen -----------------------------------------------------------


def test_every_difference_of_the_first_screen_has_its_pair_and_one_direction() -> None:
    record = record_of(identity=(-0.03, "unclear", None))
    images, again = answer(replace(record, findings=(finding("control_open"),))).tiles[1:]
    assert (images.value, again.value) == ("−4.0 to −2.0", "−4.0 to −2.0")
    assert all("identity − softmax" in tile.text for tile in (images, again))
    assert not any("multiply-adds" in tile.text for tile in (images, again))
    better = {"static_key": (0.03, "clear", "better")}
    usual = answer(record_of(decided=taken("static_key", 0.03), **better)).tiles
    assert "static_key − softmax" in usual[1].text
    assert "static_key against softmax" in usual[3].text


def test_what_is_next_is_one_thing_that_the_findings_do_not_contradict() -> None:
    def following(*kinds: str, seeds: int = 3, **numbers: Any) -> str:
        made = tuple(finding(kind, **numbers) for kind in kinds)
        said = answer(record_of(seeds=seeds, findings=made)).next
        assert said is not None
        return said.text

    assert following("few_units", "few_updates") == "get more test images"
    assert following("few_updates", "still_learning").startswith("train longer: 334 epochs")
    assert "deleted" in following("still_learning")
    assert following("ceiling").startswith("take harder images")
    assert following("nothing_learned").startswith("check the labels")
    assert following("nothing_learned", updates=9, enough=1_000, epochs=7).startswith(
        "train longer"
    )
    assert following("baseline_at_chance").startswith("try other learning rates")
    assert following().startswith("train 5 seeds")
    assert following(seeds=5).startswith("nothing more to do")


def test_an_open_decision_says_an_interval_once_and_what_settles_it_next() -> None:
    settle = Settle(seeds=(7, None), units=None)
    rival = {"rival": "static_key", "against_best": interval(-0.01, 5, 0.02), "settle": settle}
    decided = replace(undecided("static_key", -0.01, reason="open", **rival), best="softmax")
    record = record_of(seeds=5, decided=decided, static_key=(-0.01, "equal", None))
    said = answer(record)
    assert said.decision.count("static_key") == 2
    assert said.decision.count(" to ") == 1
    assert said.next is not None
    assert said.next.text.startswith("train 7 seeds")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("keymix compare --seeds 3 --out a", "keymix compare --out a --seeds 5"),
        ("keymix compare --seeds=3 --out 'a b'", "keymix compare --out 'a b' --seeds 5"),
        ("keymix compare", "keymix compare --seeds 5"),
        ("keymix compare --mixers mhsa,mine", "keymix compare --mixers mhsa,mine --seeds 5"),
        ("keymix compare --overwrite --out a", "keymix compare --out a --seeds 5"),
        ("keymix.compare(seeds=3)", ""),
    ],
)
def test_the_next_command_is_the_same_with_five_seeds(command: str, expected: str) -> None:
    said = answer(replace(record_of(seeds=3), command=command))
    assert said.next is not None
    assert said.next.command == expected


def test_too_short_a_training_comes_before_more_seeds() -> None:
    record = record_of(seeds=3, findings=(finding("few_updates"), finding("still_learning")))
    said = answer(replace(record, command="keymix compare --epochs 4"))
    assert said.next is not None
    assert said.next.command == "keymix compare --epochs 334 --seeds 5 --overwrite"


def test_the_table_that_decides_has_the_best_first_and_marks_the_recommended() -> None:
    record = record_of(decided=taken("static_key"), macs={"static_key": 89})
    table = decision(record)
    scores = [row[1].value for row in table.rows]
    assert scores == sorted(scores, reverse=True)
    (marked,) = table.marked
    assert table.rows[marked][0] == "static_key"
    (line,) = (line for line in table.markdown().splitlines() if line.startswith("| static_key"))
    assert "−11" in line
    assert len(table.csv().splitlines()) == 1 + len(table.rows)


def test_where_nothing_was_learned_no_sentence_compares_mixers() -> None:
    nothing = (finding("nothing_learned"),)
    seen = {key: part for key, part in make_record().items() if key in SEEN}
    usual, empty = (render(to_json(record_of(findings=f)) | seen) for f in ((), nothing))
    for heading in ("By class", "Where they look", "Do deep layers repeat themselves?"):
        assert heading in usual
        assert heading not in empty
    sentence = "Each mixer in a sentence"
    assert sentence in usual
    assert sentence not in empty
    assert "<code>keymix data check</code>" in empty


def test_the_page_begins_with_the_answer() -> None:
    page = render(make_record())
    title = answer(typed(make_record())).title
    head = page.partition("</header>")[0]
    assert f"<title>{title}</title>" in head
    assert page.index("<h1>") < page.index('class="tiles"') < page.index("Every mixer against")
