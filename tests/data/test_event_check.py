# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from event_files import (
    aedat3,
    random_events,
    write_cifar10dvs,
    write_dvs128,
    write_folder,
    write_npz,
)

from keymix.data.check import check
from keymix.errors import UserError


def found(report: object) -> dict[str, int]:
    return {f.what: f.count for f in report.findings}  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", ["events:{}", "{}"])
def test_an_own_folder_is_checked(tmp_path: Path, spec: str) -> None:
    root = write_folder(tmp_path / "mine", {"a": 20, "b": 20})
    report = check(spec.format(root))
    assert report.spec == f"events:{root}"
    assert report.fit
    assert report.facts["sizes"]["common"] == {"width": 16, "height": 16, "images": 40}
    shutil.copy(root / "a" / "003.npz", root / "b" / "099.npz")
    write_npz(root / "b" / "005.npz", [(0, 16, 0, 1)])
    (root / "b" / "notes.txt").touch()
    done: list[tuple[int, int]] = []
    report = check(spec.format(root), progress=lambda *some: done.append(some))
    faults = found(report)
    assert faults["broken recordings"] == 1
    assert faults["recordings with more than one label"] == 1
    assert faults["files that are no recordings by their name"] == 1
    assert done[-1] == (41, 41)
    (broken,) = (f for f in report.findings if f.what == "broken recordings")
    assert broken.where[0].startswith(f"{root}/b/005.npz: event 0 at x=16, y=0 is outside")


def test_published_sets_are_checked(tmp_path: Path) -> None:
    assert check(f"cifar10dvs:{write_cifar10dvs(tmp_path / 'c')}").fit
    root = write_dvs128(tmp_path / "d") / "DvsGesture"
    assert check(f"dvs128:{root}").fit
    (root / "user01_led.aedat").write_bytes(aedat3(random_events(50))[:-5])
    (root / "user02_led_labels.csv").unlink()
    faults = found(check(f"dvs128:{root}"))
    assert faults["broken recordings"] == 11
    assert faults["recordings without labels"] == 1
    with pytest.raises(UserError, match="Download DvsGesture"):
        check(f"dvs128:{tmp_path}/absent")
