# SPDX-License-Identifier: Apache-2.0
"""What weights are read from, and what is refused, in one line that names the culprit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.models import create_model, load_weights
from keymix.weights_file import packed
from tolerances import close


def vit(**options: Any) -> nn.Module:
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mixer": "ska", **options}
    return create_model("vit_micro_p4_32", **options).eval()


def refused(source: Any) -> str:
    model = vit(img_size=16)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model, source)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_a_dict_of_other_things_names_the_first() -> None:
    state = vit(img_size=16).state_dict()
    assert "key 3 is no name" in refused({**state, 3: torch.zeros(1)})
    assert "'norm.bias' is a list, no tensor" in refused({**state, "norm.bias": [0.0] * 16})
    assert "'net' is a dict of tensors in a dict" in refused({"net": state, "epoch": 1})
    assert "'epoch' is a int" in refused({"epoch": 1})


@pytest.mark.parametrize("prefix", ["model.", "module.", "model.module.", "module.model."])
def test_prefixes_of_wrappers_are_left_out(prefix: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = vit(img_size=16).state_dict()
    wrapped = {f"{prefix}{name}": tensor for name, tensor in state.items()}
    checkpoint = {
        "epoch": 3,
        "global_step": 12,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": wrapped,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []}],
        "lr_schedulers": [],
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(checkpoint, tmp_path / "last.ckpt")
    for source in (wrapped, tmp_path / "last.ckpt"):
        model = vit(img_size=16)
        loaded = load_weights(model, source)
        assert set(loaded.copied) == set(state)
        assert loaded.missing == loaded.unused == ()
        assert all(torch.equal(model.state_dict()[name], t) for name, t in state.items())


@together
@pytest.mark.parametrize("source", [nn.Linear(2, 2), None, 3, "", " "])
def test_what_is_no_source_of_weights(source: Any, shapes_checked: bool) -> None:
    if shapes_checked and not isinstance(source, str):
        pytest.skip("the shape checks refuse another kind of value first")
    assert "give model.state_dict(), a file or a run's folder" in refused(source)


def test_files_of_other_things_are_distinguished_from_damaged_ones(tmp_path: Path) -> None:
    note = tmp_path / "note.pth"
    note.write_text("Dear reader,\nno weights here.\n")
    message = refused(note)
    assert "note.pth" in message
    assert "begins with b'Dear'" in message
    assert "weights_only" not in message
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    assert "list.pth" in refused(tmp_path / "list.pth")
    torch.save(vit(img_size=16), tmp_path / "model.pth")  # a pickle of the model itself
    message = refused(tmp_path / "model.pth")
    assert "model.pth" in message
    assert "weights_only" not in message
    assert "state_dict()" in message


def test_a_folder_is_a_run_or_refused_without_a_word_of_timms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert "holds no weights_last.safetensors" in refused(tmp_path)
        assert "no such file" in refused(tmp_path / "gone.pth")
    assert "No checkpoint found" not in caplog.text
    theirs, mine = vit(img_size=16), vit(img_size=16)
    nn.init.normal_(theirs.pos_embed)
    data = {"image_size": [16, 16], "classes": ["a"], "in_chans": 3, "task": "classification"}
    data |= {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0}
    content = packed(theirs.state_dict(), {"data": data})
    (tmp_path / "weights_last.safetensors").write_bytes(content)
    (tmp_path / "recipe.json").write_text("{}")
    assert "name the run's folder" in refused(tmp_path / "recipe.json")
    assert load_weights(mine, tmp_path).missing == ()
    close(mine.pos_embed, theirs.pos_embed)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    state = {k: v.clone() for k, v in vit(img_size=16).state_dict().items()}
    state["blocks.1.mlp.fc1.weight"][0, 0] = value
    assert "blocks.1.mlp.fc1.weight holds numbers that are not finite" in refused(state)
