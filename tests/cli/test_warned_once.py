# SPDX-License-Identifier: Apache-2.0
"""A warning that many runs of one command share is shown once."""

from __future__ import annotations

import warnings

import pytest

from keymix.cli import _warnings_in_one_line
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
