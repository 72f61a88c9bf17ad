# SPDX-License-Identifier: Apache-2.0
"""``keymix.push``: a model for the Hugging Face Hub, or in a folder, in timm's layout.

It is written next to where it goes, loaded back by timm and compared before it is put there.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

from keymix.analysis import counting
from keymix.analysis.images import Model
from keymix.analysis.passes import tensors_in
from keymix.analysis.statistics import crossed_mean
from keymix.arguments import checked, module_of
from keymix.data.augment import Augment
from keymix.errors import Attempt, UserError
from keymix.hosts.base import find_mixers
from keymix.layers.folding import refuse_folded
from keymix.models.arguments import OF_WEIGHTS
from keymix.models.hosted import rebuilt_by
from keymix.models.preprocessing import describe, preprocessing_of
from keymix.models.pretrained import of_hub
from keymix.records import to_json
from keymix.report import formats
from keymix.report.page import environment
from keymix.task import DEFAULT, get_task
from keymix.train import files
from keymix.train.exported import KEY, FileFacts, may_be_path
from keymix.train.folder import Which, read_answers
from keymix.train.parts import training_of
from keymix.train.predict import TrainedModel, load, published
from keymix.train.pushed import CARD, CONFIG, NAME, WEIGHTS, facts_of, rebuilt
from keymix.train.recipe import LossConfig
from keymix.train.runs import Run

_DESCRIBED = (
    *("architecture", "input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode"),
    *("mean", "std", "num_classes", "label_names", "pool_size", "first_conv", "classifier"),
)
"""What is kept of a model's ``pretrained_cfg``: nothing of where its weights once came from."""
_PARTS = {"augment": to_json(Augment()), "optim": {}, "schedule": {}, "loss": to_json(LossConfig())}
"""Parts of a recipe that the card has, and of some the values that are not worth a line."""
_UNSAID = ("distill_teacher",)  # a folder


@checked
def push(
    model: Model | Run,
    name: str | None = None,
    *,
    to: str | Path | None = None,
    which: Which = "last",
    license: str | None = None,
    private: bool = False,
    overwrite: bool = False,
) -> str:
    """Push a trained model to the Hugging Face Hub, or into a folder of the same layout.

    That is timm's: ``config.json``, ``model.safetensors`` and a model card, ``README.md``. timm
    must rebuild the same model from it, with equal weights and outputs, before it is put in place.
    `keymix.load` opens it, and where ``keymix.models`` was imported ``timm.create_model`` does.

    Args:
        model: The run, or its folder; or what `keymix.load` returns, or a model that keymix or timm
            built, whose card has no scores.
        name: ``OWNER/NAME`` on the Hub, with the token of ``hf auth login``.
        to: A folder, in place of the Hub.
        which: Weights of the ``last`` or the ``best`` epoch of a run.
        license: Of the weights, in the Hub's words, such as ``apache-2.0``; None to name none.
        private: Whether a new model on the Hub is private.
        overwrite: Replace what was pushed into the folder before.

    Returns:
        The folder, or the address on the Hub.

    Raises:
        UserError: If there is no such place, or it is taken; the model cannot be rebuilt by timm,
            or is another then; or the Hub refuses.
    """
    if (name is None) == (to is None):
        raise UserError("name a model on the Hub, OWNER/NAME, or a folder with to= (--to): one")
    if name is not None and not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no name of a model on the Hub: give OWNER/NAME")
    if license is not None and not re.fullmatch(r"[\w.+-]+", license):
        raise UserError(f"license={license!r}: give it in the Hub's words, such as apache-2.0")
    target = None if to is None else _free(Path(to), overwrite=overwrite)
    given: Any = load(model, which=which) if isinstance(model, str | Path | Run) else model
    network = copy.deepcopy(module_of(given)).cpu().float().eval()
    refuse_folded(network, "push")
    said = facts_of(*published(given, network))
    if isinstance(given, TrainedModel):
        describe(network, preprocessing_of(replace(given.data, image_size=given.image_size)))
    card = {"name": name, "license": license}
    if isinstance(given, TrainedModel) and given is not model and isinstance(given.source, Run):
        card |= _tested(given.source, which)
    try:
        with tempfile.TemporaryDirectory(
            prefix=".keymix-push-", dir=None if target is None else target.parent
        ) as place:
            made = Path(place) / "model"
            made.mkdir()
            _write(made, network, said, license)
            _compare(network, said, made)
            text = _card(made, given, network, said, **card)
            (made / CARD).write_text(text, encoding="utf-8")
            if target is None:
                return _upload(made, str(name), private=private)
            if target.exists():
                target.rename(Path(place) / "old")
            made.rename(target)
    except OSError as error:
        raise files.write_error(target or Path(tempfile.gettempdir()), error) from None
    return str(target)


def _free(target: Path, *, overwrite: bool) -> Path:
    """Refuse a folder that could not be written in the end; nothing is written there yet."""
    here = repr(str(target))
    if not target.parent.is_dir():
        raise UserError(f"to={here}: there is no folder {str(target.parent)!r}. Make it.")
    if target.exists():
        held = {each.name for each in target.iterdir()} if target.is_dir() else {""}
        if held - {CONFIG, WEIGHTS, CARD}:
            raise UserError(f"to={here} is no folder of a pushed model alone: name another")
        if held and not overwrite:
            raise UserError(f"to={here} exists: name another, or add overwrite=True (--overwrite)")
    return target


def _write(folder: Path, model: Any, said: FileFacts, license: str | None) -> None:
    """Write timm's files of a model, with nothing in them that may name a file."""
    architecture, arguments = rebuilt_by(model)
    cfg = model.pretrained_cfg
    model.pretrained_cfg = {name: cfg[name] for name in _DESCRIBED if name in cfg}
    model._model_args = _public(model._model_args)
    extra: dict[str, Any] = {KEY: to_json(said)}
    extra["pretrained_cfg"] = {"architecture": architecture, "license": license}
    if said.data is not None and said.data.classes:
        extra["label_names"] = list(said.data.classes)
    state = {name: each.contiguous().clone() for name, each in model.state_dict().items()}
    try:
        save_config_for_hf(model, str(folder / CONFIG), extra, arguments)
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except ValueError as error:  # an argument that JSON does not hold
        raise UserError(f"{type(model).__name__} cannot be pushed: {error}") from None


def _public(arguments: Any, name: str = "") -> Any:
    """Return a model's arguments without those of weights, which are in the file; refuse paths."""
    if isinstance(arguments, Mapping):
        return {k: _public(v, k) for k, v in arguments.items() if k not in OF_WEIGHTS}
    if isinstance(arguments, str | Path) and may_be_path(arguments):
        raise UserError(f"the model's argument {name} may be a path, which is not pushed")
    return arguments


@torch.inference_mode()
def _compare(model: nn.Module, said: FileFacts, folder: Path) -> None:
    """Let timm rebuild the model, and refuse one whose weights or outputs are others."""
    found = rebuilt(folder, "timm cannot rebuild the model, and nothing was written")
    wanted, state = model.state_dict(), found.state_dict()
    differing = [name for name in wanted if not _same(wanted[name], state[name])]
    task = getattr(model, "task", DEFAULT) if said.data is None else said.data.task
    shape: tuple[int, ...] = counting.default_input_size(model)
    if said.data is not None and said.data.time_steps is not None:
        shape = (said.data.time_steps, *shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = training_of(get_task(task)).example(shape, 2)
    pairs = zip(tensors_in(model(inputs)), tensors_in(found(inputs)), strict=True)
    if differing or not all(_same(a, b) for a, b in pairs):
        what = f"the weights {differing[0]}" if differing else "outputs"
        raise UserError(
            f"timm rebuilds another {type(model).__name__} of what it knows ({what} differ), and "
            "nothing was written: build it with keymix.create_model or timm.create_model"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True)


def _upload(folder: Path, name: str, *, private: bool) -> str:
    remedy = "Log in with `hf auth login`, and check the name and the network"
    with of_hub(f"the Hub did not take {name!r}", remedy):
        api = HfApi(library_name="keymix")
        api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Push by keymix")
    return f"https://huggingface.co/{name}"


# ---- the card -------------------------------------------------------------------------------


def _card(folder: Path, given: object, model: nn.Module, said: FileFacts, **more: Any) -> str:
    """Write the model card of a folder."""
    trained = given if isinstance(given, TrainedModel) else None
    source = None if trained is None else trained.source
    recipe = source.recipe if isinstance(source, Run) else None
    plain = {} if recipe is None else recipe.to_dict()
    settings = {
        f"{part}.{key}": value
        for part, usual in _PARTS.items()
        for key, value in plain.get(part, {}).items()
        if value not in (None, usual.get(key)) and key not in _UNSAID
    }
    cost = None
    with Attempt():
        cost = counting.count(model if trained is None else trained)
    view = {
        "formats": formats,
        "facts": said,
        "task": None if said.data is None else said.data.task_kind,
        "mixers": Counter(each.mixer_name for each in find_mixers(model).values()),
        "bytes": (folder / WEIGHTS).stat().st_size,
        "cost": cost,
        "recipe": recipe,
        "settings": settings,
    }
    card = environment("keymix.export").get_template("own/card.txt.j2")
    return card.render({**view, **more})


def _tested(run: Run, which: Which) -> dict[str, Any]:
    """Return what a finished run scores on its test split, and the interval of the first score."""
    if not run.done:
        return {}
    tested = run.summary.last if which == "last" else run.summary.best
    answers = read_answers(run.folder / files.PREDICTIONS, run.summary.data)[which]
    found, estimate = tested.test.scores, crossed_mean({run.recipe.seed: answers})
    return {"scores": found, "which": which, "units": answers.units, "estimate": estimate}
