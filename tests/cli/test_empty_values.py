# SPDX-License-Identifier: Apache-2.0
"""An option whose value is empty, as an unset variable of the shell leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keymix.cli import main


@pytest.mark.parametrize("option", [["--model.weights", ""], ["--mixer="], ["--limit", " "]])
def test_an_empty_value_is_one_line(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "digits_vit", *option, "--out", str(out)]) == 2
    name = option[0].rstrip("=")
    text = capsys.readouterr().err
    assert text == f"keymix: error: option {name} is empty: give it a value, or leave it out.\n"
    assert not out.exists()
