# SPDX-License-Identifier: Apache-2.0
"""Processes share the cores and take no more threads than they are given."""

from __future__ import annotations

import os

import pytest

from keymix.analysis.threads import threads_each, use_threads


@pytest.mark.parametrize(
    ("cores", "given", "processes", "expected"),
    [
        (8, 8, 1, 8),
        (8, 8, 3, 2),
        (8, 1, 1, 1),  # OMP_NUM_THREADS=1
        (8, 3, 2, 3),
        (2, 16, 1, 2),
        (2, 2, 5, 1),
    ],
)
def test_threads_are_a_share_of_the_cores_and_not_more_than_given(
    cores: int, given: int, processes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores)}, raising=False)
    with use_threads(given):
        assert threads_each(processes) == expected
