# SPDX-License-Identifier: Apache-2.0
"""Stored answers of masks: read in order, refused when damaged, and which images are shown."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.records import Own
from keymix.report.part import RunAnswers, packed_shares
from keymix.tasks.segmentation.answers import MaskAnswers
from keymix.tasks.segmentation.page import PAGE, by_size, fullest
from keymix.train.files import write_arrays
from keymix.train.folder import Which, read_answers

DATA = DataRecord(
    spec="masks:a",
    task="segmentation",
    multilabel=False,
    classes=("background", "a", "b"),
    image_size=(4, 4),
    in_chans=1,
    mean=(0.5,),
    std=(0.5,),
    crop_pct=1.0,
    cached=True,
    sizes={"train": 1, "val": 1, "test": 4},
    index_sha256=dict.fromkeys(("train", "val", "test"), ""),
    fingerprint="",
)


def answers(areas: list[int], group: list[int]) -> MaskAnswers:
    """Answers on images with so many true pixels of class 1, and others of the background."""
    counts = np.zeros((len(areas), 3, 3), dtype=np.int64)
    counts[:, 0] = 999
    counts[:, 1, 2] = areas
    return MaskAnswers(
        index=np.arange(len(areas)),
        group=np.array(group),
        counts=counts,
        surfaces=np.full((*counts.shape[:2], 2), np.nan),
        bins=np.ones((len(counts), 15, 3)),
        classes=DATA.classes,
        scored=(1, 2),
    )


def read(path: Path, data: DataRecord = DATA, which: Which = "last") -> MaskAnswers:
    found = read_answers(path, data)[which]
    assert isinstance(found, MaskAnswers)
    return found


def stored(path: Path) -> Path:
    """Write answers of four images in another order than their index."""
    order = np.array([2, 0, 3, 1])
    counts = np.arange(36).reshape(4, 3, 3)
    arrays = {
        "index": order,
        "group": np.array([5, 5, 6, 6])[order],
        **{f"{which}_counts": counts[order] + i for i, which in enumerate(("last", "best"))},
        **{f"{which}_surfaces": np.full((4, 3, 2), np.nan) for which in ("last", "best")},
        **{f"{which}_bins": np.ones((4, 15, 3)) for which in ("last", "best")},
    }
    write_arrays(path, arrays)
    return path


def test_answers_come_in_the_order_of_the_images(tmp_path: Path):
    found = read(stored(tmp_path / "p.npz"))
    assert found.scored == (1, 2)
    assert found.group.tolist() == [5, 5, 6, 6]
    assert (found.counts == np.arange(36).reshape(4, 3, 3)).all()
    best = read(tmp_path / "p.npz", which="best")
    assert (best.counts == np.arange(36).reshape(4, 3, 3) + 1).all()
    assert (found.truth == np.arange(36).reshape(4, 3, 3)[:, 1:, 2]).all()
    assert (found.cases[1] == found.counts[2:].sum(0)).all()


def test_several_labels_a_pixel_have_no_background(tmp_path: Path):
    data = replace(DATA, multilabel=True)
    assert read(stored(tmp_path / "p.npz"), data).scored == (0, 1, 2)


def test_damaged_answers_are_reported_in_one_line(tmp_path: Path):
    path = tmp_path / "p.npz"
    with pytest.raises(UserError, match=r"cannot read '.*p\.npz'"):
        read_answers(path, DATA)
    path.write_bytes(stored(path).read_bytes()[:200])
    with pytest.raises(UserError, match=r"cannot read '.*p\.npz'"):
        read_answers(path, DATA)
    with pytest.raises(UserError, match=r"p\.npz' has 4 answers"):
        read_answers(stored(path), replace(DATA, sizes={**DATA.sizes, "test": 5}))
    write_arrays(path, {"index": np.arange(4)})
    with pytest.raises(UserError, match="lacks 'group'"):
        read_answers(path, DATA)


def test_packed_overlaps_read_back_and_ends_are_exact():
    shares = np.array([0.0, 1.0, 0.123456, 0.5])
    back = np.frombuffer(base64.b64decode(packed_shares(shares)), "<u2") / 65535
    assert back == pytest.approx(shares, abs=1e-5)
    assert (back[0], back[1]) == (0.0, 1.0)


def test_attention_is_shown_on_the_fullest_of_different_cases():
    #                 0   1   2  3   4   5  6   7   8
    made = answers([10, 30, 20, 0, 40, 15, 0, 50, 45], [0, 0, 0, 0, 1, 1, 2, 2, 2])
    assert fullest(made, 4) == [7, 4, 1, 8]
    assert fullest(made, 99) == [7, 4, 1, 8, 2, 5, 0, 6, 3]
    assert PAGE.chosen(answers([0, 0, 0], [0, 1, 2]), 2) == [0, 1]


def runs_of(*shares: list[float], group: list[int] | None = None) -> list[RunAnswers]:
    """Make runs that find such shares of class 1 in images of 100 true pixels, of some cases."""
    runs = []
    for found in shares:
        made = answers([100] * len(found), group or list(range(len(found))))
        made.counts[:, 1, :2] = np.array(found)[:, None] * 100
        runs.append(RunAnswers(mixer="a", answers=made, details=Own.of(None)))
    return runs


def kinds(drawn: Mapping[int, str]) -> dict[int, str]:
    return {i: why.partition(":")[0] for i, why in drawn.items()}


def test_the_worst_median_and_best_images_are_drawn_by_the_mean_over_runs():
    first = [0.1, 0.9, 0.5, 0.3, 0.8, 0.2, 0.6, 0.4, 0.7]
    found = PAGE.drawn(runs_of(first))
    worst, median, best = {0, 5}, {2, 7}, {1, 4}
    assert kinds(found) == {
        **dict.fromkeys(worst, "worst"),
        **dict.fromkeys(median, "median"),
        **dict.fromkeys(best, "best"),
    }
    assert next(iter(found.values())) == "worst: mean IoU 10.0\u00a0%"
    second = [1 - share for share in first]  # one is as good as the other, but for an image
    second[3] = first[3]
    assert PAGE.drawn(runs_of(first, second))[3] == "worst: mean IoU 30.0\u00a0%"


def test_two_images_of_a_kind_are_of_different_cases_where_there_are():
    shares = [0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9]
    found = kinds(PAGE.drawn(runs_of(shares, group=[0, 0, 1, 1, 2, 3, 3, 3])))
    assert [i for i in found if found[i] == "worst"] == [0, 2]
    assert [i for i in found if found[i] == "best"] == [7, 4]
    one = kinds(PAGE.drawn(runs_of(shares, group=[0] * 8)))
    assert [i for i in one if one[i] == "worst"] == [0, 1]


def test_few_images_are_drawn_once_and_one_that_is_empty_after_them():
    (run,) = runs_of([0.2, 0.5, 0.0])
    made = run.answers
    assert isinstance(made, MaskAnswers)
    made.counts[2, 1] = 0  # nothing is there, and nothing is found
    assert kinds(PAGE.drawn([run])) == {0: "worst", 1: "best", 2: "empty"}
    assert PAGE.drawn(runs_of([0.0])) == {0: "worst: mean IoU 0.0\u00a0%"}


def test_structures_are_parted_by_size_and_scored_by_their_pixels_together():
    rng = np.random.default_rng(4)
    areas = rng.integers(0, 50, (30, 3)) * (rng.random((30, 3)) < 0.8)
    runs: dict[str, list[MaskAnswers]] = {"a": [], "b": []}
    for mixer in ("a", "a", "b"):
        made = answers([1] * 30, [0] * 30)
        both = np.floor(areas * rng.random(areas.shape))
        made.counts[...] = np.stack([both, both + 3, areas], axis=-1)
        runs[mixer].append(made)
    found = by_size(runs)
    assert found is not None
    structures = [(int(areas[i, k]), i, k) for i in range(30) for k in (1, 2) if areas[i, k]]
    assert sum(found.structures) == len(structures)
    assert max(found.structures) <= len(structures) / 3 + 4  # those of one size stay together
    assert 3 * found.structures[0] >= len(structures)
    assert 3 * sum(found.structures[:2]) >= 2 * len(structures)
    assert found.pixels == tuple(sorted(found.pixels))
    for at, (low, high) in enumerate(found.pixels):
        inside = [(i, k) for size, i, k in structures if low <= size <= high]
        assert found.structures[at] == len(inside)
        for mixer, of in runs.items():
            each = []
            for run in of:
                both, said, true = (
                    sum(int(run.counts[i, k, j]) for i, k in inside) for j in range(3)
                )
                each.append(2 * both / (said + true))
            assert found.dice[mixer][at] == pytest.approx(sum(each) / len(each))


def test_structures_of_one_size_are_one_part_and_without_any_there_is_none():
    found = by_size({"a": [answers([7, 7, 7], [0, 1, 2])]})
    assert found is not None
    assert (found.pixels, found.structures) == (((7, 7),), (3,))
    assert by_size({"a": [answers([0, 0], [0, 1])]}) is None
