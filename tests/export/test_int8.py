# SPDX-License-Identifier: Apache-2.0
"""Files in 8 bits: what they score, which blocks cost, and what stays in float."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keymix
from keymix import UserError
from keymix.cli import main
from keymix.train.predict import TrainedModel

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _without_hook(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("exporters cannot see through the shape checks")
    pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def run(made_once: Callable[..., Path]) -> Path:
    """A run on digits that has learned something."""

    def write(place: Path) -> None:
        words = ["train", "digits_vit", "--mixer", "static_key", "--schedule.epochs", "24"]
        assert main([*words, "--out", str(place / "digits")]) == 0

    return made_once("digits_for_int8", write) / "digits"


def weights(path: Path) -> dict[str, np.dtype[Any]]:
    """Types of the weights that a file's maps and convolutions read, by the path of the layer."""
    import onnx

    graph = onnx.load(path).graph
    made = {output: node for node in graph.node for output in node.output}
    types = {each.name: onnx.numpy_helper.to_array(each).dtype for each in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            name = node.input[1]
            while name not in types and name in made:  # behind DequantizeLinear
                name = made[name].input[0]
            if name in types:
                found[node.name.partition("/")[0]] = types[name]
    return found


def test_8_bits_are_scored_next_to_the_float_file(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    found = keymix.export(run, file, int8=True)
    cost = found.int8
    assert cost is not None
    assert cost.before == pytest.approx(keymix.load_run(run).summary.last.test.scores["top1"])
    assert cost.after is not None
    assert not cost.lossy
    assert cost.low is not None
    assert cost.high is not None
    assert cost.low <= cost.after - cost.before <= cost.high
    types = weights(file)
    assert types.pop("head") == np.float32
    assert set(types.values()) == {np.dtype(np.int8)}
    floats = tmp_path / "float.onnx"
    assert found.bytes < keymix.export(run, floats).bytes / 2
    assert keymix.load(file).source.facts.precision == "8"  # type: ignore[union-attr]
    names = [backend.name for backend in found.backends]
    assert names == ["ONNX Runtime", "8 bits"]
    assert [backend.score for backend in found.backends] == [cost.before, cost.after]
    assert all(backend.alone_ms > 0 and backend.batch_ms > 0 for backend in found.backends)


def with_outliers(run: Path) -> TrainedModel:
    """The same function, but one channel of values in a block is a thousand times the others."""
    trained = keymix.load(run)
    mixer = trained.model.get_submodule("blocks.1.attn.mixer")
    with torch.no_grad():
        for name, parameter in mixer.v.named_parameters():  # type: ignore[union-attr]
            assert name in ("weight", "bias")
            parameter[0] *= 1000
        mixer.proj.weight[:, 0] /= 1000  # type: ignore[union-attr, index]
    return trained


def test_the_block_that_costs_most_is_found_and_kept(run: Path, tmp_path: Path) -> None:
    trained, file = with_outliers(run), tmp_path / "model.onnx"
    lossy = keymix.export(trained, file, int8=True)
    assert lossy.int8 is not None
    assert lossy.int8.lossy
    assert next(iter(lossy.int8.gains)) == "blocks.1"
    assert "blocks.1" in lossy.answer
    assert lossy.frame("blocks")["block"][0] == "blocks.1"
    kept = keymix.export(trained, file, int8=True, keep_float="auto", overwrite=True)
    assert kept.int8 is not None
    assert kept.int8.kept == ("blocks.1",)
    assert (kept.int8.difference or 0) > -0.05 > (lossy.int8.difference or 0)
    types = weights(file)
    assert {str(kind) for layer, kind in types.items() if "blocks.1" in layer} == {"float32"}
    assert {str(kind) for layer, kind in types.items() if "blocks.0" in layer} == {"int8"}


def test_what_excludes_8_bits_is_said_before_the_work(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    model = keymix.create_model("vit_micro_p4_32")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (run, {"int8": True, "half": True}, "half"),
        (run, {"keep_float": ["blocks.0"]}, "keep_float"),
        (run, {"int8": True, "keep_float": ["block.0"]}, r"block\.0.*blocks\.0"),
        (model, {"int8": True}, "run"),
    ]
    for given, options, culprit in wrong:
        with pytest.raises(UserError, match=culprit):
            keymix.export(given, file, **options)
    with pytest.raises(UserError, match="torch"):
        keymix.export(run, tmp_path / "model.pt2", format="torch", int8=True)
    assert not [*tmp_path.iterdir()]


def test_the_command_times_all_places_in_one_table(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keymix.export.run.find_spec", lambda name: None)  # OpenVINO
    monkeypatch.setattr("torch.compile", lambda model: model)  # which takes half a minute
    file = tmp_path / "model.onnx"
    words = ["--int8", "--keep-float", "blocks.0", "--measure"]
    assert main(["export", str(run), "--out", str(file), *words]) == 0
    shown = capsys.readouterr().out
    rows = [line.split("\t")[0] for line in shown.splitlines()]
    assert {"PyTorch", "PyTorch, compiled", "ONNX Runtime", "8 bits"} <= set(rows)
    assert "blocks.0" in shown
    answers = [keymix.load(place).outputs([torch.zeros(1, 12, 12)]) for place in (run, file)]
    assert float((answers[0] - answers[1]).abs().max()) < 0.2 * float(answers[0].abs().max())
