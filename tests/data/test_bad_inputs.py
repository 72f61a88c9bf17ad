# SPDX-License-Identifier: Apache-2.0
"""Each row of the table of bad inputs, through the real command."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import huggingface_hub.constants
import pytest
from bad_inputs import ROWS, Row, cut, photos, spoilt, table

from keymix.cli import main
from keymix.compare.question import Question
from keymix.errors import UserError

TINY = ["--epochs", "1", "--data.batch_size", "4", "--schedule.warmup_epochs=0"]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, and no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "huggingface/hub")

    def unknown_host(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)


def counted(line: str) -> str:
    """Forget how far a decoder came before it found a file truncated: libraries differ."""
    return re.sub(r"\(\d+ bytes", "(N bytes", line)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.given)
def test_the_line_is_as_the_table_says(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    row.make()
    words = ["train", row.recipe, "--data", row.spec, *TINY, *row.words]
    assert main(words) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("keymix")]
    assert [counted(line) for line in errors] == [counted(f"keymix: error: {row.answer}")]


def test_skip_corrupt_trains_on_what_is_left_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoilt("cat/003.jpg", cut)
    words = ["train", "digits_vit", "--data", "folder:photos", *TINY, "--out", "run"]
    assert main([*words, "--skip-corrupt"]) == 0, capsys.readouterr().err
    record = json.loads(Path("run", "summary.json").read_text())["data"]
    assert record["left_out_count"] == 1
    assert record["left_out"][0]["id"] == "photos/cat/003.jpg"
    assert record["left_out"][0]["reason"].startswith("image file is truncated")


def test_compare_takes_the_same_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Question] = []

    def instead(question: Question, **_: object) -> None:
        seen.append(question)
        raise UserError("enough")

    monkeypatch.setattr("keymix.compare.run.answer", instead)
    assert main(["compare", "--data", "folder:photos", "--skip-corrupt"]) == 2
    assert seen[0].overrides == {"data.skip_corrupt": True}


def test_skip_corrupt_takes_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    assert main(["train", "digits_vit", "--skip-corrupt=yes"]) == 2
    assert "option --skip-corrupt takes no value" in capsys.readouterr().err
    assert main(["train", "digits_vit", "--skip-corupt"]) == 2
    assert "Did you mean '--skip-corrupt'" in capsys.readouterr().err


def test_the_page_holds_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    assert table() in page.read_text(encoding="utf-8")
