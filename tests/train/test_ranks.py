# SPDX-License-Identifier: Apache-2.0
"""A training on two ranks is that on one: its steps, its scores, its folder, its faults."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import (
    Check,
    broken_run,
    detections,
    full_disk,
    full_disk_of_one,
    joined_detections,
    killed_run,
    mask_losses,
    of_ranks,
    own_mask_losses,
    refused_batch,
    refused_folder,
    refused_model,
    refused_strategy,
    stopped_run,
    trained_steps,
    whole_run,
)

from commands import Command
from keymix.cli import train as command_line
from keymix.cli.train import watched
from keymix.data import load
from keymix.errors import KeymixWarning, UserError
from keymix.train import files, ranks
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.evaluation import score_split
from keymix.train.folder import read_answers, read_environment
from keymix.train.recipe import Recipe, replace_path
from keymix.train.resume import stored
from keymix.train.runs import Run, load_run
from keymix.train.signals import interruptible

PLAIN = {
    "model.drop_rate": 0.0,  # ranks drop different units
    "optim.name": "sgd",
    "optim.lr": 0.1,
    "optim.accumulate": 2,
    "optim.clip_grad": 0.5,
}
MIXERS = ("softmax", "static_key", "re_attention")  # the last with BatchNorm
SMALL_SWIN = {
    **{"embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "merging": (2,)},
    "window_size": 3,
}
SMALL_SPIKING = {"embed_dim": 16, "num_heads": 2, "depths": (1, 1, 1), "time_steps": 2}
SHARDED: dict[str, dict[str, Any]] = {
    "vit": {"model.mixer": "static_key", "ema": 0.9},
    "swin": {"model.name": "swin_micro_p2_32", "model.options": SMALL_SWIN},
    "qkformer": {"model.name": "qkformer_micro_32", "model.options": SMALL_SPIKING},
}
FROZEN = {"vit": ("patch_embed", "blocks.0.norm1"), "swin": ("layers.0.blocks.1",), "qkformer": ()}
UNEVEN = {"data.limit": 77, "schedule.epochs": 2}
TOLERANCE = 1e-12  # float64, sums in another order


COPIED = (False, None, shutil.copy2, False, True)  # by both ranks


def sharded(tiny: Recipe, name: str) -> Recipe:
    return replace_path(tiny, {**PLAIN, **SHARDED[name]})


def plain(tiny: Recipe, mixer: str) -> Recipe:
    return replace_path(tiny, {**PLAIN, "model.mixer": mixer})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(tiny_recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks has of every check."""
    uneven = replace_path(tiny_recipe, UNEVEN)
    averaged = replace_path(uneven, {"ema": 0.9, "optim.clip_grad": 1.0})
    muon = replace_path(tiny_recipe, {"optim.name": "muon"})
    checks: list[Check] = [
        *((mixer, trained_steps, (plain(tiny_recipe, mixer), 5)) for mixer in MIXERS),
        ("mask losses", own_mask_losses, ()),
        ("detections", joined_detections, ()),
        ("batch", refused_batch, (tiny_recipe, folder / "batch")),
        ("folder", refused_folder, (tiny_recipe, folder / "locked")),
        ("whole", whole_run, (uneven, folder / "whole")),
        ("stopped", stopped_run, (uneven, folder / "cut")),
        (
            "copied",
            shutil.copytree,
            (folder / "cut", folder / "copy", *COPIED),
        ),
        ("copied again", shutil.copytree, (folder / "cut", folder / "to parts", *COPIED)),
        ("resumed", whole_run, (uneven, folder / "cut")),
        *(
            (
                f"sharded {name}",
                trained_steps,
                (sharded(tiny_recipe, name), 5, "fsdp", FROZEN[name]),
            )
            for name in SHARDED
        ),
        ("parts", whole_run, (averaged, folder / "parts", "fsdp")),
        ("stopped parts", stopped_run, (averaged, folder / "cut parts", "fsdp")),
        *(
            (name, shutil.copytree, (folder / "cut parts", folder / name, *COPIED))
            for name in ("parts copy", "parts lost")
        ),
        ("resumed parts", whole_run, (averaged, folder / "cut parts", "fsdp")),
        ("to parts", whole_run, (uneven, folder / "to parts", "fsdp")),
        ("broken parts", broken_run, (uneven, folder / "broken parts", "fsdp")),
        ("full parts", full_disk_of_one, (uneven, folder / "full parts")),
        ("optimiser", refused_strategy, (muon, folder / "muon")),
        ("scalar", refused_model, ("scalar",)),
        ("tied", refused_model, ("tied",)),
        ("broken", broken_run, (uneven, folder / "broken")),
        ("full", full_disk, (uneven, folder / "full")),
        ("killed", killed_run, (uneven, folder / "killed")),
    ]
    return of_ranks(checks, folder)


@pytest.mark.parametrize("mixer", MIXERS)
def test_steps_on_two_ranks_are_those_of_one_process(
    found: list[dict[str, Any]], tiny: Recipe, mixer: str
) -> None:
    weights, loss, forward = trained_steps(plain(tiny, mixer), 5)
    assert forward == "ClassificationTask"  # no wrapper, no process group
    assert not dist.is_initialized()
    for theirs, mean, wrapped in (each[mixer] for each in found):
        assert wrapped == "DistributedDataParallel"
        assert mean == pytest.approx(loss, rel=TOLERANCE)
        assert theirs.keys() == weights.keys()
        for name, tensor in theirs.items():
            assert torch.allclose(tensor, weights[name], rtol=TOLERANCE, atol=TOLERANCE), name
            assert torch.equal(tensor, found[0][mixer][0][name])


@pytest.mark.parametrize("name", SHARDED)
def test_steps_of_a_sharded_model_are_those_of_one_process(
    found: list[dict[str, Any]], tiny: Recipe, name: str
) -> None:
    weights, loss, _ = trained_steps(sharded(tiny, name), 5, frozen=FROZEN[name])
    (theirs, mean, wrapped), (nothing, same, _) = (each[f"sharded {name}"] for each in found)
    assert (wrapped, nothing, same) == ("ClassificationTask", {}, mean)
    assert mean == pytest.approx(loss, rel=TOLERANCE)
    assert theirs.keys() == weights.keys()
    for key, tensor in theirs.items():
        assert torch.allclose(tensor, weights[key], rtol=TOLERANCE, atol=TOLERANCE), key


def test_losses_of_masks_are_those_of_the_whole_batch(found: list[dict[str, Any]]) -> None:
    for each in found:
        np.testing.assert_allclose(each["mask losses"], mask_losses(slice(None)), rtol=TOLERANCE)


def test_detections_of_two_ranks_are_scored_as_those_of_one(found: list[dict[str, Any]]) -> None:
    whole = detections([*range(5)])
    arrays = {**whole.shared(), **whole.arrays("last")}
    for scores, joined in (each["detections"] for each in found):
        assert scores == whole.scores()
        assert scores["box_ap50"] > 0
        for name, values in arrays.items():
            assert np.array_equal(joined[name], values), name


def test_uneven_shares_are_scored_as_one_process_scores_the_split(
    found: list[dict[str, Any]], folder: Path, tiny: Recipe
) -> None:
    assert [each["whole"] for each in found] == [str(folder / "whole")] * 2
    run = load_run(folder / "whole")
    data = load(run.recipe.data.spec, limit=77)
    assert len(data.test) % 2 == 1
    kept = read_answers(run.folder / files.PREDICTIONS, data.record())["last"]
    model, _ = run.model_and_data()
    again = score_split(run.recipe, model, data, "test")
    recorded = run.summary.last.test.scores
    assert recorded["top1"] == again.scores["top1"]
    assert recorded["loss"] == pytest.approx(again.scores["loss"], rel=1e-6)
    for name, values in {**again.answers.shared(), **again.answers.arrays("last")}.items():
        mine = {**kept.shared(), **kept.arrays("last")}[name]
        assert np.allclose(mine, values, atol=1e-3), name  # probabilities in float16
    validated = score_split(run.recipe, model, data, "val")
    assert run.metrics()[-1]["val_top1"] == validated.scores["top1"]
    assert read_environment(run.folder).ranks == 2


def said(found: list[dict[str, Any]], name: str) -> str:
    """What the first rank raised, which the other only passes on."""
    (kind, text), (other, same) = (each[name] for each in found)
    assert (other, same) == ("Reported", text)
    assert kind != "Reported"
    return str(text)


def test_a_batch_that_cannot_be_shared_is_refused_before_the_folder(
    found: list[dict[str, Any]], folder: Path
) -> None:
    assert "data.batch_size = 15: must be a multiple of 2" in said(found, "batch")
    assert not (folder / "batch").exists()


def test_a_folder_in_use_is_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    assert "another run is at work" in said(found, "folder")


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_and_names_its_images(
    found: list[dict[str, Any]], folder: Path
) -> None:
    text = said(found, "broken")
    assert "the training loss became nan in step 1 of epoch 2" in text
    assert "it came from 8 of the batch's 8 images" in text
    assert len(files.read_json(folder / "broken" / files.NONFINITE)["images"]) == 8


def test_a_full_disk_of_the_first_rank_ends_all(found: list[dict[str, Any]]) -> None:
    (kind, text), (other, _) = (each["full"] for each in found)
    assert (kind, other) == ("WriteError", "Reported")
    assert "No space left" in text
    assert "the same command starts from the beginning" in text


def test_a_signal_to_one_rank_saves_and_stops_all(found: list[dict[str, Any]]) -> None:
    for each in found:
        kind, text = each["stopped"]
        assert kind == "Interrupted"
        assert "SIGTERM" in text
        assert "epochs_00001_step_000001.ckpt" in text


def test_a_stopped_run_resumes_to_the_bit_on_as_many_ranks(
    found: list[dict[str, Any]], folder: Path
) -> None:
    assert found[0]["resumed"] == str(folder / "cut")
    for which in ("last", "best"):
        whole, cut = (folder / name / files.weights_file(which) for name in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes()
    whole_lines, lines = (load_run(folder / name).metrics() for name in ("whole", "cut"))
    for a, b in zip(whole_lines, lines, strict=True):
        timed = {"seconds", "images_per_s"}
        assert {k: a[k] for k in a.keys() - timed} == {k: b[k] for k in b.keys() - timed}


def test_it_resumes_on_one_process_and_says_so(
    found: list[dict[str, Any]], folder: Path, tiny: Recipe
) -> None:
    with pytest.warns(KeymixWarning, match="began on 2 device.* and resumes on 1"):
        run = train(replace_path(tiny, UNEVEN), folder / "copy")
    assert len(run.metrics()) == 2
    assert read_environment(folder / "copy").earlier[0].ranks == 2


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4096")
    refused = pytest.raises(UserError, match="4096 devices were asked for, and this machine has")
    with refused, ranks.together():
        pass


def test_a_rank_that_is_left_alone_ends(found: list[dict[str, Any]], folder: Path) -> None:
    assert "another rank ended" in found[0]["left alone"]
    assert checkpoints(folder / "killed")[0].path.name == "epochs_00001.ckpt"
    assert not (folder / "killed" / files.LOCK).exists()


def test_a_sharded_run_resumes_to_the_bit_on_as_many_ranks(
    found: list[dict[str, Any]], folder: Path
) -> None:
    for each in found:
        kind, text = each["stopped parts"]
        assert kind == "Interrupted"
        assert "epochs_00001_step_000001.ckpt" in text
    assert found[0]["resumed parts"] == str(folder / "cut parts")
    for which in ("last", "best"):
        parts, cut = (folder / n / files.weights_file(which) for n in ("parts", "cut parts"))
        assert parts.read_bytes() == cut.read_bytes()
    run = load_run(folder / "parts")
    assert (read_environment(run.folder).ranks, read_environment(run.folder).strategy) == (
        2,
        "fsdp",
    )
    kept = checkpoints(run.folder)
    assert [place.epochs for place in kept] == [2, 1]
    shards = [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in kept[0].path.iterdir()) == [*shards, "state.ckpt"]
    assert not [*run.folder.rglob("*.part")]


def test_weights_and_scores_of_a_sharded_run_are_those_of_its_evaluation(
    found: list[dict[str, Any]], folder: Path, tiny: Recipe
) -> None:
    assert [each["parts"] for each in found] == [str(folder / "parts")] * 2
    run = load_run(folder / "parts")
    data = load(run.recipe.data.spec, limit=77)
    model, _ = run.model_and_data()
    again = score_split(run.recipe, model, data, "test")
    assert run.summary.last.test.scores["top1"] == again.scores["top1"]
    validated = score_split(run.recipe, model, data, "val")
    assert run.metrics()[-1]["val_top1"] == validated.scores["top1"]


def test_a_sharded_run_resumes_on_one_process_and_says_so(
    found: list[dict[str, Any]], folder: Path
) -> None:
    recipe = load_run(folder / "parts").recipe
    with pytest.warns(KeymixWarning, match=r"began on 2 devices \(fsdp\) and resumes on 1 device"):
        run = train(recipe, folder / "parts copy")
    whole, _ = load_run(folder / "parts").weights()
    resumed, _ = run.weights()
    largest = max(float((whole[name] - resumed[name]).abs().max()) for name in whole)
    assert 0 < largest < 0.05  # dropout of one rank; a start from afresh is 0.3 away
    assert [each.path.is_dir() for each in checkpoints(run.folder)] == [False, True]


def test_a_run_in_copies_goes_on_in_parts(found: list[dict[str, Any]], folder: Path) -> None:
    assert found[0]["to parts"] == str(folder / "to parts")
    assert read_environment(folder / "to parts").earlier[0].strategy == "ddp"
    copies, parts = (load_run(folder / name).weights()[0] for name in ("cut", "to parts"))
    assert all(torch.allclose(copies[name], parts[name], atol=1e-5) for name in copies)


@pytest.mark.parametrize("lost", ["shard-00002-model-00001-of-00001.safetensors", "state.ckpt"])
def test_a_sharded_checkpoint_that_lacks_a_file_is_named(
    found: list[dict[str, Any]], folder: Path, tmp_path: Path, lost: str
) -> None:
    recipe = load_run(folder / "parts").recipe
    copy = shutil.copytree(folder / "parts lost", tmp_path / "copy")
    newest, older = checkpoints(copy)
    (newest.path / lost).unlink()
    with pytest.warns(KeymixWarning, match=f"{newest.path.name}.*{lost}.*from {older.path.name}"):
        stored(Run(copy, recipe))
    (older.path / lost).write_bytes(b"")
    with pytest.raises(UserError, match=f"{newest.path.name}.*{older.path.name}.*--overwrite"):
        train(recipe, copy)


def test_a_loss_that_is_not_finite_ends_a_sharded_run(
    found: list[dict[str, Any]], folder: Path
) -> None:
    text = said(found, "broken parts")
    assert "the training loss became nan in step 1 of epoch 2" in text
    assert "it came from 8 of the batch's 8 images" in text


def test_a_full_disk_of_one_rank_ends_all_and_leaves_nothing(
    found: list[dict[str, Any]], folder: Path
) -> None:
    (kind, text), (other, _) = (each["full parts"] for each in found)
    assert (other, kind) == ("Reported", "WriteError")
    assert "No space left" in text
    assert not [*(folder / "full parts" / files.CHECKPOINTS).iterdir()]


def test_what_cannot_be_sharded_is_refused(found: list[dict[str, Any]], folder: Path) -> None:
    assert "optim.name = 'muon' computes with whole tensors" in said(found, "optimiser")
    assert not (folder / "muon").exists()
    for kind, why in (("scalar", "scale is one number"), ("tied", "1.weight stands in two places")):
        assert why in found[0][kind][1]


def test_one_device_has_no_parts(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is one device"):
        train(tiny, tmp_path / "run", strategy="fsdp")
    assert not (tmp_path / "run").exists()


def processes_of(*programs: str) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen([sys.executable, "-c", f"import os, signal, sys, time; {each}"])
        for each in programs
    ]


def test_a_killed_process_is_named_and_ends_the_others() -> None:
    running = processes_of("time.sleep(0.2); sys.exit(2)", "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(UserError, match="rank 1 of 2 was killed by SIGKILL"):
        watched(running)


def test_the_code_is_that_of_the_first_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "_GRACE", 0.5)
    running = processes_of("time.sleep(600)", "sys.exit(2)")
    assert watched(running) == 2
    assert running[0].poll() is not None


def test_a_signal_to_the_command_reaches_every_process() -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print(1); time.sleep(600)"
    running = processes_of(program, program)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with interruptible(lambda: ""):
        assert watched(running) == 143


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
def test_devices_start_and_stop_together(commands: list[Command], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "digits_vit", "--limit", "80", "--data.batch_size", "16", "--out", str(out)]
    words += ["--epochs", "400", "--devices", "2"]

    command = Command(*words, folder=tmp_path / "said")
    commands.append(command)
    command.until(lambda: checkpoints(out))
    processes = children(command.pid)
    assert len(processes) == 2
    assert command.ended(signal.SIGINT) == 130
    lines = command.err.splitlines()
    assert [line for line in lines if line.startswith("keymix: stopped by SIGINT")] == lines[-1:]
    assert "8 per device x 2 devices x 1 batch per update" in lines[0]
    assert not any("Warning" in line or "Traceback" in line for line in lines), command.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
