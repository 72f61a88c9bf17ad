# SPDX-License-Identifier: Apache-2.0
"""A warning that many runs of one command share is shown once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from PIL import Image

from keymix.cli import _warnings_in_one_line
from keymix.data.decode import read_image
from keymix.errors import KeymixWarning


def test_a_command_reports_a_warning_once_and_the_next_command_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        with _warnings_in_one_line():
            for text in ("few recordings", "few\nrecordings", "few recordings", "many"):
                warnings.warn(text, KeymixWarning, stacklevel=1)
        message = capsys.readouterr().err.splitlines()
        assert message == [
            f"keymix: warning: {text}" for text in ("few recordings", r"few\nrecordings", "many")
        ]


def test_what_pillow_warns_of_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "wide.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with _warnings_in_one_line():
        for _ in range(2):
            read_image(tmp_path / "wide.png", 4)
            warnings.warn_explicit("odd file", UserWarning, Image.__file__, 1)
    text = capsys.readouterr().err.splitlines()
    assert all(line.startswith("keymix: warning: ") for line in text)
    assert len(text) == 2
    assert f"{tmp_path / 'wide.png'} has 16x16 pixels" in text[0]
    assert text[1] == "keymix: warning: Pillow: odd file"
