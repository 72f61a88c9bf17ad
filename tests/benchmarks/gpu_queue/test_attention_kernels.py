# SPDX-License-Identifier: Apache-2.0
"""The job of attention kernels: its steps on a CPU, and what its page says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from dry import context

from gpu_queue.jobs.attention_kernels import COMPILED, EAGER, JOB, MIXERS, PATHS, SIDES
from gpu_queue.mixer_results import BARE, BASE, DTYPES, wrong

pytestmark = pytest.mark.slow
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of the dry run, as a file holds them."""
    folder = tmp_path_factory.mktemp("dry")
    where = context(folder)
    found = {step.name: step.measure(where) for step in JOB.steps(True)}
    torch.compiler.reset()
    return json.loads(json.dumps(found, allow_nan=False))


def test_every_kernel_is_checked_and_timed_from_196_to_4096_tokens() -> None:
    names = {step.name for step in JOB.steps(False)}
    tokens = [side * side for side in SIDES]
    assert (min(tokens), max(tokens)) == (196, 4096)
    assert names == {f"{name}/{what}" for name in MIXERS for what in ("errors", *tokens)}


def test_the_dry_run_measures_errors_and_every_path(dry: Results) -> None:
    for name, result in dry.items():
        assert result["path"] == "blocked"
        assert wrong(result, "blocked") == []
        if name.endswith("errors"):
            assert {(row["path"], row["dtype"]) for row in result["errors"]} == {
                (path, dtype) for path in (EAGER, "blocked") for dtype in DTYPES
            }
            assert all(row["compared"] for row in result["errors"])
        else:
            paths = {row["path"] for row in result["times"]}
            assert paths == {"blocked", EAGER, COMPILED, BASE, BARE}
            assert all(row["ms"] > 0 for row in result["times"]), name
            assert result["matmul_tflop_s"] > 0


def test_the_page_gives_ratios_shares_and_what_is_left(dry: Results) -> None:
    written = JOB.section(dry)
    assert "`static_key` is right: at most" in written
    assert written.count("| `re_attention` | 16 |") == 2
    assert "Not measured yet: conv_static_key/errors" in written
    for part in dry:  # of any part
        assert JOB.section({part: dry[part]}).strip()


def made(ms: dict[str, float], **more: Any) -> dict[str, Any]:
    times = [
        {
            **{"path": path, "mode": mode, "tokens": 784, "images": 8, "tflop_s": 100.0},
            **{"ms": each, "peak_mib": 4 * each},
        }
        for path, each in ms.items()
        for mode in ("train", "forward")
    ]
    first = {"path": "triton", "dim": 384, "heads": 6, "matmul_tflop_s": 400.0, "errors": []}
    return {**first, "times": times, **more}


def test_a_ratio_above_one_says_that_the_kernels_are_faster() -> None:
    result = made({"triton": 2.0, EAGER: 9.0, COMPILED: 3.0, BASE: 1.0, BARE: 0.5})
    written = JOB.section({"conv_static_key/784": result})
    row = "| `conv_static_key` | 784 | 8 | 4.50 / 4.50 | 1.50 / 1.50 | 0.50 / 0.50 | 3 / 2 |"
    assert row in written
    assert "| `conv_static_key` | 784 | 25% / 25% | 25% / 25% | 1/4.5 |" in written


def test_a_path_that_did_not_run_has_no_number_and_a_failure_is_named() -> None:
    result = made({"triton": 2.0, BASE: 1.0})
    result["times"].append(
        {**result["times"][0], "path": "triton", "mode": "forward", "reason": "failed: no code"}
    )
    written = JOB.section({"conv_static_key/784": result})
    assert "`conv_static_key/784` is wrong: 784 tokens: failed: no code." in written
    assert "| - / - |" in written
    assert set(PATHS) == {"triton", EAGER, COMPILED, BASE}
