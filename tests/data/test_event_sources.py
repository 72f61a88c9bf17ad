# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_files import (
    CLASSES,
    aedat2,
    aedat3,
    random_events,
    write_cifar10dvs,
    write_dvs128,
    write_folder,
    write_npz,
)

from keymix.cli import main
from keymix.data import load
from keymix.data.events import integrate, read_events
from keymix.data.sample import Faults, Row, Source
from keymix.data.specs import Options, parse
from keymix.errors import UserError


def opened(spec: str, **options: Any) -> Source:
    entry, argument = parse(spec)
    return entry.open(argument, Faults(), Options(**options))


def of(source: Source, split: str) -> list[Row]:
    return [row for row in source.rows if row.split == split]


def numbers(rows: list[Row]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in CLASSES}
    for row in rows:
        path = Path(row.id)
        found[path.parent.name].append(int(path.stem.rpartition("_")[2]))
    return found


def refusal(spec: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def thousands(tmp_path: Path) -> Path:
    """All 10,000 names of CIFAR10-DVS, without content."""
    root = tmp_path / "cifar"
    root.mkdir()
    for name in CLASSES:
        (root / name).mkdir()
        for i in range(1000):
            (root / name / f"cifar10_{name}_{i}.aedat").touch()
    return root


def test_first90_is_the_split_of_spikingjelly(thousands: Path) -> None:
    source = opened(f"cifar10dvs:{thousands}", time_steps=1, image_size=(1, 1))
    train, test = numbers(of(source, "train")), numbers(of(source, "test"))
    for name in CLASSES:
        as_text = sorted(range(1000), key=lambda i: f"cifar10_{name}_{i}.npz")
        pos = math.ceil(1000 * 0.9)
        assert train[name] == as_text[:pos]
        assert test[name] == as_text[pos:]
        assert sorted(test[name]) == [*range(91, 100), 909, *range(910, 1000)][:100]


def test_tebn_tests_on_the_first_hundred_of_each_class(thousands: Path) -> None:
    source = opened(f"cifar10dvs:{thousands}", time_steps=1, image_size=(1, 1), event_split="tebn")
    train, test = numbers(of(source, "train")), numbers(of(source, "test"))
    for name in CLASSES:
        assert sorted(test[name]) == list(range(100))
        assert sorted(train[name]) == list(range(100, 1000))


def test_named_splits_are_chosen_and_recorded(tmp_path: Path) -> None:
    root = write_cifar10dvs(tmp_path)
    for name in CLASSES:  # a training split for tebn
        for i in range(100, 104):
            file = root / name / f"cifar10_{name}_{i}.aedat"
            file.write_bytes(aedat2(random_events(9, seed=i)))
    spec = f"cifar10dvs:{root}"
    first, tebn = load(spec), load(spec, event_split="tebn")
    assert (first.record().event_split, tebn.record().event_split) == ("first90", "tebn")
    assert len(first.test) == 10
    assert len(tebn.test) == 100
    assert "unknown data.event_split 'tebm'. Did you mean 'tebn'?" in refusal(
        spec, event_split="tebm"
    )
    assert "140 of the set's 10,000 recordings" in first.record().notes


def test_missing_sets_report_where_to_get_them(tmp_path: Path) -> None:
    text = refusal(f"cifar10dvs:{tmp_path}/absent")
    assert "is not there. Download the ten archives from https://figshare.com" in text
    assert "4724671" in text
    shutil.rmtree(write_cifar10dvs(tmp_path / "c", per_class=1, events=3) / "cat")
    assert "has no folder cat. Download" in refusal(f"cifar10dvs:{tmp_path}/c")
    text = refusal(f"dvs128:{tmp_path}/absent")
    assert "https://ibm.ent.box.com/" in text
    assert "trials_to_train.txt" in text
    assert "there is no" in refusal(f"events:{tmp_path}/absent")


def test_a_damaged_file_is_named_with_its_event(tmp_path: Path) -> None:
    root = write_cifar10dvs(tmp_path)
    file = root / "dog" / "cifar10_dog_4.aedat"
    file.write_bytes(file.read_bytes()[:-3])
    text = refusal(f"cifar10dvs:{root}")
    assert text.startswith(f"{file}: the file ends in mid-event: event 59 has 5 of 8 bytes.")
    data = load(f"cifar10dvs:{root}", skip_corrupt=True)
    assert data.record().left_out_count == 1
    assert data.record().left_out[0].id == str(file)
    assert data.record().sizes == {"train": 80, "val": 9, "test": 10}


def test_cifar10dvs_refuses_names_without_a_number(tmp_path: Path) -> None:
    root = write_cifar10dvs(tmp_path)
    (root / "cat" / "cat.aedat").write_bytes(aedat2(random_events(5)))
    assert "cat.aedat: the name ends in no number" in refusal(f"cifar10dvs:{root}")


def test_a_link_to_nowhere_is_a_recording_that_cannot_be_read(tmp_path: Path) -> None:
    root = write_cifar10dvs(tmp_path)
    link = root / "cat" / "cifar10_cat_50.aedat"
    link.symlink_to(tmp_path / "nowhere")
    assert refusal(f"cifar10dvs:{root}").startswith(f"{link}: cannot be read: No such file")
    assert load(f"cifar10dvs:{root}", skip_corrupt=True).record().left_out_count == 1


def test_gestures_are_cut_out_of_their_recordings(tmp_path: Path) -> None:
    root = write_dvs128(tmp_path)
    source = opened(f"dvs128:{root}", time_steps=4)
    assert [row.target for row in of(source, "train")] == [*range(11), *range(11)]
    assert [row.target for row in of(source, "test")] == [*range(11)]
    for row in source.rows:
        start = (row.target + 1) * 100_000
        events = read_events(row.id.partition(" (")[0]).between(start, start + 50_000)
        assert len(events) > 50
        np.testing.assert_array_equal(row.image(), integrate(events, time_steps=4))


def test_gestures_may_overlap_and_end_before_their_last_microsecond(tmp_path: Path) -> None:
    root = write_dvs128(tmp_path) / "DvsGesture"
    events = [(t, t // 10, 2, 1) for t in (10, 20, 30, 40)]
    (root / "user01_led.aedat").write_bytes(aedat3(events))
    (root / "user01_led_labels.csv").write_text(
        "class,startTime_usec,endTime_usec\n1,10,30\n2,20,41\n"
    )
    rows = opened(f"dvs128:{root}", time_steps=1).rows
    assert [row.image()[0, 1, 2].nonzero().flatten().tolist() for row in (rows[0], rows[1])] == [
        [1, 2],
        [2, 3, 4],
    ]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("a,b\n", "user01_led_labels.csv: the first line"),
        ("\n1,2,x\n", "line 2: "),
        ("\n1,2\n", "line 2: "),
        ("\n1,100000,150000\n12,100000,150000\n", "line 3: "),
        ("\n0,100000,150000\n", "line 2: "),
        ("\n1,150000,100000\n", "line 2: "),
        ("\n1,1,2\n", "there is no event from 1 to 2 us"),
    ],
)
def test_bad_labels_are_named_with_their_line(tmp_path: Path, table: str, expected: str) -> None:
    root = write_dvs128(tmp_path) / "DvsGesture"
    head = "class,startTime_usec,endTime_usec" if table.startswith("\n") else ""
    (root / "user01_led_labels.csv").write_text(head + table)
    line = refusal(f"dvs128:{root}")
    assert expected in line
    assert "user01_led" in line


def test_notes_report_of_people_and_of_recordings_in_no_list(tmp_path: Path) -> None:
    root = write_dvs128(tmp_path) / "DvsGesture"
    shutil.copy(root / "user01_led.aedat", root / "user30_led.aedat")
    people, unlisted = load(f"dvs128:{root}").record().notes
    assert people.startswith("validation is split off from training: the same people are in both")
    assert unlisted == "recordings in neither list, left out: user30_led.aedat"


def test_an_own_folder_is_read_with_and_without_splits(tmp_path: Path) -> None:
    plain = write_folder(tmp_path / "plain", {"fall": 12, "walk": 10})
    data = load(f"events:{plain}")
    assert data.classes == ("fall", "walk")
    assert sum(data.record().sizes.values()) == 22
    for part, count in (("train", 9), ("val", 3), ("test", 4)):
        write_folder(tmp_path / "divided" / part, {"fall": count, "walk": count}, seed=count)
    data = load(f"events:{tmp_path / 'divided'}")
    assert data.record().sizes == {"train": 18, "val": 6, "test": 8}
    assert data.record().sensor_size == (16, 16)


def test_an_own_folder_without_sensor_takes_the_least_that_fits(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(6):
            events = [(0, i, 3, 1), (5, 2, 2 * i, 0)]
            write_npz(tmp_path / name / f"{i}.npz", events, None)
    data = load(f"events:{tmp_path}")
    assert data.image_size == (11, 6)
    assert "the sensor is taken to be 11x6" in data.record().notes[0]
    (kept,) = (tmp_path / ".keymix").glob("sensor-*/sensor.json")
    written = kept.stat().st_mtime_ns
    assert load(f"events:{tmp_path}").record() == data.record()
    assert kept.stat().st_mtime_ns == written
    write_npz(tmp_path / "b" / "7.npz", [(0, 19, 3, 1)], None)
    assert load(f"events:{tmp_path}").image_size == (11, 20)


def test_a_check_says_recordings_and_takes_the_frames_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path / "mine", {"a": 24, "b": 2}, events=12)
    monkeypatch.setattr("keymix.cli.data._SILENCE", 0.0)
    assert main(["data", "check", f"events:{root}", "--time-steps", "16"]) == 0
    said = capsys.readouterr()
    assert "26 of 26 recordings checked" in said.err
    assert "\nrecordings\ttrain 26\n" in said.out
    assert "a has 24 training recordings, b 2" in said.out
    assert "15 of 16 frames are empty; and 21 more" in said.out
    assert "image" not in said.out
    assert main(["data", "check", f"events:{root}", "--time-steps", "1"]) == 0
    assert "frames" not in capsys.readouterr().out
    gap = [(t, 3, 3, 1) for t in (*range(30), 1_000_000)]
    write_npz(root / "a" / "000.npz", gap, (16, 16))
    for unit, expected in (("number", False), ("time", True)):
        options = ("--time-steps", "4", "--frames-by", unit)
        assert main(["data", "check", f"events:{root}", *options]) == 0
        assert ("000.npz: 2 of 4 frames" in capsys.readouterr().out) == expected


def test_moving_digits_are_one_set() -> None:
    few, all_ = opened("moving_digits:120").rows, opened("moving_digits").rows
    assert (len(few), len(all_)) == (120, 1797)
    for i in (0, 7, 119):
        frames = few[i].image()
        assert frames.shape == (10, 2, 32, 32)
        assert 500 < frames.sum() < 20_000
        assert 0.3 < frames[:, 1].sum() / frames.sum() < 0.7
        assert (frames == all_[i].image()).all()
        assert few[i].image.digest() == all_[i].image.digest()  # type: ignore[attr-defined]
    for wrong in ("many", "99", "1798"):
        assert "Give a number from 100 to 1797" in refusal(f"moving_digits:{wrong}")


def test_only_frames_need_events(thousands: Path) -> None:
    source = opened(f"cifar10dvs:{thousands}", time_steps=3, frames_by="time")
    assert len(source.rows) == 10_000
    assert not (thousands / ".keymix").exists()
    facts = source.facts
    assert (facts.time_steps, facts.frames_by, facts.sensor_size) == (3, "time", (128, 128))
    assert facts.event_split == "first90"
