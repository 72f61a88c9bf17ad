# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from event_files import random_events, write_dvs128, write_folder, write_npz

from keymix.data import load
from keymix.data.dataset import ImageData
from keymix.data.events import cache_dir, frame_cache, integrate, read_events
from keymix.data.events.inputs import few_events
from keymix.data.events.recordings import Recordings
from keymix.errors import KeymixWarning, UserError

STEM = "frames-T4-number-16x16"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KEYMIX_CACHE", raising=False)
    return write_folder(tmp_path / "mine", {"a": 12, "b": 12})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many recordings were made into frames."""
    counted: list[int] = []
    counts = frame_cache._counts

    def counting(events: object, settings: frame_cache.Settings) -> object:
        counted.append(1)
        return counts(events, settings)

    monkeypatch.setattr(frame_cache, "_counts", counting)
    return counted


def opened(root: Path, **options: object) -> ImageData:
    return load(f"events:{root}", **{"time_steps": 4, **options})  # type: ignore[arg-type]


def test_frames_are_made_once_and_are_those_of_the_files(root: Path, made: list[int]) -> None:
    first, second = opened(root), opened(root)
    assert len(made) == 24
    assert first.record() == second.record()
    for data in (first, second):
        for split in data.splits:
            assert isinstance(split.table, Recordings)
            for i in range(len(split)):
                counts = integrate(read_events(split.ids(i)), time_steps=4)
                np.testing.assert_array_equal(split.read(i), counts)


def test_each_setting_has_its_own_frames(root: Path, made: list[int]) -> None:
    for options in ({}, {"frames_by": "time"}, {"time_steps": 5}, {"image_size": 8}):
        opened(root, **options)
        opened(root, **options, split_seed=1)
    assert len(made) == 4 * 24
    assert len(list((root / ".keymix").glob("*.npy"))) == 4


def test_changed_data_are_noticed(root: Path, made: list[int]) -> None:
    before = opened(root).record()
    write_npz(root / "a" / "003.npz", random_events(61, seed=99, side=16), (16, 16))
    assert opened(root).record().fingerprint != before.fingerprint
    write_npz(root / "a" / "100.npz", random_events(61, seed=98, side=16), (16, 16))
    assert sum(opened(root).record().sizes.values()) == 25
    assert len(made) == 24 + 24 + 25


def test_another_time_of_change_alone_is_noticed(root: Path, made: list[int]) -> None:
    opened(root)
    file = root / "a" / "003.npz"
    time = file.stat().st_mtime_ns
    os.utime(file, ns=(time, time + 1_000_000))
    opened(root)
    assert len(made) == 48


def test_two_starts_at_once_make_frames_once(root: Path, made: list[int]) -> None:
    opened(root, time_steps=5)  # the sensor is known
    made.clear()
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: opened(root).record(), range(2))
    assert one == two
    assert len(made) == 24


def test_frames_are_mapped_not_read(root: Path) -> None:
    frames = opened(root).train.frames
    assert frames is not None
    assert isinstance(frames.array, np.memmap)


def flip_a_count(root: Path) -> None:
    kept = np.load(root / ".keymix" / f"{STEM}.npy", mmap_mode="r+")
    kept[7, 2, 1, 3, 3] += 1
    kept.flush()


def cut(root: Path) -> None:
    file = root / ".keymix" / f"{STEM}.npy"
    file.write_bytes(file.read_bytes()[:-1])


def grow(root: Path) -> None:
    with (root / ".keymix" / f"{STEM}.npy").open("ab") as file:
        file.write(b"\0")


def spoil_header(root: Path) -> None:
    file = root / ".keymix" / f"{STEM}.npy"
    file.write_bytes(b"\0" * 16 + file.read_bytes()[16:])


def spoil_manifest(root: Path) -> None:
    file = root / ".keymix" / f"{STEM}.json"
    file.write_text(file.read_text()[:-9])


def lose_frames(root: Path) -> None:
    (root / ".keymix" / f"{STEM}.npy").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [flip_a_count, cut, grow, spoil_header, spoil_manifest, lose_frames]
)
def test_damaged_frames_are_rebuilt(
    root: Path, made: list[int], damage: Callable[[Path], None]
) -> None:
    before = opened(root)
    expected = before.train.read(0).clone()
    damage(root)
    with pytest.warns(KeymixWarning, match="are damaged .* and are rebuilt"):
        again = opened(root)
    assert len(made) == 48
    assert again.record() == before.record()
    assert (again.train.read(0) == expected).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(root)


def test_an_unfinished_cache_is_none(root: Path, made: list[int]) -> None:
    opened(root)
    (root / ".keymix" / f"{STEM}.json").unlink()  # as a kill between the two leaves it
    opened(root)
    assert len(made) == 48
    assert not list((root / ".keymix").glob("*.part"))


def test_no_manifest_stands_while_the_array_is_replaced(
    root: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(root)
    (root / ".keymix" / f"{STEM}.npy").unlink()  # so that it is rebuilt, of the same data
    replace, stood = Path.replace, []

    class Killed(BaseException):
        pass

    def half(self: Path, target: Path) -> Path:
        if target.suffix == ".npy":
            stood.append(target.with_suffix(".json").exists())
            target.write_bytes(self.read_bytes()[:-16])  # what a crash may leave of a rename
            raise Killed
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", half)
        with pytest.warns(KeymixWarning, match="rebuilt"), pytest.raises(Killed):
            opened(root)
    assert stood == [False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing vouched for the half: it is no damage
        data = opened(root)
    assert len(made) == 3 * 24
    assert data.record() == opened(root).record()


def test_the_fingerprint_is_of_labels_too(tmp_path: Path) -> None:
    folder = write_dvs128(tmp_path) / "DvsGesture"
    before = load(f"dvs128:{folder}").record()
    labels = folder / "user24_led_labels.csv"  # of the test split: what is split off stays
    head, first, second, *rest = labels.read_text().splitlines()
    swapped = [head, second[0] + first[1:], first[0] + second[1:], *rest]
    labels.write_text("\n".join(swapped) + "\n")
    after = load(f"dvs128:{folder}").record()
    assert after.index_sha256 == before.index_sha256
    assert after.fingerprint != before.fingerprint


def test_what_a_killed_start_left_is_removed(root: Path) -> None:
    (root / ".keymix").mkdir()
    left = [root / ".keymix" / f"{STEM}.{end}" for end in ("4711.part", "json.4711.part")]
    other = root / ".keymix" / "frames-T5-number-16x16.4711.part"  # which may be at work
    for file in (*left, other):
        file.write_bytes(b"half")
    opened(root)
    assert list((root / ".keymix").glob("*.part")) == [other]


def test_other_labels_make_other_frames(tmp_path: Path, made: list[int]) -> None:
    folder = write_dvs128(tmp_path) / "DvsGesture"
    before = load(f"dvs128:{folder}").train.table.read(0)  # type: ignore[attr-defined]
    labels = folder / "user01_led_labels.csv"
    labels.write_text(labels.read_text().replace("1,100000,150000", "1,100000,101000"))
    data = load(f"dvs128:{folder}")
    table, frames = data.train.table, data.train.frames
    assert isinstance(table, Recordings)
    assert frames is not None
    assert len(made) == 2 * 33
    assert len(table.read(0)) < len(before)
    assert frames.tensor(np.array([0])).sum() == len(table.read(0))


def test_a_stop_while_frames_are_made_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(frame_cache, "_digest", stopped)
    with pytest.raises(KeyboardInterrupt):
        opened(root)
    assert [p.name for p in (root / ".keymix").iterdir() if "lock" not in p.name] == ["sensor.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "kind"), [(255, np.uint8), (256, np.uint16), (70_000, np.uint32)]
)
def test_counts_are_exact_however_large(root: Path, count: int, kind: type) -> None:
    before = opened(root, time_steps=1)
    frames = before.train.frames
    assert frames is not None
    same = {i: frames.tensor(np.array([i])).int() for i in range(24)}
    hot = [(k, 3, 3, 1) for k in range(count)]
    write_npz(root / "b" / "005.npz", hot, (16, 16))  # the 18th: what came before is widened
    data = opened(root, time_steps=1)
    frames = data.train.frames
    assert frames is not None
    assert frames.array.dtype == kind
    assert frames.tensor(np.array([17])).sum() == frames.tensor(np.array([17])).max() == count
    for i in set(range(24)) - {17}:
        assert (frames.tensor(np.array([i])).int() == same[i]).all()
        assert frames.digests[i] == before.train.frames.digests[i]  # type: ignore[union-attr]
    assert opened(root, time_steps=1).record() == data.record()


def test_frames_travel_to_workers_by_their_path(root: Path) -> None:
    frames = opened(root).train.frames
    assert frames is not None
    sent = pickle.dumps(frames)
    assert len(sent) < 4000
    assert (pickle.loads(sent).tensor(np.array([3])) == frames.tensor(np.array([3]))).all()


def test_the_cache_goes_where_it_is_asked_to(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYMIX_CACHE", str(tmp_path / "kept"))
    opened(root)
    assert not (root / ".keymix").exists()
    (folder,) = (tmp_path / "kept").iterdir()
    assert folder.name.startswith("mine-")
    assert (folder / f"{STEM}.npy").exists()


def test_a_folder_that_cannot_be_written_leaves_its_frames_to_the_users_cache(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_dir.place_for(root).folder.parent == tmp_path / "user" / "keymix"


def test_frames_next_to_data_that_cannot_be_written_are_used(
    root: Path, made: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(root)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert opened(root).record() == before.record()
    assert len(made) == 24
    assert not (tmp_path / "user").exists()
    opened(root, time_steps=5)  # nobody made these
    assert len(made) == 48
    assert len(list((tmp_path / "user").rglob("frames-T5*.npy"))) == 1


def test_no_room_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})()
    monkeypatch.setattr(cache_dir.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"more than is free. Set KEYMIX_CACHE to a folder"):
        opened(root)
    file = root.parent / "file"
    file.touch()
    monkeypatch.setenv("KEYMIX_CACHE", str(file))
    with pytest.raises(UserError, match=r"cannot be kept in .*Set KEYMIX_CACHE"):
        opened(root)


def test_what_is_wrong_with_a_recording_is_remembered(root: Path, made: list[int]) -> None:
    write_npz(root / "b" / "005.npz", [(5, 1, 1, 1), (4, 1, 1, 1)], (16, 16))
    lines = []
    for _ in range(2):
        with pytest.raises(UserError) as error:
            opened(root)
        lines.append(str(error.value))
    assert len(made) == 23
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"{root}/b/005.npz: event 1 is at 4 us, before event 0 at 5 us.")
    data = opened(root, skip_corrupt=True)
    assert len(made) == 23
    assert data.record().left_out_count == 1
    assert json.loads((root / ".keymix" / f"{STEM}.json").read_text())["broken"].keys() == {"17"}


@pytest.mark.slow
def test_few_events_are_reported_by_a_warm_cache_too(root: Path, made: list[int]) -> None:
    for name, count in (("a/003", 3), ("b/005", 1), ("b/006", 4)):
        write_npz(root / f"{name}.npz", random_events(count, seed=count, side=16))
    for frames_by in ("number", "time"):
        cold, warm = (opened(root, frames_by=frames_by) for _ in range(2))
        faults = few_events(cold)
        assert re.fullmatch(
            rf"2 of 24 recordings have fewer events than T = 4 \(first: {root}/(a/003|b/005)\.npz"
            r"\): some of their frames are empty; take fewer time steps",
            faults,
        )
        assert few_events(warm) == faults
    assert len(made) == 2 * 24
    assert few_events(opened(root, time_steps=2)).startswith("1 of 24 recordings has fewer events")
    assert not few_events(opened(root, time_steps=1))
    loaded = load("moving_digits:100", time_steps=2000)  # kept in memory alone
    assert re.match(r"\d+ of 100 recordings have fewer events than T = 2000", few_events(loaded))
