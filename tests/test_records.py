# SPDX-License-Identifier: Apache-2.0
"""Records go to JSON and come back the same; what does not fit names its key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from keymix.errors import UserError
from keymix.records import from_json, spread, to_json


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Named:
    name: str
    point: Point | None = None


@dataclass(frozen=True, kw_only=True)
class Short:
    name: str
    note: str | None = None

    def omitted(self) -> tuple[str, ...]:
        return () if self.note else ("note",)


@dataclass(frozen=True, kw_only=True)
class Flat:
    epoch: int
    train: Mapping[str, float | None] = field(metadata=spread("train_"))
    lr: float | None = None
    rest: Mapping[str, float] = field(metadata=spread())


@dataclass(frozen=True, kw_only=True)
class Open:
    status: Literal["open", "failed"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Done:
    status: Literal["done"]
    score: float


@dataclass(frozen=True, kw_only=True)
class Everything:
    whole: int
    share: float
    flag: bool
    kind: Literal["a", "b", 3]
    size: tuple[int, int]
    names: tuple[str, ...]
    numbers: Sequence[int]
    by_name: Mapping[str, float | None]
    by_seed: Mapping[int, Point]
    either: Named | Point
    free: Any = None
    parts: tuple[Named, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


WHOLE = Everything(
    whole=3,
    share=0.1,
    flag=True,
    kind=3,
    size=(4, 5),
    names=("é", "b"),
    numbers=[1, 2],
    by_name={"p": None, "q": 0.5},
    by_seed={7: Point(x=1.0)},
    either=Point(x=2.0, y=float("inf")),
    free=[1, {"a": None}],
    parts=(Named(name="n", point=Point(x=-0.0)),),
    more={"k": [1]},
)


def written() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(to_json(WHOLE)))
    return made


def test_a_record_comes_back_the_same() -> None:
    assert from_json(Everything, written(), where="it") == WHOLE


def test_every_field_is_written_under_its_name() -> None:
    assert to_json(Named(name="n")) == {"name": "n", "point": None}


def test_a_field_that_a_record_omits_is_not_written() -> None:
    assert to_json([Short(name="n"), Short(name="n", note="x")]) == [
        {"name": "n"},
        {"name": "n", "note": "x"},
    ]
    assert from_json(Short, to_json(Short(name="n")), where="it") == Short(name="n")


def test_the_keys_of_a_spread_mapping_stand_among_those_of_its_record() -> None:
    values = {"epoch": 3, "train_loss": None, "train_term": 0.5, "lr": 0.1, "x": 2.0}
    line = from_json(Flat, values, where="it")
    assert line == Flat(epoch=3, train={"loss": None, "term": 0.5}, lr=0.1, rest=line.rest)
    assert line.rest["x"] == 2.0
    assert to_json(line)["train_term"] == 0.5
    with pytest.raises(UserError, match="train_loss = "):
        from_json(Flat, {"epoch": 3, "train_loss": "1"}, where="it")


def test_a_missing_key_takes_the_default_and_an_unknown_one_is_passed_over() -> None:
    assert from_json(Point, {"x": 1, "z": 9}, where="it") == Point(x=1.0)


def test_a_whole_number_is_read_as_a_number_of_the_fields_type() -> None:
    assert type(from_json(Point, {"x": 1}, where="it").x) is float


@pytest.mark.parametrize(
    ("key", "value", "culprit"),
    [
        ("whole", 3.0, "whole"),
        ("whole", True, "whole"),
        ("share", "0.1", "share"),
        ("share", True, "share"),
        ("flag", 1, "flag"),
        ("kind", "c", "kind"),
        ("kind", 3.0, "kind"),
        ("size", [4], "size"),
        ("size", [4, "5"], "size[1]"),
        ("names", "ab", "names"),
        ("names", ["a", None], "names[1]"),
        ("numbers", [1.5], "numbers[0]"),
        ("by_name", [], "by_name"),
        ("by_name", {"p": "q"}, "by_name.p"),
        ("by_seed", {"x": {"x": 1}}, "by_seed.x"),
        ("by_seed", {"7": {"x": None}}, "by_seed.7.x"),
        ("either", {"y": 1}, "either.x"),
        ("parts", [{"name": "n", "point": {"y": 2}}], "parts[0].point.x"),
        ("parts", [{"name": "n", "point": []}], "parts[0].point"),
    ],
)
def test_what_does_not_fit_is_named(key: str, value: Any, culprit: str) -> None:
    with pytest.raises(UserError) as refused:
        from_json(Everything, written() | {key: value}, where="'run/summary.json'")
    assert "'run/summary.json'" in str(refused.value)
    assert f"{culprit} = " in str(refused.value) or f"{culprit!r}" in str(refused.value)


@dataclass(frozen=True, kw_only=True)
class Runs:
    runs: tuple[Open | Done, ...]


@pytest.mark.parametrize(
    ("run", "culprit"),
    [
        ({"status": "failed", "reason": None}, "runs[0].reason = None"),
        ({"status": "done", "score": "x"}, "runs[0].score = 'x'"),
        ({"status": "done"}, "'runs[0].score'"),
        ({"status": "lost", "score": 1.0}, "runs[0].status = 'lost'"),
    ],
)
def test_of_several_records_the_one_that_is_meant_is_named(
    run: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(UserError) as refused:
        from_json(Runs, {"runs": [run]}, where="it")
    assert culprit in str(refused.value)


@pytest.mark.parametrize("key", ["whole", "by_seed"])
def test_a_missing_key_without_default_is_named(key: str) -> None:
    values = written()
    del values[key]
    with pytest.raises(UserError, match=f"'{key}'"):
        from_json(Everything, values, where="it")


@pytest.mark.parametrize("value", [{1.5: 1}, {True: 1}, {1, 2}, object()])
def test_what_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        to_json({"a": value})
