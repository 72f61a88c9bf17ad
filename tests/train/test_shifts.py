# SPDX-License-Identifier: Apache-2.0
"""Runs keep the shifts of patches that they were trained with, those made before a choice too."""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import during, traces
from torch import nn

from keymix.cli import main
from keymix.compare import folder
from keymix.compare.plan import Plan
from keymix.compare.run import compare
from keymix.compare.runs import Finished, read_run
from keymix.errors import Interrupted, KeymixWarning, UserError
from keymix.layers.patches import ShiftedPatchEmbed
from keymix.models import create_model, load_weights
from keymix.recipes import resolve
from keymix.records import to_json
from keymix.swap import load_swapped, save_swapped, swap
from keymix.train import files
from keymix.train.engine import train
from keymix.train.model import settled
from keymix.train.predict import predict
from keymix.train.recipe import from_dict, from_record, replace_path
from keymix.train.runs import evaluate, load_run
from keymix.train.swapped import recipe_of
from tolerances import differs

# as version 0.1.0 wrote it before there was a choice
RECORD: dict[str, Any] = json.loads(
    """
    {
    "name": "tiny",
    "data": {"spec": "digits", "image_size": null, "channels": null, "limit": 80,
        "val_fraction": 0.1, "split_seed": 0, "batch_size": 16, "eval_batch_size": 64, "workers": 0,
        "skip_corrupt": false, "time_steps": null, "frames_by": null, "event_split": null,
        "masks": null, "stack": null, "split_by": null, "test_fraction": null},
    "augment": {"crop_padding": 1, "random_resized_crop": [0.08, 1.0], "flip": false,
        "rand_augment": [0, 0], "rand_augment_first": false, "auto_augment": "", "erasing":
        0.0, "erasing_fill": "mean", "snn_wide": false, "vertical_flip": false,
        "shift_scale_rotate": false, "coarse_dropout": false, "brightness_contrast": false},
    "model": {"name": "vit_small_spt_p4_32", "mixer": null, "options": {"depth": 1,
        "embed_dim": 16, "num_heads": 2}, "drop_path": 0.0, "drop_rate": 0.2, "global_pool":
        null, "weights": null},
    "optim": {"name": "adamw", "lr": 0.001, "weight_decay": 0.05, "betas": null, "clip_grad":
        0.0, "accumulate": 1},
    "schedule": {"name": "cosine", "epochs": 2, "warmup_epochs": 0.5, "cooldown_epochs": 0,
        "warmup_lr": 1e-06, "min_lr": 0.0, "power": 0.9},
    "loss": {"label_smoothing": 0.0, "mixup": 0.0, "cutmix": 0.0, "mixup_prob": 1.0,
        "mixup_off_epoch": null, "similarity": 0.0, "similarity_blocks": null, "distill": 0.0,
        "distill_teacher": null, "distill_temperature": 2.0, "dice": 0.0},
    "ema": 0.0,
    "precision": "auto",
    "seed": 0,
    "deterministic": false
    }
    """
)
SMALL = RECORD["model"]["options"]
NAME = RECORD["model"]["name"]


def shifts_in(folder: Path) -> str | None:
    """What a run's record says."""
    options: dict[str, Any] = files.read_json(folder / files.RECIPE)["model"]["options"]
    return options.get("shifts")


def embed_of(model: nn.Module) -> ShiftedPatchEmbed:
    embed = model.get_submodule("patch_embed")
    assert isinstance(embed, ShiftedPatchEmbed)
    return embed


def age(folder: Path) -> None:
    """Take what older versions did not write out of a run's folder."""
    record = files.read_json(folder / files.RECIPE)
    del record["model"]["options"]["shifts"], record["data"]["cell_mib"], record["compile"]
    del record["task"], record["augment"]["multi_scale"], record["schedule"]["milestones"]
    record["data"]["masks"], record["loss"]["dice"] = None, 0.0
    files.write_json(folder / files.RECIPE, record)
    for path in folder.glob("weights_*.safetensors"):
        tensors, facts = load_file(path), to_json(files.read_facts(path))
        aged = {"keymix": json.dumps(facts | {"recipe": record})}
        save_file(tensors, path, metadata=aged)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with diagonal shifts, as they all were."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(from_record(RECORD), folder)
    return folder


@pytest.fixture
def old(trained: Path, tmp_path: Path) -> Path:
    """The same in the words of its time."""
    folder = tmp_path / "old"
    shutil.copytree(trained, folder)
    age(folder)
    assert files.read_json(folder / files.RECIPE) == RECORD
    return folder


def test_a_record_of_its_time_says_diagonal_now() -> None:
    assert from_record(RECORD).model.options == SMALL | {"shifts": "diagonal"}
    assert from_dict(RECORD).model.options == SMALL
    again = from_record(from_record(RECORD).to_dict())
    assert again == from_record(RECORD)
    for name, options, found in (
        ("cska_vit_small_spt_p4_32", {}, "diagonal"),
        ("vit_micro_p4_32", {"shifted_patches": True}, "diagonal"),
        ("vit_small_spt_p4_32", {"shifts": "axes"}, "axes"),
        ("vit_small_spt_p4_32", {"shifted_patches": False}, None),
        ("vit_small_p4_32", {}, None),
    ):
        record = RECORD | {"model": RECORD["model"] | {"name": name, "options": options}}
        assert from_record(record).model.options.get("shifts") == found


def test_a_backbone_in_another_model_keeps_its_shifts_too(old: Path) -> None:
    options = {"backbone": NAME}
    record = RECORD | {"model": RECORD["model"] | {"name": "setr", "options": options}}
    shifted = {"shifts": "diagonal"}
    assert from_record(record).model.options == options | {"backbone_options": shifted}
    new = settled(from_dict(record))
    assert new.model.options == options | {"backbone_options": {"shifts": "axes"}}
    assert settled(from_dict(record), lambda: from_record(record)) == from_record(record)
    small = {"in_chans": 1, "img_size": 12, "num_classes": 3}
    model = create_model("setr", backbone=NAME, backbone_options=SMALL, **small)
    load_weights(model, old)
    assert [m.shifts for m in model.modules() if isinstance(m, ShiftedPatchEmbed)] == ["diagonal"]


def test_an_old_run_is_loaded_evaluated_and_asked_as_it_was_trained(
    old: Path, trained: Path, tmp_path: Path
) -> None:
    model = load_run(old).model()
    assert embed_of(model).shifts == "diagonal"
    assert evaluate(old) == evaluate(trained)
    from PIL import Image

    Image.new("L", (12, 12), 128).save(tmp_path / "a.png")
    paths = [tmp_path / "a.png"]
    assert predict(old, paths) == predict(trained, paths)
    other = create_model(NAME, in_chans=1, img_size=12, **SMALL).eval()
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 12, 12)
    with torch.no_grad():
        assert differs(other(images), model(images))


@pytest.mark.parametrize("finished", [True, False])
def test_the_same_command_resumes_an_old_run(
    old: Path, trained: Path, tmp_path: Path, finished: bool
) -> None:
    asked = from_dict(RECORD)  # as its own recipe or command gives it: nothing on shifts
    folder = old
    if not finished:
        folder = tmp_path / "stopped"
        with during(6, signal.SIGTERM), pytest.raises(Interrupted):
            train(from_record(RECORD), folder)
        age(folder)
    train(asked, folder)
    assert shifts_in(folder) == (None if finished else "diagonal")
    assert embed_of(load_run(folder).model()).shifts == "diagonal"
    if not finished:
        (last, _, lines), (wanted, _, whole) = traces(folder), traces(trained)
        assert last == wanted
        assert lines == whole
    with pytest.raises(UserError, match=r"shifts is 'diagonal' there, 'axes' here"):
        train(replace_path(asked, {"model.options.shifts": "axes"}), folder)


def test_an_old_folder_is_a_recipe_with_its_shifts_and_a_file_of_ones_own_is_not(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (old, old / "recipe.json"):
        assert resolve(str(source)).model.options["shifts"] == "diagonal"
    for named in ([], ["vit_small_cifar10"]):
        assert main(["train", *named, "--config", str(old / "recipe.json"), "--print-config"]) == 0
        assert "shifts: diagonal" in capsys.readouterr().out
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(RECORD), encoding="utf-8")
    assert "shifts" not in resolve(str(mine)).model.options


def test_a_new_run_records_the_shifts_of_new_models(tmp_path: Path) -> None:
    short = {"schedule.epochs": 1, "schedule.warmup_epochs": 0.0}
    recipe = replace_path(from_dict(RECORD), short)
    train(recipe, tmp_path / "new")
    assert shifts_in(tmp_path / "new") == "axes"
    _, facts = files.read_weights(tmp_path / "new" / files.weights_file("last"))
    assert facts.recipe.model.options["shifts"] == "axes"
    train(recipe, tmp_path / "new")  # it is done: nothing is refused
    assert settled(replace_path(recipe, {"model.name": "vit_nano_p2_12"})).model.options == SMALL


@pytest.mark.parametrize("weights", ["", "weights_last.safetensors"])
def test_a_run_that_starts_from_old_weights_goes_on_with_their_shifts(
    old: Path, tmp_path: Path, weights: str
) -> None:
    short = {
        "schedule.epochs": 1,
        "schedule.warmup_epochs": 0.0,
        "model.weights": f"{old / weights}",
    }
    recipe = replace_path(from_dict(RECORD), short)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeymixWarning)
        train(recipe, tmp_path / "tuned")
    assert shifts_in(tmp_path / "tuned") == "diagonal"
    asked = settled(replace_path(recipe, {"model.options.shifts": "axes"}))
    assert asked.model.options["shifts"] == "axes"


def test_old_weights_set_the_shifts_of_a_model_built_without(old: Path) -> None:
    def made(**options: Any) -> nn.Module:
        return create_model(NAME, in_chans=1, img_size=12, **SMALL, **options)

    model = made()
    load_weights(model, old)
    assert embed_of(model).shifts == "diagonal"
    model = made(shifts="half_patch")
    with pytest.warns(KeymixWarning, match="'diagonal'.*'half_patch'"):
        load_weights(model, old)
    assert embed_of(model).shifts == "half_patch"
    model = made()
    load_weights(model, model.state_dict())  # which says nothing
    assert embed_of(model).shifts == "axes"


def test_a_module_pickled_before_there_was_a_choice_shifts_as_it_did() -> None:
    layer, other = ShiftedPatchEmbed(8, 4, 3, 10), ShiftedPatchEmbed(8, 4, 3, 10, shifts="diagonal")
    other.load_state_dict(layer.state_dict())
    del layer.shifts, layer.chosen
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(layer(images), other(images))


def test_a_swapped_model_keeps_its_shifts(tmp_path: Path) -> None:
    def base(**options: Any) -> nn.Module:
        return create_model(NAME, in_chans=1, img_size=12, **SMALL, **options)

    model = base(shifts="half_patch")
    swap(model, "static_key", 0)
    assert recipe_of(from_dict(RECORD), model).model.options["shifts"] == "half_patch"
    save_swapped(model, tmp_path / "new")
    assert embed_of(load_swapped(base, tmp_path / "new")).shifts == "half_patch"
    # an older file has no word on it
    from safetensors import safe_open

    with safe_open(tmp_path / "new", "pt") as file:
        record = json.loads(file.metadata()["keymix_swap"])
    for shifts, found in ((None, "diagonal"), ("axes", "axes")):
        edited = record | {"shifts": shifts}
        if shifts is None:
            del edited["shifts"]
        metadata = {"keymix_swap": json.dumps(edited)}
        save_file(load_file(tmp_path / "new"), tmp_path / "old", metadata=metadata)
        assert embed_of(load_swapped(base, tmp_path / "old")).shifts == found
        with pytest.warns(KeymixWarning, match=f"'{found}'.*'half_patch'"):
            kept = load_swapped(base(shifts="half_patch"), tmp_path / "old")
        assert embed_of(kept).shifts == "half_patch"
    for broken in ([], ["x"], {}, "diagonale", 0):
        metadata = {"keymix_swap": json.dumps(record | {"shifts": broken})}
        save_file(load_file(tmp_path / "new"), tmp_path / "broken", metadata=metadata)
        with pytest.raises(UserError, match="broken"):
            load_swapped(base, tmp_path / "broken")


def test_an_old_comparison_goes_on_with_its_shifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def trained(plan: Plan, data: Any, **how: Any) -> None:
        plans.append(plan)
        raise Interrupted(signal.SIGINT, "enough")

    monkeypatch.setattr("keymix.compare.run.train_runs", trained)
    settings: dict[str, Any] = {
        "recipe": from_dict(RECORD),
        "mixers": "mhsa,ska",
        "controls": False,
        "seeds": 1,
    }
    for out, more in (("cmp", {"model.options.shifts": "diagonal"}), ("new", {})):
        with pytest.raises(Interrupted):
            compare(**settings, out=tmp_path / out, overrides=more)
    assert [plan.recipe.model.options["shifts"] for plan in plans] == ["diagonal", "axes"]
    mixer, path = plans[0].mixers[0], tmp_path / "cmp" / folder.MANIFEST
    train(plans[0].recipe_for(mixer, 0), plans[0].folder(mixer, 0))
    age(plans[0].folder(mixer, 0))
    there = files.read_json(path)
    del there["identity"]["recipe"]["model"]["options"]["shifts"]
    files.write_json(path, there)
    with pytest.raises(Interrupted):
        compare(**settings, out=tmp_path / "cmp")
    assert plans[-1].recipe.model.options["shifts"] == "diagonal"
    images = folder.read_manifest(tmp_path / "cmp").identity.data
    assert isinstance(read_run(plans[-1], mixer, 0, images=images, failure=None), Finished)
    with pytest.raises(UserError, match=r"shifts is 'diagonal' there and 'axes' here"):
        compare(**settings, out=tmp_path / "cmp", overrides={"model.options.shifts": "axes"})
