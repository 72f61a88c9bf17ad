# SPDX-License-Identifier: Apache-2.0
"""What is said of recordings: they are no images, and no path or remedy stands there twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from event_files import random_events, write_dvs128, write_folder, write_npz

from keymix.cli import main
from keymix.data import load
from keymix.data.check import check
from keymix.data.events import read_events
from keymix.data.record import LeftOutImage
from keymix.errors import UserError


def _empty(file: Path, whole: bytes) -> None:
    del whole
    file.write_bytes(b"")


def _cut_off(file: Path, whole: bytes) -> None:
    file.write_bytes(whole[: len(whole) // 2])


def _bit(file: Path, whole: bytes) -> None:
    file.write_bytes(whole[:200] + bytes([whole[200] ^ 255]) + whole[201:])


def _text(file: Path, whole: bytes) -> None:
    del whole
    file.write_text("t x y p")


def _objects(file: Path, whole: bytes) -> None:
    del whole
    np.savez(file, **dict.fromkeys("txyp", np.array([None, 3], dtype=object)))


def _array(file: Path, whole: bytes) -> None:
    del whole
    with file.open("wb") as stream:
        np.save(stream, np.arange(3))


def _absent(file: Path, whole: bytes) -> None:
    del whole
    file.unlink()
    file.symlink_to("nowhere")


_DAMAGED = "cannot be read: it is cut off or damaged. Replace or remove it."
_OTHER = "cannot be read: it is no .npz file of plain numbers. Replace or remove it."
HOW = {
    "empty": (_empty, "cannot be read: the file is empty. Replace or remove it."),
    "cut off": (_cut_off, _DAMAGED),
    "a bit": (_bit, _DAMAGED),
    "text": (_text, _OTHER),
    "objects": (_objects, _OTHER),
    "array": (_array, "is no .npz file but one array. Save it with numpy.savez."),
    "absent": (_absent, "cannot be read: No such file or directory. Replace or remove it."),
}


def spoilt(file: Path, how: str) -> str:
    """Spoil a recording, and say what is expected of it."""
    spoil, expected = HOW[how]
    spoil(file, file.read_bytes())
    return expected


@pytest.mark.parametrize("how", HOW)
def test_a_file_that_is_no_recording_is_one_line_with_its_name_once(
    how: str, tmp_path: Path
) -> None:
    file = write_npz(tmp_path / "a.npz", random_events(40, side=16))
    text = spoilt(file, how)
    with pytest.raises(UserError) as error:
        read_events(file)
    assert str(error.value) == f"{file}: {text}"


@pytest.mark.parametrize("how", ["empty", "text", "array"])
def test_training_names_the_file_once_and_one_choice(how: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "mine", {"a": 12, "b": 12})
    text = spoilt(root / "a" / "003.npz", how)
    with pytest.raises(UserError) as error:
        load(f"events:{root}", time_steps=4)
    assert str(error.value) == (
        f"{root}/a/003.npz: {text} Or leave such recordings out with --data.skip_corrupt true; "
        "`keymix data check` names them all."
    )
    record = load(f"events:{root}", time_steps=4, skip_corrupt=True).record()
    assert record.left_out == (LeftOutImage(id=f"{root}/a/003.npz", reason=text.rstrip(".")),)
    assert any(note.startswith("broken recordings left out: 1 of") for note in record.notes)
    (broken,) = (f for f in check(f"events:{root}").findings if f.what == "broken recordings")
    assert list(broken.where) == [f"{root}/a/003.npz: {text.rstrip('.')}"]


def test_the_file_of_many_recordings_is_named_once(tmp_path: Path) -> None:
    root = write_dvs128(tmp_path) / "DvsGesture"
    file = root / "user01_led.aedat"
    file.write_bytes(file.read_bytes()[:-5])
    (broken,) = (f for f in check(f"dvs128:{root}").findings if f.what == "broken recordings")
    assert broken.where[0].startswith(f"{file} (user01_led_labels.csv line 2): the file ends in")
    assert all(line.count(str(root)) == 1 for line in broken.where)


@pytest.mark.parametrize("kind", ["cifar10dvs", "dvs128"])
def test_a_set_that_is_not_there_is_reported_with_its_place_once(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load(f"{kind}:{tmp_path}/absent")
    assert str(error.value).count(f"{tmp_path}/absent") == 1 + (kind == "dvs128")


def test_refusals_of_sets_speak_of_recordings(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "mine", {"a": 1, "b": 1})
    with pytest.raises(UserError, match=r"too few recordings per class: .* Add recordings\."):
        load(f"events:{root}", time_steps=4)
    with pytest.raises(UserError, match="is below two recordings per class"):
        load("moving_digits:100", limit=12, time_steps=4)


def test_a_check_says_recordings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path / "images", {"a": 24, "b": 2})
    monkeypatch.setattr("keymix.cli.data._SILENCE", 0.0)
    assert main(["data", "check", f"events:{root}"]) == 0
    said = capsys.readouterr()
    assert "26 of 26 recordings checked" in said.err
    assert "\nrecordings\ttrain 26\n" in said.out
    assert "a has 24 training recordings, b 2" in said.out
    own = said.out.replace(str(tmp_path), "").replace("/images", "")
    assert "image" not in own
    (root / "a" / "005.npz").write_bytes(b"")
    assert main(["data", "check", f"events:{root}"]) == 1
    assert f"{root}/a/005.npz: cannot be read: the file is empty" in capsys.readouterr().out


def test_recordings_that_do_not_fill_their_frames_are_counted_and_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "mine", {"a": 20, "b": 20})
    assert not [f for f in check(f"events:{root}").findings if "frames" in f.what]
    for i in range(4):
        write_npz(root / "a" / f"{i:03d}.npz", random_events(9 - i, seed=i, side=16))
    write_npz(root / "b" / "007.npz", random_events(1, seed=7, side=16))
    late = [(t, 3, 3, 1) for t in (*range(30), 1_000_000)]  # 8 stretches of 10 are empty
    write_npz(root / "b" / "011.npz", late)
    (shown,) = (f for f in check(f"events:{root}").findings if "frames" in f.what)
    assert (shown.level, shown.count) == ("warning", 6)
    assert f"{root}/b/007.npz: 1 event for T = 10" in shown.where
    assert f"{root}/b/011.npz: 8 of 10 frames, by time" in shown.where
    counts = load(f"events:{root}", time_steps=10, frames_by="time").train.frames
    assert counts is not None
    at = 20 + 11
    assert int((counts.array[at].sum((1, 2, 3)) == 0).sum()) == 8


def test_the_frames_of_a_check_are_those_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "mine", {"a": 12, "b": 12}, events=12)
    words = ["data", "check", f"events:{root}", "--time-steps"]
    assert main([*words, "16"]) == 0
    out = capsys.readouterr().out
    assert "12 events for T = 16" in out
    assert "and 21 more" in out
    assert main([*words, "1"]) == 0
    assert "for T = " not in capsys.readouterr().out
    assert main([*words, "0"]) == 2
    assert "--time-steps 0: give 1 or more" in capsys.readouterr().err
    assert main(["data", "check", "digits", "--time-steps", "4"]) == 2
    assert "data.time_steps = 4: data digits holds images" in capsys.readouterr().err
