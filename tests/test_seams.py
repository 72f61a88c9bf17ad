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
    "cli/compare_result.py": 1,
    "cli/predict.py": 1,
    "cli/scores.py": 1,
    "cli/train.py": 1,
    "compare/data_check.py": 1,
    "compare/gallery.py": 4,
    "compare/gather.py": 3,
    "compare/maps.py": 2,
    "compare/outcome.py": 9,
    "compare/runs.py": 2,
    "compare/words.py": 2,
    "data/check.py": 1,
    "data/dataset.py": 13,
    "data/glance.py": 13,
    "data/loaders.py": 8,
    "data/loading.py": 1,
    "data/record.py": 3,
    "data/specs.py": 4,
    "data/tasks.py": 2,
    "report/html.py": 2,
    "report/views/payload.py": 3,
    "report/views/wording.py": 3,
    "train/damage.py": 1,
    "train/data_config.py": 1,
    "train/engine.py": 1,
    "train/fits.py": 3,
    "train/mask_files.py": 1,
    "train/mask_scoring.py": 11,
    "train/predict_masks.py": 2,
    "train/record.py": 3,
    "train/run_data.py": 1,
    "train/runs.py": 2,
    "train/score_split.py": 1,
    "train/segmentation.py": 2,
    "train/task.py": 1,
}
"""Where a task is named yet, by file; ``python tests/seams.py`` prints it. None is added."""
OF_KINDS = {
    "cli/compare_result.py": 4,
    "cli/eval.py": 2,
    "cli/predict.py": 2,
    "cli/train.py": 4,
    "compare/data_check.py": 3,
    "compare/defaults.py": 2,
    "compare/gather.py": 7,
    "compare/words.py": 2,
    "train/answers.py": 2,
    "train/engine.py": 2,
    "train/fits.py": 4,
    "train/model.py": 3,
    "train/resume.py": 2,
    "train/run_data.py": 5,
    "train/runs.py": 2,
    "train/scoring.py": 1,
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
        "from keymix.data.tasks import SEGMENTATION",
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
