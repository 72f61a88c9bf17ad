# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from the first cell to the last."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS

sys.path.insert(0, str(Path(__file__).parents[1] / "compare"))
from costs import cheap_costs, no_trials

EXAMPLES = DOCS / "examples"


def cells_of(name: str, long: str, short: str) -> list[str]:
    """The code cells of a notebook, with a shorter training in place of its own."""
    found = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    cells = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    assert any(long in cell for cell in cells)
    return [cell.replace(long, short) for cell in cells]


@pytest.mark.slow
def test_it_looks_into_models_and_draws_three_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    namespace: dict[str, Any] = {}
    shorter = '"schedule.epochs": 12', '"schedule.epochs": 2'
    for number, cell in enumerate(cells_of("analyses.ipynb", *shorter)):
        exec(compile(cell, f"cell {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    for part in ("TrainedModel", "multiply-adds", "attention maps of 4 layers", "hardly fires"):
        assert part in printed
    assert len(plt.get_fignums()) == 3
    for name in ("cost", "collapse", "spikes"):
        assert "<table" in namespace[name]._repr_html_()
    assert (tmp_path / "collapse" / "collapse.html").is_file()
    plt.close("all")


@pytest.mark.slow
def test_it_compares_prints_frames_and_draws_two_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    from matplotlib import pyplot as plt

    plt.close("all")
    monkeypatch.setattr("keymix.report.svg._drawn", lambda *_: "<svg></svg>")  # those of the page
    namespace: dict[str, Any] = {}
    few = "epochs=4", "epochs=1, processes=1"
    with cheap_costs(), no_trials():
        for number, cell in enumerate(cells_of("compare.ipynb", *few)):
            exec(compile(cell, f"cell {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    for name in ("softmax", "static_key", "identity", "difference", "step_ms"):
        assert name in printed
    assert len(plt.get_fignums()) == 2
    assert "<table" in namespace["result"]._repr_html_()
    assert namespace["again"].record == namespace["result"].record
    plt.close("all")
