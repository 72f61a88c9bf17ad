# SPDX-License-Identifier: Apache-2.0
"""The report in words, where images have masks: the score, the split, the interval over cases."""

from __future__ import annotations

from keymix.analysis.statistics import FEW_CASES

SCORE = (
    "Images are stretched to the model's size, whatever their proportions, and masks follow by the "
    "nearest pixel; all scores are of that size. The Jaccard index of a class is the pixels that "
    "truth and prediction share over those that either has, the pixels of all test images counted "
    "together. The mean Jaccard index is the plain mean over the classes without the background; a "
    "class in neither truth nor prediction is left out. The weighted one weighs each class by its "
    "true pixels. The Hausdorff distance is that of the farthest pixel, the mean over the images "
    "where truth and prediction have the class; images where only one of them has it are counted "
    "beside it."
)


def split_by(setting: str | None) -> str:
    """Say what the splits keep together.

    Args:
        setting: The recipe's ``data.split_by``.
    """
    if setting == "slice":
        return (
            " Single images were split, not cases: images of one case lie in several splits, and "
            "scores are better than on new cases."
        )
    return " All images of a case are in one split, where the data names cases."


def over_cases() -> str:
    """Say how the interval over test cases is made."""
    return (
        "The interval over test cases: images of one case are alike, so the unit is the case. The "
        "difference of the mean Jaccard index, averaged over seeds, is taken again without each "
        "case in turn; the spread of these (delete-one jackknife) with Student's t, 95 %. It "
        "covers other cases of the same kind, for these trained models; below "
        f"{FEW_CASES} cases it is rough, and there is none where a class is in one case alone."
    )
