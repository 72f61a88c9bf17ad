# SPDX-License-Identifier: Apache-2.0
"""Many cases in one test: what a test costs apart from its body is then paid once for all."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

SHAPED = 8  # cases of one test where shapes are checked; see tests/conftest.py
# fixtures that a case would leave to the next one as it changed them
CHANGED = {"tmp_path", "monkeypatch", "capsys", "capfd", "caplog", "recwarn"}

Test = Callable[..., None]
Cases = Mapping[str, tuple[Any, ...]]  # values by the case's name


def each(
    names: str, cases: Cases | Callable[[Any], Cases], *, of: str = "name", shaped: int = 1
) -> Callable[[Test], Test]:
    """Run a test once for each case, and report all cases that fail.

    Every case starts from the same random numbers. Where shapes are checked, ``shaped`` of the
    cases run, unless the test is marked ``every_path``.

    Args:
        names: Arguments that a case gives, by commas, as for ``pytest.mark.parametrize``.
        cases: Values by the case's name, or a function from the test's parameter ``of`` to them.
        of: That parameter, which the test itself need not take.
        shaped: How many cases run where shapes are checked; by default one of each mixer or family.
    """
    given = [name.strip() for name in names.split(",")]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in given]
        shared = CHANGED & {p.name for p in others}
        if shared:
            raise TypeError(f"the cases of {test.__name__} would share {sorted(shared)}")
        needed = ["request", of] if callable(cases) else ["request"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in needed
            if name not in signature.parameters
        ]

        @functools.wraps(test)
        def of_all(**fixtures: Any) -> None:
            of_this = cases(fixtures[of]) if callable(cases) else cases
            chosen = _chosen(of_this, fixtures["request"], shaped)
            for parameter in added:
                del fixtures[parameter.name]
            _run(
                test,
                {case: dict(zip(given, chosen[case], strict=True)) for case in chosen},
                fixtures,
            )

        of_all.__signature__ = signature.replace(parameters=[*others, *added])
        return of_all

    return decorate


def together(test: Test) -> Test:
    """Run a test with all values of the ``parametrize`` marks below, as one test (see ``each``)."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    names = [_names(mark.args[0]) for mark in marks]
    cases: dict[str, tuple[Any, ...]] = {}
    for rows in itertools.product(*(mark.args[1] for mark in marks)):
        values: list[Any] = []
        for row, own in zip(rows, names, strict=True):
            if hasattr(row, "marks"):
                if row.marks:
                    raise TypeError(f"{test.__name__}: a case of several has no marks of its own")
                values += row.values
            else:
                values += row if len(own) > 1 else [row]
        case = ", ".join(str(value)[:60] for value in values)
        cases[f"{len(cases)}: {case}"] = tuple(values)
    return each(",".join(itertools.chain(*names)), cases, shaped=SHAPED)(test)


def _names(given: Any) -> list[str]:
    return [n.strip() for n in given.split(",")] if isinstance(given, str) else list(given)


def _run(test: Test, cases: Mapping[str, Mapping[str, Any]], fixtures: Mapping[str, Any]) -> None:
    skipped, failed = [], []
    for case, values in cases.items():
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.manual_seed(0)
        try:
            test(**fixtures, **values)
        except pytest.skip.Exception as skip:
            skipped.append(skip)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"case: {case}")
            failed.append(error)
    if failed:
        raise failed[0] if len(failed) == 1 else BaseExceptionGroup("cases", failed)
    if len(skipped) == len(cases):
        raise skipped[0] if skipped else pytest.skip.Exception("no case")


def _chosen(cases: Cases, request: pytest.FixtureRequest, shaped: int) -> Cases:
    checked = request.config.getoption("--jaxtyping-packages", default=None)
    if not checked or request.node.get_closest_marker("every_path") or len(cases) <= shaped:
        return cases
    step = -(-len(cases) // shaped)
    first = zlib.crc32(request.node.nodeid.encode()) % step
    return {name: cases[name] for name in [*cases][first::step]}
