# SPDX-License-Identifier: Apache-2.0
"""Data specs as typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from each import together
from keymix.data import specs
from keymix.data.specs import built_in, kind_of, look_up, parse
from keymix.errors import UserError


@together
@pytest.mark.parametrize("row", built_in().values(), ids=lambda row: row.name)
def test_every_spec_names_a_function_that_opens_data(row) -> None:
    assert callable(look_up(row.opener))
    assert row.summary


NEW = '''
"""A made-up source."""

import torch

from keymix.data.specs import source

@source(
    "waves",
    argument="[N]",
    summary="waves that "
    "were never seen",
    settings=("stack",),
)
def open_waves(argument, faults):
    ...
'''


def test_a_source_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "sea.py").write_text(NEW, encoding="utf-8")
    (tmp_path / "sources" / "other.py").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr(specs, "__file__", str(tmp_path / "specs.py"))
    (row,) = built_in.__wrapped__().values()
    assert row.usage == "waves[:N]"
    assert row.summary == "waves that were never seen"
    assert (row.opener, row.settings) == ("keymix.data.sources.sea:open_waves", ("stack",))


def test_specs_split_at_the_first_colon() -> None:
    row, argument = parse("folder:C:/images")
    assert (row.name, argument) == ("folder", "C:/images")


@together
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "unknown data 'digit'. Did you mean 'digits' or 'moving_digits'?"),
        ("folder", "Write folder:PATH"),
        ("folder:", "Write folder:PATH"),
        ("digits:8", "Write digits"),
        (
            "zzz:there",
            "unknown data 'zzz'. Choose from cifar10, cifar100, cifar10dvs, coco, csv,",
        ),
        ("cifr10", "Did you mean 'cifar10'"),
        ("cifar10:", "Write cifar10 or cifar10:ROOT"),
        ("hf", "Write hf:OWNER/NAME"),
    ],
)
def test_bad_specs_are_answered_with_the_remedy(spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(spec)
    assert message in str(caught.value)


def test_a_bare_path_is_answered_with_its_kind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"Write folder:{tmp_path}"):
        parse(str(tmp_path))
    (tmp_path / "train-0.parquet").touch()
    with pytest.raises(UserError, match=f"Write parquet:{tmp_path}"):
        parse(str(tmp_path))


def test_an_argument_in_brackets_may_be_left_out() -> None:
    assert parse("cifar10")[1] == ""
    assert parse("cifar10:~/images")[1] == "~/images"
    assert [built_in()[name].usage for name in ("digits", "svhn", "folder")] == [
        "digits",
        "svhn[:ROOT]",
        "folder:PATH",
    ]


@pytest.mark.parametrize(
    ("folders", "kind"),
    [
        (["train/n01440764", "val/n01440764"], "imagenet"),
        (["train/n01440764", "val"], "imagenet"),
        (["ILSVRC/Data"], "imagenet"),
        (["train/n01440764", "train/cat", "val"], "folder"),
        (["train/n01440764"], "folder"),
        (["n01440764"], "folder"),
        (["images", "masks"], "masks"),
        (["train/images", "train/masks", "val/images", "val/masks"], "masks"),
        (["train/images", "test/images", "test/masks"], "masks"),
        (["imagesTr", "labelsTr"], "volumes"),
        (["images/case1", "labels/case1.nii.gz"], "volumes"),
        (["masks", "hats"], "folder"),  # classes of these names
        (["train/masks", "train/hats"], "folder"),
        (["train/case1/case1_day0/scans"], "folder"),
    ],
)
def test_the_kind_of_a_folder_is_recognised(tmp_path: Path, folders: list[str], kind: str) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    assert kind_of(tmp_path) == kind


def test_run_lengths_next_to_cases_are_reported_apart(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    assert kind_of(tmp_path) == "folder"
    (tmp_path / "train" / "case1").mkdir(parents=True)
    assert kind_of(tmp_path) == "uwgi"
    with pytest.raises(UserError, match=f"Write uwgi:{tmp_path}"):
        parse(str(tmp_path))


def test_specs_and_augment_load_without_torch() -> None:
    code = (
        "import sys, keymix.data, keymix.data.specs, keymix.data.augment;"
        "sys.exit(bool({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
