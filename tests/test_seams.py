# SPDX-License-Identifier: Apache-2.0
"""No room names a task, or branches on it or on a kind of input: it asks what these say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import keymix
from seams import counted, kind_sites, task_sites

SRC = Path(keymix.__file__).parent

OF_TASKS = {
    "task.py": 1,  # the task of records that name none
}
"""Where a task is named yet, by file; ``python tests/seams.py`` prints it. None is added."""
OF_KINDS = {
    "compare/plan.py": 2,  # the spiking model's 32 pixels, and frames that are larger
    "train/evaluation.py": 1,
    "train/model.py": 1,
    "train/predict.py": 1,
    "train/validate.py": 1,
}
"""The same of kinds of input, outside the data room."""


def test_rooms_ask_the_task() -> None:
    assert counted(SRC)[0] == OF_TASKS


def test_rooms_ask_the_kind_of_input() -> None:
    assert counted(SRC)[1] == OF_KINDS


@pytest.mark.parametrize(
    "line",
    [
        "if task is SEGMENTATION: ...",
        "x = tasks.CLASSIFICATION.name",
        "x = task == 'segmentation'",
        "def f(task: str = 'classification') -> None: ...",
        "if data.masks is None: ...",
        "x = masks is not None",
        "x = split.scans.groups",
    ],
)
def test_a_branch_on_a_task_is_found(line: str) -> None:
    assert len(list(task_sites(ast.parse(line)))) == 1
    assert not list(kind_sites(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "x = is_events(spec)",
        "x = kind is RECORDING",
        "if data.time_steps is not None: ...",
        "x = record.data.events",
        "x = named('images', events=True)",
    ],
)
def test_a_branch_on_a_kind_of_input_is_found(line: str) -> None:
    assert len(list(kind_sites(ast.parse(line)))) == 1
    assert not list(task_sites(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        '"""Of segmentation."""',
        "def f() -> None:\n    'classification'",
        "from keymix.data.kinds import SEGMENTATION",
        "x = given.time_steps is None",
        "named = [1]",
        "x = 'the task classification'",
    ],
)
def test_prose_and_options_are_no_branches(line: str) -> None:
    tree = ast.parse(line)
    assert not [*task_sites(tree), *kind_sites(tree)]


def test_what_a_task_or_a_model_brings_may_name_it(tmp_path: Path) -> None:
    for name in ("tasks/depth/facts.py", "recipes/depth/mine.py", "models/net.py", "train/loop.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('class A:\n    task: ClassVar[str] = "segmentation"\n', encoding="utf-8")
    assert counted(tmp_path) == ({"train/loop.py": 1}, {})
