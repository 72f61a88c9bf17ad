# SPDX-License-Identifier: Apache-2.0
"""Scores of masks against cases counted by hand and against other libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from monai.metrics import compute_dice, compute_hausdorff_distance, compute_surface_dice
from monai.networks import one_hot
from scipy.ndimage import gaussian_filter
from segmentation_models_pytorch.metrics import f1_score as smp_f1_score
from segmentation_models_pytorch.metrics import get_stats, iou_score
from sklearn.metrics import f1_score, jaccard_score

from each import together
from keymix.analysis.overlap import (
    IGNORED,
    dice,
    jaccard,
    mean_dice,
    mean_jaccard,
    overlap_counts,
    surface_scores,
    weighted_jaccard,
)
from keymix.data.kinds import IGNORE

ORGANS = (1, 2, 3)
NAN = math.nan


def counts_of(predicted, target, classes=4, multilabel=False):
    return overlap_counts(
        np.array(predicted), np.array(target), num_classes=classes, multilabel=multilabel
    )


def scores_of(counts):
    """Mean, weighted mean and Dice of the organs, of counts summed over images."""
    pooled = counts.sum(0)
    return [float(f(pooled, ORGANS)) for f in (mean_jaccard, weighted_jaccard, mean_dice)]


def test_ignored_pixels_are_those_of_the_masks():
    assert IGNORED == IGNORE


def test_counts_and_scores_of_two_rows_counted_by_hand():
    target = [[[0, 1, 1, 2], [0, 1, 2, 2]]]
    predicted = [[[0, 1, 2, 2], [1, 1, 2, 0]]]
    counts = counts_of(predicted, target)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[[1, 2, 2], [2, 3, 3], [2, 3, 3], [0, 0, 0]]]
    np.testing.assert_allclose(jaccard(counts)[0], [1 / 3, 2 / 4, 2 / 4, NAN])
    np.testing.assert_allclose(dice(counts)[0], [2 / 4, 4 / 6, 4 / 6, NAN])
    assert scores_of(counts) == pytest.approx([0.5, 0.5, 2 / 3])


def test_weights_are_true_pixels_and_not_predicted_ones():
    # class 1: 6 true, all found, J = 6/8 (2 more predicted); class 2: 2 true, none found, J = 0
    counts = counts_of([[[1] * 8]], [[[1] * 6 + [2] * 2]])
    assert scores_of(counts) == pytest.approx([(0.75 + 0) / 2, 6 / 8 * 0.75, (12 / 14) / 2])


def test_prediction_where_nothing_is_true_scores_nothing():
    counts = counts_of([[[0, 1, 1, 0]]], [[[0, 0, 0, 0]]])
    np.testing.assert_array_equal(jaccard(counts)[0, 1:], [0, NAN, NAN])
    assert scores_of(counts) == [0, 0, 0]


def test_truth_where_nothing_is_predicted_scores_nothing():
    counts = counts_of([[[0, 0, 0, 0]]], [[[0, 3, 3, 0]]])
    np.testing.assert_array_equal(dice(counts)[0, 1:], [NAN, NAN, 0])
    assert scores_of(counts) == [0, 0, 0]


def test_slice_without_organs_found_empty_scores_one():
    counts = counts_of([[[0, 0, 0, 0]]], [[[0, 0, 0, 0]]])
    assert np.isnan(jaccard(counts)[0, 1:]).all()
    assert scores_of(counts) == [1, 1, 1]


def test_one_pixel_found_is_one_and_missed_by_a_column_is_nothing():
    target = np.zeros((1, 5, 5), int)
    target[0, 2, 2] = 1
    assert scores_of(counts_of(target, target)) == [1, 1, 1]
    assert scores_of(counts_of(np.roll(target, 1, axis=2), target)) == [0, 0, 0]


def test_scores_of_a_split_pool_its_pixels():
    # found are 1 of 1 pixel and 1 of 9: 2 of 10, not the mean of 1 and 1/9
    target = [[[1, 0, 0, 0, 0, 0, 0, 0, 0]], [[1, 1, 1, 1, 1, 1, 1, 1, 1]]]
    predicted = [[[1, 0, 0, 0, 0, 0, 0, 0, 0]], [[1, 0, 0, 0, 0, 0, 0, 0, 0]]]
    counts = counts_of(predicted, target)
    np.testing.assert_allclose(mean_jaccard(counts, ORGANS), [1, 1 / 9])
    assert scores_of(counts) == pytest.approx([0.2, 0.2, 4 / 12])


def test_ignored_pixels_count_nowhere():
    target = [[[1, 1, 255, 255], [0, 0, 255, 0]]]
    predicted = [[[1, 0, 1, 2], [0, 0, 3, 0]]]
    counts = counts_of(predicted, target)
    assert counts.tolist() == [[[3, 4, 3], [1, 1, 2], [0, 0, 0], [0, 0, 0]]]


def test_all_pixels_ignored_leave_no_class():
    counts = counts_of([[[1, 2]]], [[[255, 255]]])
    assert counts.sum() == 0
    assert scores_of(counts) == [1, 1, 1]


def test_overlapping_organs_count_each_for_itself():
    # the second pixel is both organs; the last is ignored for the second organ alone
    target = [[[[1, 1, 0, 0]], [[0, 1, 1, 255]]]]
    predicted = [[[[1, 1, 1, 0]], [[0, 1, 0, 1]]]]
    counts = counts_of(predicted, target, classes=2, multilabel=True)
    assert counts.tolist() == [[[2, 3, 2], [1, 1, 2]]]
    np.testing.assert_allclose(jaccard(counts)[0], [2 / 3, 1 / 2])
    assert mean_jaccard(counts, (0, 1))[0] == pytest.approx(7 / 12)


def test_counts_of_a_whole_hospital_stay_exact():
    most = 2**61
    counts = np.array([[most, most + 2, most + 2]], dtype=np.int64)
    assert dice(counts)[0] == pytest.approx(1.0)
    assert jaccard(counts)[0] == pytest.approx(1.0)
    small = np.array([[2**31 - 1, 2**31, 2**31]], dtype=np.int64)
    assert jaccard(small)[0] == (2**31 - 1) / (2**31 + 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_counts_of_small_integers_do_not_wrap_around(dtype):
    predicted = np.full((2, 300, 300), 200, dtype)
    counts = overlap_counts(predicted, predicted, num_classes=201, multilabel=False)
    assert counts[1, 200].tolist() == [90000] * 3
    ones = np.ones((1, 1, 300, 300), dtype)
    assert overlap_counts(ones, ones, num_classes=1, multilabel=True).tolist() == [[[90000] * 3]]


def drawn(shape, classes, seed):
    """Truth and a prediction that is right at seven of ten pixels."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, shape)
    return np.where(rng.random(shape) < 0.7, target, rng.integers(0, classes, shape)), target


def test_jaccard_is_scikit_learns_over_the_pixels_that_count():
    predicted, target = drawn((3, 17, 13), 4, 0)
    target[:, :3] = 255
    counts, seen = counts_of(predicted, target).sum(0), target != 255
    for average, ours in (
        (None, jaccard(counts)),
        ("macro", mean_jaccard(counts, range(4))),
        ("weighted", weighted_jaccard(counts, range(4))),
    ):
        theirs = jaccard_score(target[seen], predicted[seen], average=average)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=str(average))


def test_multilabel_jaccard_is_scikit_learns_of_each_class():
    predicted, target = drawn((3, 3, 17, 13), 2, 1)
    counts = counts_of(predicted, target, classes=3, multilabel=True).sum(0)
    theirs = [jaccard_score(target[:, k].ravel(), predicted[:, k].ravel()) for k in range(3)]
    np.testing.assert_allclose(jaccard(counts), theirs, rtol=1e-12)


def test_dice_is_f1_over_all_pixels():
    predicted, target = drawn((1, 17, 13), 4, 2)
    counts = counts_of(predicted, target).sum(0)
    theirs = f1_score(target.ravel(), predicted.ravel(), average=None)
    np.testing.assert_allclose(dice(counts), theirs, rtol=1e-12)


def test_iou_and_dice_are_those_of_segmentation_models_and_monai():
    predicted, target = drawn((3, 17, 13), 4, 5)
    target[0, :4] = IGNORE
    pair = torch.from_numpy(predicted), torch.from_numpy(target)
    stats = get_stats(*pair, mode="multiclass", num_classes=4, ignore_index=IGNORE)
    pooled = [each.sum(0) for each in stats]
    counts = counts_of(predicted, target).sum(0)
    np.testing.assert_allclose(jaccard(counts), iou_score(*pooled), atol=1e-6)
    np.testing.assert_allclose(dice(counts), smp_f1_score(*pooled), atol=1e-6)
    whole = [one_hot(each[1:, None], 4) for each in pair]  # MONAI ignores no value
    theirs = compute_dice(*whole)
    of_images = dice(counts_of(predicted[1:], target[1:]))
    np.testing.assert_allclose(of_images, theirs, atol=1e-6)


def monais(predicted, truth, spacing, tolerance):
    """HD95 and surface Dice by MONAI."""
    one_hot = [torch.from_numpy(mask)[None, None].float() for mask in (predicted, truth)]
    kind = {"include_background": True, "spacing": spacing}
    hd95 = compute_hausdorff_distance(*one_hot, percentile=95, **kind)
    return float(hd95), float(compute_surface_dice(*one_hot, [tolerance], **kind))


@together
@pytest.mark.parametrize("spacing", [(1.0, 1.0), (0.75, 3.0), (2.5, 0.8, 1.25)])
@pytest.mark.parametrize("seed", range(4))
def test_scores_of_outlines_are_monais(spacing, seed):
    rng = np.random.default_rng(seed)
    shape = (19, 31) if len(spacing) == 2 else (7, 12, 14)
    rough = [gaussian_filter(rng.standard_normal(shape), 2) > 0.05 for _ in range(2)]
    rough[0][:3], rough[1][..., 9:] = False, False
    ours = surface_scores(*rough, spacing, tolerance=1.6)
    assert ours == pytest.approx(monais(*rough, spacing, 1.6), rel=1e-6)
    assert ours == pytest.approx(surface_scores(*rough[::-1], spacing, tolerance=1.6), rel=1e-12)


def test_a_class_at_the_edge_of_the_image_has_its_outline_there():
    mask = np.ones((9, 9), bool)
    inner = np.pad(np.ones((5, 5), bool), 2)
    assert surface_scores(inner, mask, (1.0, 1.0), tolerance=1.0)[1] == 0.0
    hd95, within = surface_scores(inner, mask, (1.0, 1.0), tolerance=2.0)
    assert hd95 > 2.0  # from the corners
    assert within == (16 + 20) / (16 + 32)  # but the corners and what lies next to them


def test_outlines_take_the_pitch_of_rows_first():
    mask = np.zeros((9, 9), bool)
    mask[4, 4] = True
    assert surface_scores(np.roll(mask, 2, axis=0), mask, (3.0, 1.0)) == (6.0, 0.0)
    assert surface_scores(np.roll(mask, 2, axis=1), mask, (3.0, 1.0)) == (2.0, 1.0)
    assert surface_scores(mask, mask, (3.0, 1.0)) == (0.0, 1.0)


def test_a_mask_that_is_missed_has_no_distance_and_a_surface_dice_of_0():
    mask, nothing = np.eye(5, dtype=bool), np.zeros((5, 5), bool)
    for pair in ((mask, nothing), (nothing, mask)):
        hd95, within = surface_scores(*pair, (1.0, 1.0))
        assert math.isnan(hd95)
        assert within == 0
    assert all(map(math.isnan, surface_scores(nothing, nothing, (1.0, 1.0))))


@pytest.mark.parametrize("spacing", [(0.0, 1.0), (1.0, -1.5), (math.nan, 1.0), (1.0,)])
def test_spacing_that_is_none_is_refused(spacing):
    mask = np.eye(3, dtype=bool)
    with pytest.raises(ValueError, match="spacing"):
        surface_scores(mask, mask, spacing)
