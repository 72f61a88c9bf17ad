# SPDX-License-Identifier: Apache-2.0
"""Comparisons here measure cost quickly."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_fresh_process(monkeypatch) -> None:
    """Peak memory needs a process of its own."""
    from keymix.analysis.memory import Peak

    def known(builds, *args: Any, **more: Any) -> dict[str, Peak]:
        del args, more
        peak = Peak(inference_mib=1.0, training_mib=2.0, note="not measured")
        return dict.fromkeys(builds, peak)

    monkeypatch.setattr("keymix.analysis.memory.peak_memory", known)
    monkeypatch.setattr("keymix.compare.costs.BUDGET_SECONDS", 0.5)
