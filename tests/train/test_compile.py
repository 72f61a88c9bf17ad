# SPDX-License-Identifier: Apache-2.0
"""Training through torch.compile: the same weights by name, one compilation, exact resumes.

Most tests take a backend that runs the graph as it was captured, which is exact and quick.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import EVERYTHING
from test_resume import during, traces

from keymix.compare import folder
from keymix.compare.budget import Trial, timed
from keymix.compare.models import choose_mixers, make_plan
from keymix.compare.plan import named_recipe
from keymix.compare.question import Plan, Question
from keymix.errors import Interrupted, KeymixWarning, UserError
from keymix.train import task as train_task
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.model import load_data
from keymix.train.recipe import Recipe, replace_path
from keymix.train.runs import load_run

pytestmark = pytest.mark.slow

Vary = Callable[[dict[str, Any]], Recipe]
ALL = {key: value for key, value in EVERYTHING.items() if key != "loss.similarity"}


def compiled(recipe: Recipe) -> Recipe:
    return replace_path(recipe, {"compile": True})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, shapes_checked: bool) -> Iterator[list[int]]:
    """Images of each graph that was captured; a second graph of one piece of code is an error."""
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    captured: list[int] = []

    def capture(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        captured.append(inputs[0].shape[0] if inputs[0].ndim == 4 else inputs[-1].shape[0])
        return graph.forward

    monkeypatch.setattr(train_task, "_BACKEND", capture)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        yield captured


@pytest.mark.parametrize("fields", [ALL, {"precision": "bf16"}])
def test_a_compiled_run_is_the_same_run(
    vary: Vary, tmp_path: Path, graphs: list[int], fields: dict[str, Any]
) -> None:
    recipe = vary(fields)
    train(recipe, tmp_path / "plain")
    assert not graphs
    run = train(compiled(recipe), tmp_path / "compiled")
    assert len(graphs) == 1
    plain = train(recipe, tmp_path / "plain")
    for which in ("last", "best"):
        mine, other = run.weights(which)[0], plain.weights(which)[0]
        assert [*mine] == [*other]
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert traces(run.folder)[2] == traces(plain.folder)[2]
    states = [
        torch.load(checkpoints(r.folder)[0].path, weights_only=True)["model"] for r in (run, plain)
    ]
    assert [*states[0]] == [*states[1]]


def test_a_short_last_batch_is_not_compiled(vary: Vary, tmp_path: Path, graphs: list[int]) -> None:
    recipe = vary({"data.batch_size": 30})  # 72 images: 30, 30, 12
    train(recipe, tmp_path / "plain")
    train(compiled(recipe), tmp_path / "compiled")
    assert graphs == [30]
    assert traces(tmp_path / "compiled")[2] == traces(tmp_path / "plain")[2]


def test_a_batch_that_is_all_of_an_epoch_is_compiled(
    vary: Vary, tmp_path: Path, graphs: list[int]
) -> None:
    with pytest.warns(KeymixWarning, match="one step on all"):
        train(compiled(vary({"data.batch_size": 100})), tmp_path / "run")
    assert graphs == [72]


def test_a_compiled_run_that_was_stopped_goes_on_to_the_bit(
    vary: Vary, tmp_path: Path, graphs: list[int]
) -> None:
    recipe = compiled(vary(ALL))
    train(recipe, tmp_path / "whole")
    with during(7, signal.SIGTERM), pytest.raises(Interrupted):
        train(recipe, tmp_path / "cut")
    assert checkpoints(tmp_path / "cut")[0].steps > 0
    train(recipe, tmp_path / "cut")
    assert traces(tmp_path / "cut") == traces(tmp_path / "whole")


def test_with_the_real_compiler_it_goes_on_to_the_bit(
    vary: Vary, tmp_path: Path, shapes_checked: bool
) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    recipe = compiled(vary({"data.batch_size": 30, "ema": 0.9, "loss.mixup": 0.4}))
    whole = train(recipe, tmp_path / "whole")
    with during(7, signal.SIGTERM), pytest.raises(Interrupted):
        train(recipe, tmp_path / "cut")
    train(recipe, tmp_path / "cut")
    assert traces(tmp_path / "cut") == traces(tmp_path / "whole")
    plain = train(replace_path(recipe, {"compile": False}), tmp_path / "plain")
    assert [*plain.weights()[0]] == [*whole.weights()[0]]
    for mine, other in zip(whole.metrics(), plain.metrics(), strict=True):
        assert mine["train_loss"] == pytest.approx(other["train_loss"], rel=0.01)


def test_masks_are_learned_compiled(tmp_path: Path, masks_run: Path, graphs: list[int]) -> None:
    train(compiled(load_run(masks_run / "run").recipe), tmp_path / "compiled")
    assert graphs == [4]
    assert traces(tmp_path / "compiled")[2] == traces(masks_run / "run")[2]


def test_students_are_compiled_and_teachers_not(
    vary: Vary, tmp_path: Path, graphs: list[int]
) -> None:
    teacher = train(vary({"schedule.epochs": 1, "seed": 5}), tmp_path / "teacher")
    recipe = vary({"loss.distill": 0.6, "loss.distill_teacher": str(teacher.folder)})
    train(recipe, tmp_path / "plain")
    train(compiled(recipe), tmp_path / "compiled")
    assert len(graphs) == 1
    assert traces(tmp_path / "compiled")[2] == traces(tmp_path / "plain")[2]


def test_similarity_of_maps_is_refused_by_name(vary: Vary) -> None:
    with pytest.raises(UserError, match=r"^compile = True: .*loss\.similarity"):
        vary({"compile": True, "loss.similarity": 0.5, "model.options.depth": 2})


def test_a_model_that_cannot_be_compiled_is_one_clear_error(
    vary: Vary, tmp_path: Path, graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise OSError("no working\nC++ compiler")

    monkeypatch.setattr(train_task, "_BACKEND", fail)
    said = r"^compile = True: .*no working C\+\+ compiler.*Set --compile false, and name another "
    said += r"folder with --out or throw this run away with --overwrite\.$"
    with pytest.raises(UserError, match=said):
        train(compiled(vary({})), tmp_path / "run")
    # the folder keeps the recipe, so that the first half of the remedy is not enough
    with pytest.raises(UserError, match="compile is True there, False here"):
        train(vary({}), tmp_path / "run")
    assert not train(vary({}), tmp_path / "run", overwrite=True).recipe.compile


def test_comparisons_pass_it_on(tiny: Recipe, tmp_path: Path) -> None:
    data = load_data(tiny.data)
    specs = choose_mixers("mhsa,ska", controls=False)

    def plan(overrides: dict[str, Any]) -> Plan:
        question = Question(recipe=tiny, overrides=overrides, out=tmp_path / "out")
        return make_plan(question, named_recipe(question)[0], data, specs)

    folder.claim(plan({}), data.record())
    (tmp_path / "out" / folder.RUNS).mkdir()  # training has begun
    new = plan({"compile": True})
    assert all(new.recipe_for(mixer, seed).compile for mixer, seed in new.pairs)
    with pytest.raises(UserError, match="compile is False there and True here"):
        folder.claim(new, data.record())


def test_a_trial_reports_what_compiling_takes(tiny: Recipe, graphs: list[int]) -> None:
    data = load_data(tiny.data)
    trial = timed(compiled(tiny), data, threads=1)
    assert graphs == [16]
    assert trial.start > trial.step  # it captures the graph
    assert timed(tiny, data, threads=1).start == 0.0
    sizes = data.record().sizes
    later = Trial(step=trial.step, image=trial.image)
    assert trial.run(tiny, sizes) == pytest.approx(trial.start + later.run(tiny, sizes))
