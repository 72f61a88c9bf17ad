# SPDX-License-Identifier: Apache-2.0
"""Readers, frames and splits against SpikingJelly's, on files written byte by byte."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from event_files import CLASSES, aedat2, aedat3, columns, random_events

from keymix.data.events import integrate, make_events, read_events
from keymix.data.sample import Faults
from keymix.data.specs import Options, parse


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """SpikingJelly's data sets; they import torchaudio, which may be of another CUDA than torch."""
    pytest.importorskip("spikingjelly")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchaudio", ModuleType("torchaudio"))
        import spikingjelly.datasets
        from spikingjelly.datasets import cifar10_dvs, utils  # noqa: F401

        return spikingjelly.datasets


def agree(ours: Any, other: dict[str, Any]) -> None:
    assert len(ours) == len(other["t"]) > 0
    for field in "txyp":
        np.testing.assert_array_equal(ours[field], np.asarray(other[field], dtype=np.int64))


def test_aedat2_is_read_as_theirs_reads_it(theirs: Any, tmp_path: Path) -> None:
    path = tmp_path / "cifar10_cat_3.aedat"
    path.write_bytes(aedat2(random_events(800, seed=4)))
    agree(read_events(path), theirs.cifar10_dvs._load_origin_data(path))


def test_aedat3_is_read_as_theirs_reads_it(theirs: Any, tmp_path: Path) -> None:
    path = tmp_path / "user01_led.aedat"
    path.write_bytes(aedat3(random_events(800, seed=5)))
    agree(read_events(path), theirs.utils.load_aedat_v3(path))


@pytest.mark.parametrize("by", ["number", "time"])
@pytest.mark.parametrize("T", [1, 4, 10, 16])
def test_frames_are_theirs(theirs: Any, by: str, T: int) -> None:
    fields = columns(random_events(997, seed=T))
    events = make_events("a", **fields, sensor=(128, 128))
    other = theirs.utils.integrate_events_by_fixed_frames_number(fields, by, T, 128, 128)
    np.testing.assert_array_equal(integrate(events, time_steps=T, frames_by=by), other)


def test_first90_is_their_split_of_a_sorted_folder(theirs: Any, tmp_path: Path) -> None:
    for k, name in enumerate(CLASSES):
        (tmp_path / name).mkdir()
        for i in range(7 + k):
            (tmp_path / name / f"cifar10_{name}_{i}.aedat").touch()
    entry, argument = parse(f"cifar10dvs:{tmp_path}")
    options = Options(time_steps=1, image_size=(1, 1))
    rows = [*entry.open(argument, Faults(), options).rows]
    first, rest = theirs.utils.split_to_train_test_set(
        0.9, [(None, row.target) for row in rows], 10
    )
    for split, expected in (("train", first), ("test", rest)):
        assert [i for i, row in enumerate(rows) if row.split == split] == expected.indices
