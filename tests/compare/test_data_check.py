# SPDX-License-Identifier: Apache-2.0
"""A comparison checks its data once, before it trains, and says everywhere what it found."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from few_digits import small

from keymix.cli.comparison import plain, print_result
from keymix.compare.events import Event
from keymix.compare.results import checked_data
from keymix.compare.run import Comparison, rebuild
from keymix.data import load
from keymix.report.checked import Checked
from keymix.report.comparison_page import render
from keymix.report.words import said

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from film import save_frames
from pictures import picture


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two classes; an image of train is in test, another in both classes."""
    root = tmp_path_factory.mktemp("photos")
    seed = 0
    for split, count in (("train", 14), ("test", 6)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                seed += 1
                picture(seed, (12, 12)).save(root / split / name / f"{i:03d}.png")
    shutil.copy(root / "train" / "cat" / "000.png", root / "test" / "cat" / "again.png")
    shutil.copy(root / "train" / "cat" / "001.png", root / "train" / "dog" / "again.png")
    return root


def compared(root: Path, out: Path, seen: list[Event], **more: Any) -> Comparison:
    return small(
        out,
        data=f"folder:{root}",
        recipe="digits_vit",
        controls=False,
        limit=None,
        progress=seen.append,
        overrides={"data.image_size": 12, "data.batch_size": 8},
        **more,
    )


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return []


@pytest.fixture(scope="module")
def done(root: Path, events: list[Event], tmp_path_factory) -> Comparison:
    return compared(root, tmp_path_factory.mktemp("comparison") / "out", events)


@pytest.mark.slow
def test_findings_are_reported_before_the_first_run_and_kept(done: Comparison, events) -> None:
    kinds = [event.kind for event in events]
    notes = [event.text for event in events if event.kind == "note"]
    assert kinds.index("note") < kinds.index("plan")
    copies, labels = [note for note in notes if note.startswith("Data check")]
    assert "images in more than one split" in copies
    assert "again.png" in copies
    assert "images with more than one label" in labels
    assert "data_problem" in done.record.found
    kept = json.loads((done.out / "plan.json").read_text())["checked"]
    assert {found["level"] for found in kept["findings"]} == {"falsifies"}
    assert kept["looked_at"] == {"images": 42, "of": 42}
    assert not kept["too_narrow"]


def test_the_page_and_the_result_begin_with_them(done: Comparison, capsys) -> None:
    page = (done.out / "report.html").read_text()
    assert page.index('id="data-check"') < page.index("Every mixer against")
    assert "images in more than one split" in page
    findings = plain(done)["data_check"]["findings"]
    assert [found["level"] for found in findings] == ["falsifies"] * 2
    print_result(done)
    assert "falsifies results: images with more than one label (1)" in capsys.readouterr().out


@pytest.mark.slow
def test_it_is_read_and_not_made_again(done: Comparison, root: Path, monkeypatch) -> None:
    def again(*_: Any) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("keymix.compare.run.checked_data", again)
    events: list[Event] = []
    more = compared(root, done.out, events)
    assert any("images in more than one split" in e.text for e in events if e.kind == "note")
    assert more.record.data_check == done.record.data_check
    assert rebuild(done.out).record.data_check == done.record.data_check
    with pytest.raises(AssertionError, match="checked again"):
        compared(root, done.out, [], overwrite=True)


def test_frames_make_intervals_too_narrow(tmp_path: Path, done: Comparison) -> None:
    data = load(f"masks:{save_frames(tmp_path / 'film', kind='masks')}")
    checked = checked_data(data)
    assert checked.too_narrow
    assert "test cases are too narrow" in said("data_check", checked, data.record())[-1]
    photos = load(f"folder:{save_frames(tmp_path / 'photos', kind='folder')}")
    record = replace(done.record, data_check=checked_data(photos))
    page = render(record)
    assert page.count("test images are too narrow") >= 2  # at the top and below the chart
    assert page.index("test images are too narrow") < page.index("Every mixer against")
    assert "data-check" not in render(replace(record, data_check=None))


def test_what_was_not_looked_at_is_said(done: Comparison) -> None:
    checked = Checked(
        findings=(),
        too_narrow=False,
        looked_at={"images": 5, "of": 42},
        not_looked_at=("copies among 37 of 42 images",),
    )
    (line,) = said("data_check", checked, done.record.data)
    assert "copies among 37 of 42 images" in line
    assert "copies among 37 of 42 images" in render(replace(done.record, data_check=checked))
