# SPDX-License-Identifier: Apache-2.0
"""Many cases in one test: what a test costs apart from its body is then paid once for all."""

from __future__ import annotations

import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

SHAPED = 1  # cases of one test where shapes are checked; see tests/conftest.py

Cases = Mapping[str, tuple[Any, ...]]


def each(names: str, cases: Cases | Callable[..., Cases]) -> Callable[..., Any]:
    """Run a test once for each case, and report all cases that fail.

    Every case starts from the same random numbers. Where shapes are checked, ``SHAPED`` of the
    cases run, unless the test is marked ``every_path``.

    Args:
        names: Arguments that a case gives, by commas, as for ``pytest.mark.parametrize``.
        cases: Values by the case's name, or a function of the test's parameter ``name``.
    """
    given = [name.strip() for name in names.split(",")]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in given]
        by_request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(test)
        def of_all(*, request: pytest.FixtureRequest, **fixtures: Any) -> None:
            of_this = cases(fixtures["name"]) if callable(cases) else cases
            skipped, failed = [], []
            chosen = _chosen(of_this, request)
            for name, values in chosen.items():
                _seed()
                try:
                    test(**fixtures, **dict(zip(given, values, strict=True)))
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"case: {name}")
                    failed.append(error)
            if failed:
                raise failed[0] if len(failed) == 1 else BaseExceptionGroup("cases", failed)
            if skipped and len(skipped) == len(chosen):
                raise skipped[0]

        of_all.__signature__ = signature.replace(parameters=[*others, by_request])
        return of_all

    return decorate


def _seed() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


def _chosen(cases: Cases, request: pytest.FixtureRequest) -> Cases:
    shaped = request.config.getoption("--jaxtyping-packages", default=None)
    if not shaped or request.node.get_closest_marker("every_path") or len(cases) <= SHAPED:
        return cases
    first = zlib.crc32(request.node.nodeid.encode()) % len(cases)
    names = [*cases, *cases][first : first + SHAPED]
    return {name: cases[name] for name in names}
