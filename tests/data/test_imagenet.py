# SPDX-License-Identifier: Apache-2.0
"""ImageNet's folders, named by WordNet id, and Kaggle's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import picture

from keymix.data import load
from keymix.errors import UserError

IDS = ("n01440764", "n02012849", "n03126707")
WORDS = (
    "n01440764 tench, Tinca tinca\nn01443537 goldfish\nn02012849 crane\nn03126707 crane, derrick\n"
)


def fill(folder: Path, count: int, first: int = 0, suffix: str = "JPEG") -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        picture(first + i, (40, 30)).save(folder / f"{folder.name}_{first + i}.{suffix}")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    for k, wnid in enumerate(IDS):
        fill(tmp_path / "train" / wnid, 8, 100 * k)
        fill(tmp_path / "val" / wnid, 2, 100 * k + 50)
    return tmp_path


@pytest.fixture
def kaggle(tmp_path: Path) -> Path:
    base = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    for k, wnid in enumerate(IDS):
        fill(base / "train" / wnid, 8, 100 * k)
    fill(base / "test", 2, 900)
    (base / "val").mkdir()
    lines = ["ImageId,PredictionString"]
    for i in range(6):
        name = f"ILSVRC2012_val_{i + 1:08d}"
        picture(500 + i, (40, 30)).save(base / "val" / f"{name}.JPEG")
        lines.append(f"{name},{IDS[i % 3]} 85 1 499 272 {IDS[0]} 1 2 3 4")
    (tmp_path / "LOC_val_solution.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "LOC_synset_mapping.txt").write_text(WORDS)
    return tmp_path


def test_kaggle_s_flat_val_is_answered_from_its_table(kaggle: Path) -> None:
    for spec in (kaggle, kaggle / "ILSVRC" / "Data" / "CLS-LOC"):
        data = load(f"imagenet:{spec}")
        assert data.test.labels.tolist() == [0, 1, 2, 0, 1, 2]
        assert data.test.ids(4).endswith("ILSVRC2012_val_00000005.JPEG")
        assert sum(len(split) for split in data.splits) == 30  # Kaggle's test has no labels


def test_classes_get_their_words_and_keep_apart(kaggle: Path) -> None:
    data = load(f"imagenet:{kaggle}")
    assert data.classes == ("tench", "crane (n02012849)", "crane (n03126707)")


def refusal(spec: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(f"imagenet:{spec}")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_parts_are_reported(plain: Path, kaggle: Path, tmp_path: Path) -> None:
    assert "has no folder train and no val" in refusal(plain / "train")
    (kaggle / "LOC_val_solution.csv").unlink()
    line = refusal(kaggle / "ILSVRC" / "Data" / "CLS-LOC")
    assert "no LOC_val_solution.csv" in line
    assert "there is no" in refusal(tmp_path / "nowhere")


def test_answers_that_train_does_not_have_are_reported(kaggle: Path) -> None:
    file = kaggle / "LOC_val_solution.csv"
    whole = file.read_text()
    file.write_text(whole.replace(f"00000002,{IDS[1]}", "00000002,n09999999"))
    assert "val_00000002.JPEG: it is 'n09999999', which train does not have" in refusal(kaggle)
    file.write_text("".join(line for line in whole.splitlines(True) if "00000003" not in line))
    assert "val_00000003.JPEG: it has no answer" in refusal(kaggle)


def test_of_large_tables_contents_and_headers_are_sampled(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(f"imagenet:{plain}").record()
    monkeypatch.setattr("keymix.data.splits.LARGE", 20)
    monkeypatch.setattr("keymix.data.splits.STATISTICS_SAMPLE", 5)
    data = load(f"imagenet:{plain}")
    record = data.record()
    assert "fixed sample of 2,000" in record.fingerprint_of
    assert "first 64 KiB of the encoded images" in whole.fingerprint_of
    assert record.fingerprint != whole.fingerprint
    assert load(f"imagenet:{plain}").record() == record
    grown = Path(data.train.ids(0))
    grown.write_bytes(grown.read_bytes() + b"x")  # the length of every file still counts
    assert load(f"imagenet:{plain}").record().fingerprint != record.fingerprint
