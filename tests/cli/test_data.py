# SPDX-License-Identifier: Apache-2.0
"""``keymix data check``: verdict first, clean lines in a pipe, an exit code for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from keymix.cli import main
from made_masks import write_uwgi


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for k, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for i in range(12):
            image = Image.new("RGB", (20, 20), (100 * k, 10 * i, 50))
            image.putpixel((3, 3), (255, 255, 255))
            image.save(root / name / f"{i:02d}.png")
    return root


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["data", *words])
    text = capsys.readouterr()
    return code, text.out, text.err


def test_the_verdict_stands_first(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", str(photos))
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"verdict\tfolder:{photos}: fit for training"
    assert ["classes", "2; smallest cat (12), largest cat (12)"] in [
        line.split("\t") for line in out.splitlines()
    ]
    assert "\x1b" not in out


def test_bad_data_ends_with_one_and_lines_for_scripts(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(7):
        (photos / "cat" / f"{i:02d}.png").write_bytes(b"x")
    code, out, _ = run(capsys, "check", f"folder:{photos}")
    assert code == 1
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0][1].endswith("stops training: images, labels or classes that cannot be used (7)")
    (finding,) = [line for line in lines if line[0] == "stops"]
    assert finding[2].endswith("04.png: not an image; and 2 more")
    assert "--data.skip_corrupt true" in finding[3]
    assert finding[4] == "7"


def test_json_and_out_report_everything(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(5):
        (photos / "cat" / f"{i:02d}.png").write_bytes(b"x")
    file = tmp_path / "report.json"
    code, out, _ = run(capsys, "check", str(photos), "--json", "--out", str(file))
    assert code == 1
    stored = json.loads(out)
    assert stored == json.loads(file.read_text())
    assert len(stored["findings"][0]["where"]) == 5
    assert run(capsys, "check", str(photos), "--out", str(file), "--overwrite")[0] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek"], "unknown verb of keymix data 'chek'. Did you mean 'check'?"),
        (["check"], "the following arguments are required: DATA"),
        (["check", "photo"], "unknown data 'photo'."),
        (["check", ""], "data.spec = ''"),
        (["check", "digits", "--jsn"], "Did you mean '--json'"),
        (["check", "folder:nowhere"], "there is no 'nowhere'. Check the path."),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "check" in run(capsys, "--help")[1]
    with pytest.raises(SystemExit):
        main(["data", "check", "--help"])
    assert "keymix data check photos" in capsys.readouterr().out


def test_long_work_is_reported_where_there_is_no_terminal(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keymix.cli.data._SILENCE", 0.0)
    _, _, err = run(capsys, "check", str(photos))
    assert "24 of 24 images checked" in err


def test_names_with_control_characters_drive_no_terminal(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "br\nok\x1b[2Jen.png"
    (photos / "cat" / name).write_bytes(b"x")
    assert main(["data", "check", str(photos)]) == 1
    text = capsys.readouterr().out
    assert r"br\nok\x1b[2Jen.png: not an image" in text
    assert "\x1b" not in text
    assert main(["train", "digits_vit", "--data", f"folder:{photos}", "--out", "x"]) == 2
    text = capsys.readouterr().err
    assert r"br\nok\x1b[2Jen.png" in text
    assert len(text.splitlines()) == 1


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    return write_uwgi(tmp_path / "uw", cases=8, slices=3)


def test_masks_are_reported_class_by_class(scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", str(scans))
    assert code == 0
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == ["verdict", f"uwgi:{scans}: fit for training, with 2 warnings"]
    assert ["masks", "exclusive; 8 without any class"] in lines
    (cases,) = [line[1] for line in lines if line[0] == "cases"]
    assert cases == "train 6, val 1, test 1"
    classes = [line[1] for line in lines if line[0] == "class"]
    assert [text.partition(":")[0] for text in classes] == [
        "background",
        "large_bowel",
        "small_bowel",
        "stomach",
    ]
    assert classes[-1].endswith("of pixels, in images of train 12, val 2, test 2")
    assert {line[1] for line in lines if line[0] == "warning"} == {
        "odd images",
        "classes or cases with too few images",
    }
