# SPDX-License-Identifier: Apache-2.0
"""Every public function takes what people have, and says in one line what it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

import keymix
from each import each
from keymix.recipes import resolve
from keymix.train.recipe import replace_path

NEEDED = "data='digits', mixers='mhsa,ska', out='cmp'"
WRONG: dict[str, str] = {
    # a model
    "attention_maps(None, x)": "model=None",
    "attention_maps('run-that-is-not', x)": "model='run-that-is-not'",
    "attention_maps('vit_micro_p4_32', x)": "create_model",
    "attention_maps([model], x)": "model=<list>",
    "attention_rollout(3, x)": "model=3",
    "spike_study(recipe, x)": "Recipe",
    "spike_study(model, x)": "no spiking neurons",
    "count(None)": "model=None",
    "count('')": "model=''",
    "swap(None, 'ska')": "model=None",
    "swap('run-that-is-not', 'ska')": "run-that-is-not",
    "fold_for_inference('missing')": "'missing'",
    "fold_for_inference(recipe)": "Recipe",
    "explain_backend(model)": "mixer=<MixerVisionTransformer>",
    # images
    "attention_maps(model, None)": "images=None",
    "attention_maps(model, 3)": "images=3",
    "attention_maps(model, {'pixel_values': x})": "images=<dict>",
    "attention_maps(model, [None])": "images hold None",
    "attention_maps(model, [])": "images=[]",
    "attention_maps(model, 'missing.jpg')": "missing.jpg",
    "attention_maps(model, files['text'])": "text.txt",
    "attention_maps(model, [x[0], x[0, :, :16]])": "(3, 16, 32)",
    "attention_maps(unknown, picture)": "Sequential",
    "attention_rollout(model, x[:0])": "(0, 3, 32, 32)",
    "collapse(model, ['missing.jpg'])": "missing.jpg",
    "collapse(model, x[:0])": "at least one image",
    "spike_study(spiking, x[0, 0])": "(32, 32)",
    "spike_study(spiking, files['empty'])": "empty",
    "swap(fresh(), 'ska', calibration=3)": "calibration=3",
    "swap(fresh(), 'ska', calibration=picture)": "1 calibration images",
    # words, numbers and lists
    "attention_maps(model, x, stage='first')": "stage='first'",
    "attention_maps(model, x, queries=[1.5])": "queries=[1.5]",
    "attention_maps(model, x, queries='foo')": "queries='foo'",
    "attention_rollout(model, x, query='foo')": "query='foo'",
    "collapse(model, x, threshold='a')": "threshold='a'",
    "collapse(model, x, batch_size=0)": "batch_size=0",
    "count(model, (1, 3, 64, 64))": "(3, 64, 64)",
    "count(model, (2, 3, 32, 32))": "without the batch",
    "count(model, 32)": "input_size=32",
    "count(model, '3x32x32')": "input_size='3x32x32'",
    "count(model, (3.5, 32, 32))": "3.5",
    "count(model, x)": "Tensor of shape (2, 3, 32, 32)",
    "swap(fresh(), None)": "mixer=None",
    "swap(fresh(), 'ska', init='x')": "init='x'",
    "swap(fresh(), 'ska', batch_size='x')": "batch_size='x'",
    "swap(fresh(), 'ska', mixer_options=3)": "mixer_options=3",
    "create_mixer(3)": "name=3",
    "create_mixer('mhsa', 16)": "site=16",
    "create_mixer('mhsa', dim=16, grid='4x4')": "grid='4x4'",
    "explain_backend('mhsa')": "mixer='mhsa'",
    "explain_backend(mixer, 'foo')": "'foo'",
    "list_mixers(domain='foo')": "domain='foo'",
    "create_model(None)": "name=None",
    "create_model(model)": "MixerVisionTransformer",
    "source('mine', summary='x', settings='foo')": "settings='foo'",
    "complexity(3)": "mixers=3",
    "complexity('mhsa', dim='x')": "dim='x'",
    "complexity('mhsa', tokens=3)": "tokens=3",
    # runs and their folders
    "load(None)": "run=None",
    "load(model)": "MixerVisionTransformer",
    "load(folder, which='first')": "which='first'",
    "load_run(3)": "path=3",
    "load_results([folder])": "folder=",
    "evaluate(None)": "run=None",
    "evaluate(folder, split='x')": "split='x'",
    "predict(3, files['png'])": "run=3",
    "predict(folder, None)": "paths=None",
    "predict(folder, [3])": "paths=[3]",
    "predict(folder, files['png'], top=1.5)": "top=1.5",
    "load(folder).predict(None)": "inputs=None",
    "predict_masks(folder, files['png'], out='o')": "paths=",
    "predict_masks(folder, [files['png']], out=3)": "out=3",
    "predict_instances(None, out='o')": "run=None",
    "train('digits_vit', 'o')": "recipe='digits_vit'",
    "train(recipe, None)": "out=None",
    "train(recipe, 'o', progress='x')": "progress='x'",
    "train(recipe, 'o', data='digits')": "data='digits'",
    f"compare({NEEDED}, seeds='3')": "seeds='3'",
    f"compare({NEEDED}, epochs='x')": "epochs='x'",
    f"compare({NEEDED}, processes=1.5)": "processes=1.5",
    "compare(data=3)": "data=3",
    "compare(mixers={})": "mixers={}",
}
"""A call as a user may write it, and what its message must name."""


@pytest.fixture(scope="module")
def folder(made_once: Callable[..., Path]) -> Path:
    """Folder of a run on digits, trained for one epoch."""
    changes = {
        "data.limit": 60,
        "model.name": "vit_nano_p2_12",
        "model.options": {"depth": 1, "embed_dim": 16, "num_heads": 2},
        "schedule.epochs": 1,
        "schedule.warmup_epochs": 0,
    }
    recipe = replace_path(resolve("digits_vit"), changes)
    return made_once("public_arguments", partial(keymix.train, recipe))


@pytest.fixture(scope="module")
def things(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the calls name."""
    place = tmp_path_factory.mktemp("things")
    array = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    picture = Image.fromarray(array)
    picture.save(place / "picture.png")
    (place / "text.txt").write_text("no image")
    (place / "empty").mkdir()
    files = {"png": place / "picture.png", "text": place / "text.txt", "empty": place / "empty"}
    names = ["mhsa", "vit_micro_p4_32", "qkformer_micro_32"]
    return {
        **{name: getattr(keymix, name) for name in dir(keymix)},
        **{"compare": keymix.compare, "swap": keymix.swap, "train": keymix.train},
        **{"torch": torch, "x": torch.randn(2, 3, 32, 32), "array": array, "picture": picture},
        **{"files": files, "folder": folder, "recipe": keymix.load_run(folder).recipe},
        "mixer": keymix.create_mixer(names[0], dim=16, num_heads=2),
        "model": keymix.create_model(names[1]).eval(),
        "spiking": keymix.create_model(names[2]).eval(),
        "unknown": nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2)),
        "fresh": lambda: keymix.create_model(names[1]).eval(),
    }


@each("call, culprit", {call: (call, culprit) for call, culprit in WRONG.items()})
def test_a_wrong_argument_is_named_in_one_line(
    call: str, culprit: str, things: dict[str, Any]
) -> None:
    with pytest.raises(keymix.UserError) as refused:
        eval(call, things)
    assert culprit in str(refused.value)
    assert "\n" not in str(refused.value)


def shown(model: nn.Module, picture: Image.Image) -> Tensor:
    """Prepare a picture as timm does."""
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    prepared: Tensor = transform(picture)
    return prepared


PICTURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "picture": lambda of: of["picture"],
    "path": lambda of: of["files"]["png"],
    "text": lambda of: str(of["files"]["png"]),
    "array": lambda of: of["array"],
    "channels first": lambda of: of["array"].transpose(2, 0, 1),
    "values from 0 to 1": lambda of: of["array"].astype(np.float32) / 255,
    "bytes": lambda of: torch.from_numpy(of["array"].transpose(2, 0, 1).copy()),
    "list": lambda of: [of["files"]["png"]],
    "arrays": lambda of: of["array"][None],
}


@each("make", {name: (make,) for name, make in PICTURES.items()})
def test_pictures_of_any_kind_give_what_their_tensor_gives(
    make: Callable[[dict[str, Any]], Any], things: dict[str, Any]
) -> None:
    model, given = things["model"], make(things)
    x = shown(model, things["picture"])[None]
    wanted = keymix.attention_maps(model, x)
    found = keymix.attention_maps(model, given)
    for path, maps in wanted.items():
        torch.testing.assert_close(found[path], maps)
    torch.testing.assert_close(
        keymix.attention_rollout(model, given).weights, keymix.attention_rollout(model, x).weights
    )
    pairs = [keymix.collapse(model, images).pairs[0].mean for images in (x, given)]
    assert pairs[0] == pytest.approx(pairs[1])


@each(
    "make",
    {
        "one image": (lambda x: x[0],),
        "array": (lambda x: x[:1].numpy(),),
        "list": (lambda x: [x[0]],),
        "labels": (lambda x: [(x[:1], torch.zeros(1))],),
    },
)
def test_tensors_are_taken_as_they_are(make: Any, things: dict[str, Any]) -> None:
    model, x = things["model"], things["x"]
    found = keymix.attention_maps(model, make(x))
    wanted = keymix.attention_maps(model, x[:1])
    assert all(torch.equal(found[path], maps) for path, maps in wanted.items())
    assert keymix.collapse(model, make(x)).to_dict() == keymix.collapse(model, x[:1]).to_dict()


def test_spikes_are_read_of_pictures_too(things: dict[str, Any]) -> None:
    model = things["spiking"]
    found = keymix.spike_study(model, [things["files"]["png"], things["picture"]])
    wanted = keymix.spike_study(model, torch.stack([shown(model, things["picture"])] * 2))
    assert found.rate == pytest.approx(wanted.rate)


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module]]] = {
    "parallel": (nn.DataParallel,),
    "compiled": (torch.compile,),
    "compiled and parallel": (lambda model: nn.DataParallel(torch.compile(model)),),
    "of Fabric": (lambda model: Fabric(accelerator="cpu", devices=1).setup(model),),
}


@each("wrap", WRAPPERS)
def test_a_wrapped_model_is_the_model(
    wrap: Callable[[nn.Module], nn.Module], things: dict[str, Any]
) -> None:
    model, x = things["model"], things["x"]
    wrapped = wrap(model)
    wanted = keymix.attention_maps(model, x, layers=0)
    found = keymix.attention_maps(wrapped, x, layers=0)
    assert all(torch.equal(found[path], maps) for path, maps in wanted.items())
    assert keymix.count(wrapped) == keymix.count(model)
    assert type(keymix.fold_for_inference(wrapped)) is type(model)
    fresh = things["fresh"]()
    keymix.swap(wrap(fresh), "static_key")
    assert {mixer.mixer_name for mixer in keymix.hosts.find_mixers(fresh).values()} == {
        "static_key"
    }


@pytest.mark.parametrize("kind", ["folder", "text", "run", "trained"])
def test_a_run_is_its_trained_model(kind: str, things: dict[str, Any], folder: Path) -> None:
    trained = keymix.load(folder)
    given = {
        "folder": folder,
        "text": str(folder),
        "run": keymix.load_run(folder),
        "trained": trained,
    }[kind]
    x = trained.transform(things["picture"])[None]
    wanted = keymix.attention_maps(trained.model, x)
    found = keymix.attention_maps(given, things["files"]["png"])
    assert all(torch.equal(found[path], maps) for path, maps in wanted.items())
    pair = [things["picture"], things["array"]]
    assert keymix.collapse(given, pair).images == 2
    assert keymix.count(given) == keymix.count(trained.model)
    assert keymix.count(given).input_size[1:] == trained.image_size
    folded = keymix.fold_for_inference(given)
    torch.testing.assert_close(folded(x), trained.model(x))
    report = keymix.swap(given, "static_key", calibration=pair * 4)
    assert report.output.images == 8
    assert {m.mixer_name for m in keymix.hosts.find_mixers(report.swapped).values()} == {
        "static_key"
    }
    assert (report.swapped is trained.model) == (kind == "trained")


def test_a_batch_of_one_is_an_image_where_costs_are_counted(things: dict[str, Any]) -> None:
    model = things["model"]
    assert keymix.count(model, (1, 3, 32, 32)) == keymix.count(model, (3, 32, 32))


def test_a_trained_model_prints_in_a_few_lines(folder: Path) -> None:
    text = repr(keymix.load(folder))
    for part in (str(folder), "vit_nano_p2_12", "classification", "digits", "accuracy"):
        assert part in text
    assert text.count("\n") < 6
    assert len(text) < 600
