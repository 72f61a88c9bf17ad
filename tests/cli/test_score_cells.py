# SPDX-License-Identifier: Apache-2.0
"""Every score is under its own head."""

from __future__ import annotations

import pytest

from keymix.cli import scores
from keymix.records import Own
from keymix.task import get_task
from keymix.tasks.segmentation.facts import ClassScores, MaskDetails
from keymix.train.record import SplitScores

CLASSIFICATION, SEGMENTATION = map(get_task, ("classification", "segmentation"))


def test_cells_stand_under_their_heads() -> None:
    entries = {"loss": 0.25, "jaccard": 0.1, "weighted_jaccard": 0.2, "dice": 0.3}
    under = dict(zip(scores.heads(SEGMENTATION), scores.cells(entries, SEGMENTATION), strict=True))
    assert under == {
        "loss": "0.2500",
        "mIoU %": "10.00",
        "weighted %": "20.00",
        "Dice %": "30.00",
    }
    entries = {"loss": 1.5, "top1": 0.4, "top5": None}
    under = dict(
        zip(scores.heads(CLASSIFICATION), scores.cells(entries, CLASSIFICATION), strict=True)
    )
    assert under == {
        "loss": "1.5000",
        "top-1 %": "40.00",
        "balanced %": "–",
        "top-5 %": "–",
    }


def test_each_class_has_its_own_scores(capsys: pytest.CaptureFixture[str]) -> None:
    bowel = ClassScores(name="bowel", jaccard=0.1, dice=0.2, hausdorff_mm=3.25, missed=4)
    stomach = ClassScores(name="stomach", jaccard=0.5, dice=None, hausdorff_mm=None, missed=6)
    result = SplitScores(
        scores={"jaccard": 0.7, "weighted_jaccard": 0.75, "dice": 0.8},
        own=Own.of(
            MaskDetails(
                hausdorff_mm=9.0,
                hausdorff_missed=10,
                hausdorff_unit="px",
                classes=(bowel, stomach),
                true_pixels=90,
            )
        ),
    )
    scores.print_details(result, SEGMENTATION, "test")
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines() if "\t" in line]
    assert lines == [
        ["class", "IoU %", "Dice %", "Hausdorff px", "in one alone"],
        ["bowel", "10.00", "20.00", "3.2", "4"],
        ["stomach", "50.00", "–", "–", "6"],
        ["all", "70.00", "80.00", "9.0", "10"],
    ]
    scores.print_details(SplitScores(scores={}), CLASSIFICATION, "test")
    assert capsys.readouterr().out == ""
