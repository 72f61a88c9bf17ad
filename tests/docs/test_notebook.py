# SPDX-License-Identifier: Apache-2.0
"""The notebook of a comparison runs from the first cell to the last."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS

sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
from few_digits import cheap_costs, no_trials

NOTEBOOK = DOCS / "examples" / "compare.ipynb"


@pytest.mark.slow
def test_it_compares_prints_frames_and_draws_two_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    cells = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {}
    with cheap_costs(), no_trials():
        for number, cell in enumerate(cells):
            exec(compile(cell, f"cell {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    for name in ("softmax", "static_key", "identity", "difference", "step_ms"):
        assert name in printed
    assert len(plt.get_fignums()) == 2
    assert "<table" in namespace["result"]._repr_html_()
    assert namespace["again"].record == namespace["result"].record
    plt.close("all")
