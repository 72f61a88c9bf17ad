# SPDX-License-Identifier: Apache-2.0
"""The likeness of neighbouring attention maps in the loss: DeepViT's Eq. 6."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix.analysis.similarity import map_similarity
from keymix.data.loaders import Batch
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models import create_model
from keymix.tasks.classification.training import ClassificationTask
from keymix.train.engine import train
from keymix.train.losses import MapSimilarity
from keymix.train.model import build_model
from keymix.train.nonfinite import Losses
from keymix.train.recipe import Recipe, from_dict
from mixer_cases import gradients, stir
from tolerances import close, differs

Vary = Callable[[dict[str, Any]], Recipe]
TINY: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "depth": 4}
DEEP = {"loss.similarity": 0.7, "model.options.depth": 4, "model.drop_rate": 0.0}


def tiny(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = create_model("vit_nano_p2_12", **{**TINY, **options}).double()
    stir(model)
    return model


def images() -> Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.randn(3, 1, 12, 12, generator=noise, dtype=torch.float64)


class Measured(nn.Module):
    """The similarity as the output, so that its gradients can be asked for."""

    def __init__(self, model: nn.Module, blocks: int | None = None) -> None:
        super().__init__()
        self.model, self.similarity = model, MapSimilarity(model, blocks)

    def forward(self, x: Tensor) -> Tensor:
        with self.similarity.listening() as calls:
            self.model(x)
        return self.similarity.mean(calls)


def equation_2(model: Any, x: Tensor, layers: int) -> Tensor:
    """Mean cosine of neighbouring softmax maps, column by column, in plain steps."""
    tokens, maps = model.patch_embed(x) + model.pos_embed, []
    for block in model.blocks[:layers]:
        mixer = block.attn.mixer
        q, k, _ = mixer.qkv(block.norm1(tokens)).chunk(3, -1)
        heads = []
        for i in range(3):
            mine = slice(4 * i, 4 * i + 4)
            heads.append(torch.softmax(q[..., mine] @ k[..., mine].mT / 2, -1))
        maps.append(heads)
        tokens = block(tokens)
    cosines = []
    for first, second in pairwise(maps):
        for a, b in zip(first, second, strict=True):
            for t in range(a.shape[-1]):
                dot = (a[:, :, t] * b[:, :, t]).sum(1)
                cosines.append(dot / a[:, :, t].norm(dim=1) / b[:, :, t].norm(dim=1))
    return torch.cat(cosines).mean()


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "pairs"), [(None, 3), (0, 1), (1, 2), (2, 3)])
def test_it_is_the_mean_cosine_of_the_first_pairs(blocks: int | None, pairs: int) -> None:
    model = tiny()
    measured = Measured(model, blocks)
    assert measured.similarity.pairs == pairs
    value, grads = gradients(measured, images())

    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return equation_2(self.model, x, pairs + 1)

    wanted, expected = gradients(ByHand(), images())
    close(value, wanted, torch.float32)
    for key, grad in expected.items():
        assert torch.equal(grad.isnan(), grads[key].isnan()), key
        close(grads[key].nan_to_num(), grad.nan_to_num(), torch.float32)
    last = f"model.blocks.{pairs}.attn.mixer.qkv.weight"
    assert grads[last].abs().max() > 1e-6
    assert grads[f"model.blocks.{pairs}.mlp.fc1.weight"].isnan().all(), "nothing reads beyond it"


@pytest.mark.parametrize("mixer", ["softmax", "re_attention", "static_key"])
def test_it_is_what_analysis_measures(mixer: str) -> None:
    model = tiny(mixer=mixer).eval()
    similarity = map_similarity(model, images())
    means = [pair.mean for pair in similarity.adjacent]
    close(Measured(model)(images()), torch.tensor(sum(means) / 3), torch.float32)


def test_shared_maps_are_compared_too() -> None:
    options = {"img_size": 32, "embed_dim": 12, "depth": 4, "num_heads": 3, "shared_from": 2}
    model = create_model("deepvit_micro_p4_32", mixer="softmax", **options).double()
    stir(model)
    _, grads = gradients(Measured(model), torch.randn(2, 3, 32, 32, dtype=torch.float64))
    for key in ("blocks.1.attn.mixer.qkv.weight", "blocks.3.attn.mixer.theta"):
        assert grads[f"model.{key}"].abs().max() > 1e-9


def test_checkpointing_changes_neither_value_nor_gradients() -> None:
    model = tiny(mixer="re_attention").train()
    saving = copy.deepcopy(model)
    saving.set_grad_checkpointing()
    value, grads = gradients(Measured(model), images())
    again, repeated = gradients(Measured(saving), images())
    close(again, value)
    for key, grad in grads.items():
        close(repeated[key].nan_to_num(), grad.nan_to_num())


@pytest.mark.parametrize("name", ["vit", "cvt"])
def test_the_step_after_listening_is_as_before(name: str) -> None:
    model, x, blocks = tiny(mixer="re_attention"), images(), None
    if name == "cvt":  # its projections hold BatchNorms of their own
        model = create_model("cvt_micro_32", depths=(2, 1, 1)).double()
        x, blocks = torch.randn(2, 3, 32, 32, dtype=torch.float64), 0
    model.train()
    copied = copy.deepcopy(model)
    close(Measured(model, blocks)(x), Measured(copied, blocks)(x))
    copied = copy.deepcopy(model)
    Measured(model, blocks)(x).backward()
    copied(x)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert any("running" in key for key in model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(copied.state_dict()[key], value), f"reading maps moved {key}"
    assert not any(m._forward_pre_hooks for m in find_mixers(model).values())


# ---- the training step ------------------------------------------------------------------------


def task_of(recipe: Recipe, folder: Path) -> ClassificationTask:
    model = build_model(recipe, num_classes=10, in_chans=1, image_size=(12, 12))
    losses = Losses(model, str, folder, late=False)
    return ClassificationTask(recipe, model, num_classes=10, steps_per_epoch=4, losses=losses)


def batch() -> Batch:
    return Batch(images=images().float(), targets=torch.arange(3), index=torch.arange(3))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_loss_has_lambda_times_the_sum_and_the_record_has_not(
    vary: Vary, tmp_path: Path, precision: torch.dtype
) -> None:
    plain = task_of(vary({**DEEP, "loss.similarity": 0.0}), tmp_path)
    added = task_of(vary({**DEEP, "loss.similarity_blocks": 1}), tmp_path)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        cross_entropy = plain.training_step(batch(), 0)
        loss = added.training_step(batch(), 0)
        measured = Measured(added.model.train(), 1)(batch().images)
    close(loss, cross_entropy + 0.7 * 2 * measured, precision)
    assert differs(loss, cross_entropy)
    assert plain.losses.means()["loss"] == added.losses.means()["loss"] == cross_entropy.item()


@pytest.mark.slow
def test_training_lowers_the_similarity_and_records_it(vary: Vary, tmp_path: Path) -> None:
    weighted = {**DEEP, "schedule.epochs": 4, "optim.lr": 1e-2}
    runs = [
        train(vary({**weighted, "loss.similarity": w}), tmp_path / str(w)).metrics()
        for w in (1e-9, 3.0)
    ]
    free, pressed = ([line["train_similarity"] for line in run] for run in runs)
    assert pressed[-1] < pressed[0] - 0.1
    assert pressed[-1] < free[-1] - 0.1
    without = train(vary({**weighted, "loss.similarity": 0.0}), tmp_path / "0").metrics()
    assert "train_similarity" not in without[0]
    assert without[0].keys() == runs[0][0].keys() - {"train_similarity"}


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model.options.depth": 1}, "this model has fewer than two"),
        ({"loss.similarity_blocks": 3}, "first 5 layers, and this model has 4: choose at most 2"),
        ({"model.mixer": "pooling"}, r"blocks\.0\.attn\.mixer \(pooling\) forms none"),
        ({"model.mixer": "softmax/softmax/identity/softmax"}, r"blocks\.2.*identity"),
    ],
)
def test_a_model_without_such_maps_is_refused_before_a_file_is_written(
    vary: Vary, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        train(vary({**DEEP, **options}), tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_few_enough_blocks_do_not_reach_a_layer_without_a_map(vary: Vary) -> None:
    mixed = {"model.mixer": "softmax/softmax/identity/softmax", "loss.similarity_blocks": 0}
    recipe = vary({**DEEP, **mixed})
    assert build_model(recipe, num_classes=10, in_chans=1, image_size=(12, 12)) is not None


def test_maps_of_unlike_shapes_are_refused() -> None:
    model = tiny(mixer=["mhsa", "mhsa", "random", "mhsa"])
    close(Measured(model, 0)(images()), Measured(model, 0)(images()))
    with pytest.raises(UserError, match=r"blocks\.1.*\(3, 36, 36\).*blocks\.2.*\(1, 36, 36\)"):
        Measured(model)(images())


def test_a_recipe_from_before_the_term_still_loads(tiny_recipe: Recipe) -> None:
    values = json.loads(json.dumps(tiny_recipe.to_dict()))
    for name in ("similarity", "similarity_blocks"):
        del values["loss"][name]
    assert from_dict(values) == tiny_recipe
