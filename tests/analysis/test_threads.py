# SPDX-License-Identifier: Apache-2.0
"""Processes share the cores, take no more threads than they are given, and see a busy machine."""

from __future__ import annotations

import os

import pytest

from keymix.analysis.threads import busy, threads_each, use_threads


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


def test_a_load_above_the_cores_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 9.0, 9.0))
    assert busy() == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (5.25, 0.0, 0.0))
    assert "5.2" in busy()
    assert "4 cores" in busy()
