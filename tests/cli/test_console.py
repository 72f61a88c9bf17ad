# SPDX-License-Identifier: Apache-2.0
"""Whatever a name holds, what commands write drives no terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from keymix.cli import console

NAME = "a\x1b[2J\x9b5m\x7f\u202eb"
ESCAPED = r"a\x1b[2J\u009b5m\u007f\u202eb"
DRIVING = set("\x1b\x9b\x7f\u202e")


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    for name in ("out", "err"):
        made = Console(
            file=stream,
            width=200,
            soft_wrap=True,
            highlight=False,
            emoji=False,
            force_terminal=request.param,
            no_color=True,
        )
        made._color_system = None
        monkeypatch.setattr(console, name, made)
    return stream


def test_lines_and_notes_show_escapes(written: io.StringIO) -> None:
    console.say(f"{NAME}\tx\n{NAME}")
    console.note(NAME)
    console.warn(NAME)
    console.line((NAME, "x"))
    console.report_broken([NAME])
    text = written.getvalue()
    assert text.count(ESCAPED) == 6
    assert not DRIVING & set(text)
    assert len(text.splitlines()) == 6


def test_tables_show_escapes_in_title_headings_and_cells(written: io.StringIO) -> None:
    console.table([NAME, "n"], [[NAME, "1"]], title=NAME)
    text = written.getvalue()
    assert text.count(ESCAPED) == (3 if console.out.is_terminal else 2)
    assert not DRIVING & set(text)


def test_json_stays_json(written: io.StringIO) -> None:
    console.say(json.dumps({NAME: NAME}, indent=2, ensure_ascii=False))
    assert json.loads(written.getvalue()) == {NAME: NAME}
    assert not DRIVING & set(written.getvalue())
