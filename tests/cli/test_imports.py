# SPDX-License-Identifier: Apache-2.0
"""``--import``: a file registers mixers, tasks and data sources, in every process that needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keymix.cli import main

FILE = """\
import torch
from torch import nn
from timm.models import register_model

import keymix
from keymix.mixers.identity import Identity
from keymix.task import Score, Task


class Training:
    def example(self, shape, batch_size):
        return torch.ones(batch_size, *shape)

    def training_pass(self, model, inputs):
        return model(inputs)["number"].sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 1)

    def forward(self, x):
        return {"number": self.fc(x.flatten(1)), "note": None}


def number_net(pretrained=False, **options):
    return Net()


number_net.task = "number"
register_model(number_net)

score = Score(
    key="mae", name="error", short="MAE", label="error", better="less", high=None, unit=""
)
keymix.register_task(
    Task(name="number", does="estimates numbers", holds="images with a number each", unit="jar",
         scores=(score,), training=Training(), answers=object())
)


@keymix.source("jars", argument="PATH", summary="jars of things", task="number")
def jars(argument, faults):
    raise NotImplementedError


keymix.register_mixer("nothing")(type("Nothing", (Identity,), {}))
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "jars_of_things.py"
    path.write_text(FILE, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_what_a_file_registers_is_listed_counted_measured_and_trained(file: str) -> None:
    """In a process of its own, so that nothing stays registered here."""
    code = f"""
from keymix.analysis.memory import Build, cpu_peak_unknown, peak_memory
build = Build(
    kwargs={{"model_name": "number_net"}}, factory="timm:create_model", imports=({file!r},),
    task="number",
)
peak = peak_memory({{"x": build}}, (3, 2, 2), batch_size=2, threads=1)["x"]
assert peak.training_mib is not None or cpu_peak_unknown(), peak.note
from keymix.task import list_tasks
assert "number" not in list_tasks()  # it was the other process that ran the file
from keymix.compare.worker import main
assert main(["out", {file!r}]) == 2  # standard input has no plan
from keymix.data.specs import parse
assert "number" in list_tasks() and parse("jars:there")[0].task == "number"
from keymix.cli import main
print("=" * 9)
assert main(["list", "--import", {file!r}, "--json"]) == 0
assert main(["count", "number_net", "--input-size", "3,2,2", "--import", {file!r}, "--json"]) == 0
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input="{}", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.partition("=" * 9)[2].strip()
    rows, end = json.JSONDecoder().raw_decode(shown)
    assert rows["tasks"][-1] == {
        "name": "number", "summary": "estimates numbers", "scores": ["error"], "unit": "jar",
    }  # fmt: skip
    assert rows["data"][-1]["name"] == "jars:PATH"
    assert "nothing" in {row["name"] for row in rows["mixers"]}
    assert json.loads(shown[end:])["macs"] == 12


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--data", "jars:there"],
        ["eval", "run"],
        ["predict", "run", "a.png"],
        ["data", "check", "jars:there"],
        ["list"],
        ["count", "number_net"],
        ["analyze", "attention", "number_net", "--out", "out"],
        ["analyze", "collapse", "number_net"],
        ["analyze", "complexity"],
        ["analyze", "memory"],
        ["analyze", "spikes", "number_net"],
        ["swap", "run", "--mixer", "ska", "--out", "out"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_files_are_run_before_anything_names_what_they_register(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken_file.py"
    broken.write_text("raise RuntimeError('it was run')", encoding="utf-8")
    assert main([*words, "--import", str(broken)]) == 2
    assert "it was run" in capsys.readouterr().err
