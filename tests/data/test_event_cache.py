# SPDX-License-Identifier: Apache-2.0
"""Frames are made once, are those of the files, and are made again where data differ."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from event_files import random_events, write_dvs128, write_folder, write_npz

from keymix.data import load
from keymix.data.dataset import ImageData
from keymix.data.events import cache, integrate, read_events
from keymix.data.events.cache import Frames, Recorded
from keymix.data.sample import Faults, Row, digest_of
from keymix.data.specs import Options, parse
from keymix.errors import UserError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KEYMIX_CACHE", raising=False)
    return write_folder(tmp_path / "mine", {"a": 12, "b": 12})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many recordings were made into frames."""
    counted: list[int] = []

    def counting(events: object, **settings: object) -> object:
        counted.append(1)
        return integrate(events, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "integrate", counting)
    return counted


def opened(root: Path, **options: object) -> ImageData:
    return load(f"events:{root}", **{"time_steps": 4, **options})  # type: ignore[arg-type]


def rows(root: Path, **options: int) -> list[Row]:
    """All rows of a folder, in its order."""
    entry, argument = parse(f"events:{root}")
    return [*entry.open(argument, Faults(), Options(**{"time_steps": 4, **options})).rows]  # type: ignore[arg-type]


def frames(row: Row) -> Frames:
    assert isinstance(row.image, Recorded)
    return row.image.frames


def kept(root: Path, name: str = "frames-*") -> list[Path]:
    return sorted((root / ".keymix").glob(name))


def test_frames_are_made_once_and_are_those_of_the_files(root: Path, made: list[int]) -> None:
    first, second = opened(root), opened(root)
    assert len(made) == 24
    assert first.record() == second.record()
    assert isinstance(frames(second.train.rows[0]).array.base, np.memmap)
    for data in (first, second):
        for split in data.splits:
            for i in range(len(split)):
                counts = integrate(read_events(split.ids(i)), time_steps=4)
                np.testing.assert_array_equal(split.read(i), counts)
    assert len(kept(root, "*")) == len(kept(root)) == 1


def test_each_setting_has_its_own_frames(root: Path, made: list[int]) -> None:
    for options in ({}, {"frames_by": "time"}, {"time_steps": 5}, {"image_size": 8}):
        opened(root, **options)
        opened(root, **options, split_seed=1)
    assert len(made) == 4 * 24
    assert len(kept(root)) == 4


def test_changed_data_are_noticed_and_replace_what_was_kept(root: Path, made: list[int]) -> None:
    before = opened(root).record()
    file = root / "a" / "003.npz"
    time = file.stat().st_mtime_ns
    os.utime(file, ns=(time, time + 1_000_000))
    assert opened(root).record().fingerprint == before.fingerprint
    write_npz(file, random_events(61, seed=99, side=16), (16, 16))
    assert opened(root).record().fingerprint != before.fingerprint
    write_npz(root / "a" / "100.npz", random_events(61, seed=98, side=16), (16, 16))
    assert sum(opened(root).record().sizes.values()) == 25
    assert len(made) == 24 + 24 + 24 + 25
    assert len(kept(root, "*")) == len(kept(root)) == 1


@pytest.mark.parametrize("name", ["frames.npy", "recordings.json"])
def test_what_cannot_be_read_is_named(root: Path, name: str) -> None:
    opened(root)
    file = kept(root)[0] / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(UserError, match=re.escape(str(file.parent))):
        opened(root).train.read(0)


def test_a_stop_while_frames_are_made_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:  # frames are written
        assert [*kept(root, ".part-*")[0].rglob("frames.npy")]
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.json, "dumps", stopped)
    with pytest.raises(KeyboardInterrupt):
        opened(root)
    assert not kept(root, "*")


def test_frames_and_fingerprint_are_of_labels_too(tmp_path: Path, made: list[int]) -> None:
    folder = write_dvs128(tmp_path) / "DvsGesture"
    before = load(f"dvs128:{folder}").record()
    labels = folder / "user01_led_labels.csv"
    labels.write_text(labels.read_text().replace("1,100000,150000", "1,100000,101000"))
    data = load(f"dvs128:{folder}")
    assert len(made) == 2 * 33
    cut = read_events(folder / "user01_led.aedat").between(100_000, 101_000)
    assert data.train.ids(0).endswith("user01_led.aedat (user01_led_labels.csv line 2)")
    assert data.train.read(0).sum() == len(cut) > 5
    tests = folder / "user24_led_labels.csv"  # of the test split: what is split off stays
    head, first, second, *rest = tests.read_text().splitlines()
    tests.write_text("\n".join([head, second[0] + first[1:], first[0] + second[1:], *rest]) + "\n")
    after = load(f"dvs128:{folder}").record()
    assert after.index_sha256 == before.index_sha256
    assert after.fingerprint != data.record().fingerprint != before.fingerprint


@pytest.mark.parametrize(
    ("count", "kind"), [(255, np.uint8), (256, np.uint16), (70_000, np.uint32)]
)
def test_counts_are_exact_however_large(root: Path, count: int, kind: type) -> None:
    before = rows(root, time_steps=1)
    hot = [(k, 3, 3, 1) for k in range(count)]
    same = [(row.image().int(), digest_of(row.image)) for row in before]
    write_npz(root / "b" / "005.npz", hot, (16, 16))  # the 18th: all is written again, wider
    after = rows(root, time_steps=1)
    assert frames(after[0]).array.dtype == kind
    assert after[0].image().dtype == (torch.uint8 if kind is np.uint8 else torch.int32)
    assert after[17].image().sum() == after[17].image().max() == count
    for i in set(range(24)) - {17}:
        assert (after[i].image().int() == same[i][0]).all()
        assert digest_of(after[i].image) == same[i][1]
    assert frames(rows(root, time_steps=1)[0]).known == frames(after[0]).known


def test_frames_travel_to_workers_by_their_path(root: Path) -> None:
    found = rows(root)
    found[3].image()
    sent = pickle.dumps(found)
    assert len(sent) < sum(row.image().nbytes for row in found) / 4
    assert (pickle.loads(sent)[3].image() == found[3].image()).all()
    entry, argument = parse("moving_digits:100")
    kept = [*entry.open(argument, Faults()).rows]  # in memory alone
    assert (pickle.loads(pickle.dumps(kept))[3].image() == kept[3].image()).all()
