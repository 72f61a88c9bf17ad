# SPDX-License-Identifier: Apache-2.0
"""Many cases in one test: all run, and all that fail are named."""

from __future__ import annotations

import pytest

from each import each, together

CASES = {"fails": (0,), "is skipped": (1,), "passes": (2,), "fails too": (3,)}


@pytest.mark.every_path
def test_every_pair_of_values_comes(request: pytest.FixtureRequest) -> None:
    seen = []

    @together
    @pytest.mark.parametrize("number", [1, 2])
    @pytest.mark.parametrize(("letter", "other"), [("a", 0), pytest.param("b", 1)])
    def test(number: int, letter: str, other: int) -> None:
        seen.append((number, letter, other))

    test(request=request)
    assert sorted(seen) == [(1, "a", 0), (1, "b", 1), (2, "a", 0), (2, "b", 1)]


@pytest.mark.every_path
def test_all_that_fail_are_named(request: pytest.FixtureRequest) -> None:
    @each("value", CASES)
    def test(value: int) -> None:
        if value == 1:
            pytest.skip("this one")
        assert value == 2

    with pytest.raises(BaseExceptionGroup) as caught:
        test(request=request)
    notes = [error.__notes__ for error in caught.value.exceptions]
    assert notes == [["case: fails"], ["case: fails too"]]


@pytest.mark.every_path
def test_cases_that_are_all_skipped_are_skipped(request: pytest.FixtureRequest) -> None:
    @each("value", CASES)
    def test(value: int) -> None:
        pytest.skip("each of them")

    with pytest.raises(pytest.skip.Exception):
        test(request=request)


def test_cases_share_no_folder() -> None:
    def test(value: int, tmp_path: object) -> None: ...

    with pytest.raises(TypeError, match="tmp_path"):
        each("value", CASES)(test)
