# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's digits on their canvas."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from keymix.data import ImageData, load
from keymix.data.record import DataRecord
from keymix.data.sample import Faults
from keymix.data.sources.digits import open_digits
from keymix.records import from_json, to_json


@pytest.fixture(scope="module")
def digits() -> ImageData:
    return load("digits")


def test_every_digit_is_whole_at_one_of_25_places() -> None:
    rows, bunch = open_digits("", Faults()).rows, load_digits()
    places = set()
    for row, small in zip(rows, np.rint(bunch.images * (255 / 16)).astype(np.uint8), strict=True):
        canvas = row.image()[0].numpy()
        windows = np.lib.stride_tricks.sliding_window_view(canvas, (8, 8))
        found = np.argwhere((windows == small).all(axis=(2, 3)))
        assert canvas.shape == (12, 12)
        assert len(found) >= 1
        assert canvas.sum() == small.sum()  # nothing but the digit
        if len(found) == 1:
            places.add(tuple(found[0]))
    assert len(places) == 25


def test_places_are_spread_evenly_and_independent_of_the_label() -> None:
    rows = open_digits("", Faults()).rows
    column_sums = np.stack([row.image()[0].numpy().sum(0) for row in rows])
    centres = (column_sums * np.arange(12)).sum(1) / column_sums.sum(1)
    labels = np.array([row.target for row in rows])
    means = [centres[labels == digit].mean() for digit in range(10)]
    assert np.std(centres) > 1.2
    assert np.ptp(means) < 1.0


def test_splits_are_stratified_with_a_quarter_for_test(digits: ImageData) -> None:
    assert [len(s) for s in digits.splits] == [1213, 135, 449]
    whole = torch.cat([s.labels for s in digits.splits]).bincount() / 1797
    for split in digits.splits:
        assert (split.labels.bincount() / len(split) - whole).abs().max() < 1 / len(split)
        assert split.images is not None
        assert split.images.dtype == torch.uint8
        assert split.images.shape == (len(split), 1, 12, 12)


def test_mean_and_deviation_are_train_s(digits: ImageData) -> None:
    assert digits.train.images is not None
    values = digits.train.images.double() / 255
    assert digits.mean[0] == pytest.approx(values.mean().item(), abs=1e-12)
    assert digits.std[0] == pytest.approx(values.std(correction=0).item(), abs=1e-9)


def test_the_record_is_json_and_repeats(digits: ImageData) -> None:
    record = digits.record()
    written = json.dumps(to_json(record))
    assert written == json.dumps(to_json(load("digits").record()))
    assert from_json(DataRecord, json.loads(written), where="it") == record
    assert record.sizes == {"train": 1213, "val": 135, "test": 449}
    other = load("digits", split_seed=1).record()
    assert other.index_sha256["test"] == record.index_sha256["test"]
    assert other.index_sha256["val"] != record.index_sha256["val"]
    assert other.fingerprint != record.fingerprint


def test_the_split_is_the_one_published_results_were_made_on(digits: ImageData) -> None:
    # A change here changes every result on digits: it needs a line in the changelog.
    record = digits.record()
    assert {name: digest[:12] for name, digest in record.index_sha256.items()} == {
        "train": "d1dfb0b58845",
        "val": "52406bdcd45c",
        "test": "cbb5299724a8",
    }
    assert record.fingerprint[:12] == "30670a1a7b4e"


def test_images_have_names(digits: ImageData) -> None:
    names = {split.ids(i) for split in digits.splits for i in range(len(split))}
    assert len(names) == 1797
    assert "digits image 0" in names


def test_a_set_prints_in_a_few_lines(digits: ImageData) -> None:
    assert len(repr(digits)) < 12000


def test_another_size_is_resized() -> None:
    data = load("digits", image_size=(24, 16), limit=40)
    assert data.image_size == (24, 16)
    assert data.train.read(0).shape == (1, 24, 16)
