# SPDX-License-Identifier: Apache-2.0
"""``keymix list``: true to the registries, found by pattern, and at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keymix.cli import index, main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["list", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_index_is_what_the_registries_say() -> None:
    assert index.PATH.read_text(encoding="utf-8") == index.text(), (
        "the index is out of date; write it with `python -m keymix.cli.index`"
    )


def test_mixers_read_off_their_files_are_those_of_the_registry() -> None:
    assert index.read()["mixers"] == index._mixers(own=True)


def test_a_new_file_of_a_mixer_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in index.MIXERS.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text("utf-8"), encoding="utf-8")
    (tmp_path / "spiking_own.py").write_text(
        '"""Spikes of its own."""\n\n@register_mixer("own", aliases=("o",))\n'
        "class Own(SpikingMixer):\n    pass\n"
    )
    (tmp_path / "zz.py").write_text("class Own:\n    pass\n")  # the same name in another file
    monkeypatch.setattr(index, "MIXERS", tmp_path)
    assert "own\to\tspiking\tSpikes of its own." in run(capsys, "mixers").splitlines()


@pytest.mark.parametrize("kind", ["models", "mixers", "recipes", "data", "tasks"])
def test_each_kind_lists_every_entry(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [row["name"] for row in index.read()[kind]]
    assert len(wanted) >= 2
    listed = [line.split("\t")[0] for line in run(capsys, kind).splitlines()[1:]]
    assert (sorted(listed) if kind == "mixers" else listed) == wanted


def test_without_a_kind_everything_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split("\t") for line in run(capsys).splitlines()]
    assert {line[0] for line in lines} == {"models", "mixers", "recipes", "data", "tasks"}
    assert ["mixers", "static_key", "ska"] in [line[:3] for line in lines]


def test_patterns_match_names_and_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    names = [line.split("\t")[0] for line in run(capsys, "models", "*ska*").splitlines()[1:]]
    assert "cska_vit_small_p4_32" in names
    assert all("ska" in name for name in names)
    assert run(capsys, "mixers", "mhsa").splitlines()[1].startswith("softmax\t")
    kinds = {line.split("\t")[0] for line in run(capsys, "*ska*").splitlines()}
    assert kinds == {"models", "mixers", "recipes"}


def test_mixers_are_grouped_by_family(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split("\t") for line in run(capsys, "mixers").splitlines()[1:]]
    assert [row[2] for row in rows] == sorted(row[2] for row in rows)
    assert [row[0] for row in rows if row[2] == "spiking"] == [
        "qk_channel",
        "qk_token",
        "spike_driven",
        "spiking_self",
    ]
    assert [row[0] for row in rows if row[2] == "kernels"] == ["efficient", "linear", "performer"]


def test_json_is_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "mixers", "softmax", "--json"))
    assert [(r["name"], r["aliases"], r["family"], r["domain"]) for r in rows] == [
        ("softmax", ["mhsa"], "softmax", "dense")
    ]
    assert set(json.loads(run(capsys, "--json"))) == {
        "models",
        "mixers",
        "recipes",
        "data",
        "tasks",
    }


def test_data_sets_report_how_to_write_them_and_whether_they_download(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {line.split("\t")[0]: line.split("\t") for line in run(capsys, "data").splitlines()}
    assert rows["data"] == ["data", "comes from", "what it is"]
    assert rows["cifar10[:ROOT]"][1] == rows["hf:OWNER/NAME"][1] == "a download"
    assert rows["digits"][1] == rows["imagenet:PATH"][1] == "this machine"
    assert run(capsys, "data", "svhn").splitlines()[1].startswith("svhn[:ROOT]\t")


def test_list_answers_at_once() -> None:
    """Python itself says what it loads: PyTorch's import alone takes longer than a second."""
    command = [sys.executable, "-X", "importtime", "-m", "keymix", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "keymix.cli" in loaded
    assert not loaded & {"torch", "timm", "numpy", "yaml"}
    assert "static_key" in done.stdout
