# SPDX-License-Identifier: Apache-2.0
"""The example of docs/own-task.md, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_tasks import registered

from keymix.cli import main

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_task.py"


def nothing() -> None:
    """The file registers itself."""


@pytest.mark.slow
def test_the_example_trains_and_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imports = ["--import", str(EXAMPLE)]
    short = ["--data.limit", "60", "--schedule.epochs", "1", "--schedule.warmup_epochs", "0"]
    with registered(nothing):
        run = ["--data", "digit_values", "--out", str(tmp_path / "run")]
        assert main(["train", "digits_vit", *run, *short, *imports]) == 0
        assert main(["eval", str(tmp_path / "run"), *imports]) == 0
        assert "MAE" in capsys.readouterr().out
