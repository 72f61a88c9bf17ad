# SPDX-License-Identifier: Apache-2.0
"""Which class was taken for which, counted over runs."""

from __future__ import annotations

import numpy as np

from keymix.compare.answers import Answers, confusions
from keymix.records import to_json


def answers(target: list[int], predicted: list[int]) -> Answers:
    said = np.array(predicted)
    return Answers(target=np.array(target), predicted={"last": said, "best": np.array(target)})


def test_confusions_name_the_true_class_first_and_the_commonest_pair_on_top() -> None:
    runs = [answers([0, 1, 1, 2], [2, 1, 0, 2]), answers([0, 1, 1, 2], [2, 1, 1, 1])]
    assert to_json(confusions(runs)) == [
        {"true": 0, "predicted": 2, "count": 2},
        {"true": 1, "predicted": 0, "count": 1},
        {"true": 2, "predicted": 1, "count": 1},
    ]
    assert not confusions(runs, which="best")
