# SPDX-License-Identifier: Apache-2.0
"""The job of Q-K attention in one kernel: its steps on a CPU, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dry import context

from gpu_queue.jobs import jobs
from gpu_queue.jobs.qk_mask import AXES, DTYPES, FUSED, JOB, PARTS, SHAPES, THEIRS

pytestmark = pytest.mark.slow


def test_the_dry_run_compares_all_three_over_both_axes(tmp_path: Path) -> None:
    pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
    results = {}
    for step in JOB.steps(True):
        results[step.name] = json.loads(json.dumps(step.measure(context(tmp_path))))
    assert {found["axis"] for found in results.values()} == set(AXES)
    for found in results.values():
        assert set(found["runs"]) == {THEIRS, PARTS, FUSED}
        assert found["runs"][FUSED]["differ"] == 0
        assert found["runs"][FUSED]["error"] < 1e-5
        assert all(row["ms"] > 0 for row in found["runs"].values())
    page = JOB.section(results)
    assert all(name in page for name in (THEIRS, PARTS, FUSED, *AXES))


def test_the_job_is_in_the_queue_with_every_shape_axis_and_dtype() -> None:
    assert JOB in jobs()
    assert len(JOB.steps(False)) == len(SHAPES) * len(AXES) * len(DTYPES)
