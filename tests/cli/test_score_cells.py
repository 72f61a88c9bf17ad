# SPDX-License-Identifier: Apache-2.0
"""Every score is under its own head."""

from __future__ import annotations

import pytest

from keymix.cli import scores
from keymix.records import Own
from keymix.task import get_task
from keymix.tasks.segmentation.facts import CaseScores, ClassScores, MaskDetails
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
    bowel = ClassScores(name="bowel", jaccard=0.1, dice=0.2, hd95=3.25, surface_dice=0.3, missed=4)
    nothing = {"dice": None, "hd95": None, "surface_dice": None}
    stomach = ClassScores(name="stomach", jaccard=0.5, missed=6, **nothing)
    cases = [
        CaseScores(name=f"case{k}", images=k, jaccard=k / 20, dice=(None, 0.25)) for k in range(12)
    ]
    result = SplitScores(
        scores={"jaccard": 0.7, "weighted_jaccard": 0.75, "dice": 0.8},
        own=Own.of(
            MaskDetails(
                hd95_px=9.0,
                surface_dice=0.65,
                missed=10,
                distance_unit="px",
                calibration_error=0.0425,
                classes=(bowel, stomach),
                cases=tuple(cases),
                true_pixels=90,
            )
        ),
    )
    scores.print_details(result, SEGMENTATION, "test")
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines() if "\t" in line]
    assert lines[:4] == [
        ["class", "IoU %", "Dice %", "surface Dice %", "HD95 px", "in one alone"],
        ["bowel", "10.00", "20.00", "30.00", "3.2", "4"],
        ["stomach", "50.00", "–", "–", "–", "6"],
        ["all", "70.00", "80.00", "65.00", "9.0", "10"],
    ]
    assert lines[4] == ["case", "images", "IoU %", "Dice % bowel", "Dice % stomach"]
    assert lines[5:] == [
        [f"case{k}", f"{k}", f"{5 * k:.2f}", "–", "25.00"]
        for k in range(10)  # of 12
    ]
    scores.print_details(SplitScores(scores={}), CLASSIFICATION, "test")
    assert capsys.readouterr().out == ""
