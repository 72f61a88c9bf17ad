# SPDX-License-Identifier: Apache-2.0
"""``keymix push``: timm and keymix load the same model back, anywhere, and nothing private left."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file
from torch import nn
from ward import PLACE, refuse_secrets, write_ward

import keymix
from keymix import UserError
from keymix.cli import main
from keymix.data.decode import Pixels
from keymix.models import create_model
from keymix.models import pretrained as fetch
from keymix.models.hosted import HOSTED
from keymix.train import files
from keymix.train.model import load_data, model_for
from keymix.train.recipe import DataConfig, ModelConfig, Recipe
from keymix.train.record import WeightsFacts
from made_instances import write_instances
from made_masks import write_uwgi
from written_masks_run import written_masks_run

FILES = {"README.md", "config.json", "model.safetensors"}
Options = dict[str, Any]
OWN: dict[str, tuple[str, Options]] = {
    "vit": ("vit_micro_p4_32", {"mixer": "key_value"}),
    "deepvit": ("deepvit_micro_p4_32", {"mixer": ["re_attention", "softmax"], "depth": 2}),
    "swin": ("swin_micro_p2_32", {"mixer": "conv_static_key"}),
    "cvt": ("cvt_micro_32", {"mixer": "static_key", "mixer_options": {"resize": "interpolate"}}),
    "spiking": ("qkformer_micro_32", {"mixer": "spike_driven", "time_steps": 2}),
    "masks": ("setr_micro", {"mixer": "static_key_re_attention"}),
    "unet": ("plain_unet", {}),
}
TIMMS: dict[str, tuple[str, Options]] = {
    "no_mixer": ("deit_tiny_patch16_224", {"img_size": 32, "depth": 3}),
    "swin_of_timm": (
        "swin_tiny_patch4_window7_224",
        {"mixer": "static_key", "img_size": 56, "depths": (1, 1, 1, 1)},
    ),
    "deit": (
        "deit_tiny_patch16_224",
        {
            "mixer": "static_key",
            "mixer_options": {"activation": "relu"},
            "img_size": 32,
            "depth": 4,
        },
    ),
}


def built(name: str, options: Options) -> nn.Module:
    torch.manual_seed(0)
    return create_model(name, **{"num_classes": 4, **options}).eval()


def shape_of(model: Any) -> tuple[int, ...]:
    size = model._traits.get("img_size") or model.pretrained_cfg["input_size"][1:]
    return (2, model.in_chans, *size) if hasattr(model, "in_chans") else (2, 3, *size)


_CHILD = """
import sys, torch, timm
import keymix, keymix.models
with torch.inference_mode():
    for folder in sys.argv[1:]:
        kept = torch.load(f"{folder}.pt")
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        assert torch.equal(model(kept["images"]), kept["outputs"]), folder
        maps = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True).eval()
        found = maps(kept["images"])
        assert torch.equal(found[-1], kept["map"]), folder
        assert [each.shape[1] for each in found] == maps.feature_info.channels(), folder
        print(folder)
    cached = timm.create_model('hf-hub:me/model', pretrained=True).eval()
    assert torch.equal(cached(kept["images"]), kept["outputs"])
    loaded = keymix.load('me/model')
    assert torch.equal(loaded.outputs([*kept["images"]]), kept["outputs"])
print(loaded)
keymix.load('me/other')
"""


@pytest.mark.slow
def test_timm_loads_every_family_in_a_new_process_and_the_hubs_cache(tmp_path: Path) -> None:
    """The last of them also as it lies in the cache after a download; there is no network."""
    for case, (name, options) in (OWN | TIMMS).items():
        model, folder = built(name, options), tmp_path / case
        assert keymix.push(model, to=folder) == str(folder)
        images = torch.randn(shape_of(model), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            last = model.forward_intermediates(images, intermediates_only=True)[-1]
            kept = {"images": images, "outputs": model(images), "map": last}
        torch.save(kept, f"{folder}.pt")
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--me--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision, "utf-8")
    shutil.copytree(folder, cached / "snapshots" / revision)
    folders = [str(tmp_path / case) for case in OWN | TIMMS]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *folders],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[: len(folders)] == folders, done.stderr
    assert "TrainedModel of 'me/model'" in done.stdout, done.stderr
    assert "UserError: there is no run 'me/other' here" in done.stderr


@pytest.mark.parametrize("case", ["vit", "deit"])
def test_a_model_in_memory_is_loaded_as_a_run_is(case: str, tmp_path: Path) -> None:
    model, folder = built(*(OWN | TIMMS)[case]), tmp_path / "model"
    assert keymix.push(model, to=folder) == str(folder)
    assert {each.name for each in folder.iterdir()} == FILES
    loaded = keymix.load(folder)
    images = torch.randn(shape_of(model))
    with torch.inference_mode():
        assert torch.equal(loaded.outputs([*images]), model(images))
    assert loaded.classes == ("0", "1", "2", "3")
    assert len(loaded.predict(images[0]).classes) == 4
    assert keymix.count(loaded).params == keymix.count(model).params
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config.pop("keymix")  # as timm writes them
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert keymix.load(folder).classes == loaded.classes
    assert config["architecture"] == ("vit_micro_p4_32" if case == "vit" else HOSTED)
    assert HOSTED not in keymix.list_models()


@pytest.mark.parametrize("case", ["vit", "deit"])
def test_a_swapped_model_and_what_was_loaded_are_pushed_again(case: str, tmp_path: Path) -> None:
    model = built(*(OWN | TIMMS)[case])
    images = torch.randn(shape_of(model))
    swapped = copy.deepcopy(model)
    keymix.swap(swapped, "conv_static_key", layers="0")
    keymix.push(swapped, to=tmp_path / "a")
    keymix.push(keymix.load(tmp_path / "a"), to=tmp_path / "b")
    again = keymix.load(tmp_path / "b")
    with torch.inference_mode():
        assert torch.equal(again.outputs([*images]), swapped(images))
    names = [each.mixer_name for each in keymix.hosts.base.find_mixers(again.model).values()]
    assert names[0] == "conv_static_key"
    assert "conv_static_key" not in names[1:]


# ---- runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ward(made_once: Callable[..., Path]) -> Path:
    return made_once("ward", write_ward) / PLACE


@pytest.fixture(scope="module")
def pushed(ward: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pushed") / "model"
    assert main(["push", str(ward / "run"), "--to", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_a_folder_answers_as_its_run(
    ward: Path, pushed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for place in (ward / "run", pushed):
        capsys.readouterr()
        assert main(["predict", str(place), str(ward / "photos"), "--json"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert len(json.loads(found[0])) == 40
    run, own = keymix.load(ward / "run"), keymix.load(pushed)
    photos = sorted((ward / "photos").rglob("*.png"))[:3]
    for more in ({}, {"image_size": 24}):
        a, b = (keymix.load(place, **more) for place in (ward / "run", pushed))
        shown = [a.transform(photo) for photo in photos]
        assert torch.equal(a.outputs(shown), b.outputs([b.transform(each) for each in photos]))
    assert keymix.collapse(own, photos).to_dict() == keymix.collapse(run, photos).to_dict()
    for name, value in {"which": "best", "time_steps": 4}.items():
        with pytest.raises(UserError, match=name):
            keymix.load(pushed, **{name: value})
    with pytest.raises(UserError, match=r"the run"):
        _ = own.run


@pytest.mark.slow
def test_a_folder_says_what_is_public_and_nothing_else(
    ward: Path, pushed: Path, tmp_path: Path
) -> None:
    assert {each.name for each in pushed.iterdir()} == FILES
    content = b"".join(each.read_bytes() for each in pushed.iterdir())
    refuse_secrets(content, pushed.parent)
    refuse_secrets(content, ward.parent)
    card = (pushed / "README.md").read_text("utf-8")
    head = yaml.safe_load(card.split("---\n")[1])
    assert card.startswith("---\n")
    assert head["pipeline_tag"] == "image-classification"
    assert head["library_name"] == "timm"
    assert "license" not in head
    top1 = keymix.load_run(ward / "run").summary.last.test.scores["top1"]
    for text in ("dark and light", "vit_nano_p4_12", "seed 0", "95", f"accuracy: {100 * top1:.1f}"):
        assert text in card, text
    found = keymix.push(ward / "run", to=tmp_path / "best", which="best", license="cc-by-4.0")
    card = (Path(found) / "README.md").read_text("utf-8")
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "cc-by-4.0"
    assert "best epoch" in card
    config = json.loads((Path(found) / "config.json").read_text("utf-8"))
    assert config["pretrained_cfg"]["license"] == "cc-by-4.0"
    best = keymix.load(ward / "run", which="best").model.state_dict()
    stored = load_file(Path(found) / "model.safetensors")
    assert all(torch.equal(each, stored[name]) for name, each in best.items())


@pytest.mark.slow
def test_the_command_keeps_what_is_there(
    ward: Path, pushed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, out = ["push", str(ward / "run"), "--to"], tmp_path / "out"
    shutil.copytree(pushed, out)
    (out / "README.md").write_text("mine", "utf-8")
    assert main([*words, str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "README.md").read_text("utf-8") == "mine"
    assert main([*words, str(out), "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"place": str(out)}
    assert "mine" not in (out / "README.md").read_text("utf-8")
    (out / "notes.txt").write_text("mine", "utf-8")
    assert main([*words, str(out), "--overwrite"]) == 2
    assert "another" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert main(["predict", str(pushed), str(ward / "photos"), "--weights", "best"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs onnxscript")
def test_a_folder_is_exported_as_its_run(
    pushed: Path, tmp_path: Path, shapes_checked: bool
) -> None:
    if shapes_checked:
        pytest.skip("exporters cannot see through the shape checks")
    found = keymix.export(keymix.load(pushed), tmp_path / "model.onnx")
    assert found.same
    assert "random" in found.images
    assert keymix.load(tmp_path / "model.onnx").classes == ("dark", "light")


@pytest.mark.slow
def test_masks_of_a_folder_are_those_of_its_run(tmp_path: Path) -> None:
    scans = write_uwgi(tmp_path / "uwgi", cases=5, slices=4, side=31)
    run = written_masks_run(tmp_path / "run", f"uwgi:{scans}")
    keymix.push(run, to=tmp_path / "model")
    paths: list[Any] = sorted(scans.rglob("*.png"))[:4]
    own, other = (keymix.predict(tmp_path / each, paths) for each in ("run", "model"))
    masks: list[tuple[Pixels, Pixels]] = [(a.mask, b.mask) for a, b in zip(own, other, strict=True)]
    assert all((a == b).all() for a, b in masks)
    assert (
        main(["predict", str(tmp_path / "model"), str(paths[0]), "--out", str(tmp_path / "o")]) == 0
    )
    assert "image-segmentation" in (tmp_path / "model" / "README.md").read_text("utf-8")


def written(folder: Path, recipe: Recipe) -> Path:
    """Write a run with the weights that its training starts from."""
    data = load_data(recipe.data).record()
    model = model_for(recipe, data)
    files.make_folder(folder)
    files.write_json(folder / files.RECIPE, recipe.to_dict())
    facts = WeightsFacts(recipe=recipe, data=data)
    files.write_weights(folder / files.weights_file("last"), model.state_dict(), facts)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["instances", "events"])
def test_detectors_and_models_of_events_come_back(kind: str, tmp_path: Path) -> None:
    if kind == "instances":
        small = {"backbone": "caformer_micro_32", "backbone_size": 32, "out_channels": 8}
        data = DataConfig(spec=f"coco:{write_instances(tmp_path / 'coco')}", image_size=(64, 96))
        model = ModelConfig(name="mask_rcnn", mixer="static_key", options={**small, "proposals": 9})
    else:
        data = DataConfig(spec="moving_digits:100", time_steps=3, image_size=16)
        model = ModelConfig(name="qkformer_micro_32")
    run = written(tmp_path / "run", Recipe(name="r", data=data, model=model))
    keymix.push(run, to=tmp_path / "model")
    own, other = (keymix.load(tmp_path / each) for each in ("run", "model"))
    assert other.task == own.task
    assert other.data == replace(own.data, spec=own.data.spec.partition(":")[0], notes=())
    state = other.model.state_dict()
    assert all(torch.equal(each, state[name]) for name, each in own.model.state_dict().items())
    if kind == "events":
        assert keymix.load(tmp_path / "model", time_steps=2).data.time_steps == 2
    refuse_secrets((tmp_path / "model" / "config.json").read_bytes(), tmp_path)


# ---- refusals -------------------------------------------------------------------------------


def test_what_cannot_be_pushed_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    model = built(*OWN["vit"])
    to = tmp_path / "model"
    for error, given, more in (
        ("one", model, {"to": to, "name": "a/b"}),
        ("one", model, {}),
        ("OWNER/NAME", model, {"name": "model"}),
        ("license", model, {"to": to, "license": "mine: yes"}),
        ("which", model, {"to": to, "which": "best"}),
        ("no folder", model, {"to": tmp_path / "gone" / "model"}),
        ("folded", keymix.fold_for_inference(model), {"to": to}),
        ("create_model", nn.Linear(2, 2), {"to": to}),
    ):
        with pytest.raises(UserError, match=error):
            keymix.push(given, **more)
    changed: Any = built(*OWN["vit"])
    changed.head = nn.Sequential(changed.head, nn.Linear(4, 4))
    with pytest.raises(UserError, match="nothing was written"):
        keymix.push(changed, to=to)
    other: Any = built(*OWN["vit"])
    other.norm.eps = 0.3  # in no argument and no weight
    with pytest.raises(UserError, match="outputs"):
        keymix.push(other, to=to)
    named: Any = built(*OWN["vit"])
    named._model_args = {**named._model_args, "act_layer": "/home/me/act"}
    with pytest.raises(UserError, match="act_layer"):
        keymix.push(named, to=to)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_and_an_interrupt_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[BaseException] = [KeyboardInterrupt(), OSError(28, "No space left on device")]

    def stop(*_: object, **__: object) -> None:
        raise stopped.pop()

    monkeypatch.setattr("keymix.export.push.save_file", stop)
    with pytest.raises(UserError, match=r"No space left on device.*Free space"):
        keymix.push(built(*OWN["vit"]), to=tmp_path / "model")
    with pytest.raises(KeyboardInterrupt):
        keymix.push(built(*OWN["vit"]), to=tmp_path / "model")
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def strange(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder, and its configuration to be changed."""
    keymix.push(built(*TIMMS["deit"]), to=tmp_path / "model")
    return tmp_path / "model", json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"base": "local-dir:/tmp"}, "base"),
        ({"base": HOSTED}, "base"),
        ({"swaps": []}, "swaps"),
        ({"swaps": "x"}, "swaps"),
        ({"swaps": [{"path": "blocks.0.attn", "mixer": "no_such", "options": {}}]}, "no_such"),
        ({"swaps": [{"path": "blocks.9", "mixer": "softmax", "options": {}}]}, "blocks.9"),
        ({"swaps": [{"path": "blocks.0.attn", "mixer": "softmax"}]}, "options"),
        ({"checkpoint_path": "weights.pth"}, "checkpoint_path"),
        ({"depth": 2}, "cannot be loaded"),
    ],
)
def test_a_strangers_folder_names_only_what_is_known(
    changed: Options, error: str, strange: tuple[Path, dict[str, Any]]
) -> None:
    folder, config = strange
    config["model_args"] |= changed
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UserError, match=error) as caught:
        keymix.load(folder)
    assert "\n" not in str(caught.value)


def test_a_part_of_our_model_takes_no_weights_from_a_strangers_words() -> None:
    stored = {"backbone_options": {"checkpoint_path": "weights.pth"}}
    with pytest.raises(UserError, match="checkpoint_path"):
        timm.create_model("plain_unet", pretrained_model_args=stored)


def test_pickled_weights_are_not_opened(strange: tuple[Path, dict[str, Any]]) -> None:
    folder, config = strange
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no model\.safetensors.*not opened"):
        keymix.load(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    config["keymix"]["format"] = 99
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UserError, match="99"):
        keymix.load(folder)


# ---- the Hub --------------------------------------------------------------------------------


def test_a_folder_is_uploaded_after_it_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    class Api:
        def __init__(self, **_: object) -> None: ...

        def create_repo(self, name: str, **more: object) -> None:
            asked.append((name, more))

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: object) -> None:
            asked.append((repo_id, {each.name for each in folder_path.iterdir()}))
            assert "hf-hub:me/model" in (folder_path / "README.md").read_text("utf-8")

    monkeypatch.setattr("keymix.export.push.HfApi", Api)
    found = keymix.push(built(*OWN["vit"]), "me/model", private=True)
    assert asked == [("me/model", {"private": True, "exist_ok": True}), ("me/model", FILES)]
    assert found == "https://huggingface.co/me/model"


@pytest.mark.parametrize(
    "error", [OSError("no route to host"), fetch._NETWORK[-1]("401"), ValueError("Repo id")]
)
def test_a_hub_that_refuses_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise fetch.HFValidationError(str(error)) if isinstance(error, ValueError) else error

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(UserError, match=r"the Hub did not take 'me/model' .*hf auth login"):
        keymix.push(built(*OWN["vit"]), "me/model")
