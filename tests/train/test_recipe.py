# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from keymix.errors import UserError
from keymix.recipes import get
from keymix.train.recipe import (
    DataConfig,
    Recipe,
    from_dict,
    merge,
    parse_value,
    paths,
    read_mapping,
    read_recipe,
    replace_path,
)
from keymix.train.step import make_optimizer, make_schedule


def test_recipe_survives_json_and_yaml(tiny: Recipe, tmp_path: Path) -> None:
    several = {"optim.betas": [0.9, 0.95], "augment.rand_augment": [2, 9]}
    full = replace_path(tiny, {**several, "data.image_size": [32, 48]})
    assert full.data.image_size == (32, 48)
    (tmp_path / "a.json").write_text(json.dumps(full.to_dict()))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(full.to_dict()))
    assert read_recipe(tmp_path / "a.json") == full
    assert read_recipe(tmp_path / "a.yaml") == full


def test_unknown_key_names_the_nearest(tiny: Recipe) -> None:
    with pytest.raises(UserError, match=r"'optim.learning_rte'|optim\.") as refused:
        replace_path(tiny, {"optim.lrr": 1})
    assert "optim.lr" in str(refused.value)
    with pytest.raises(UserError, match="schedule"):
        from_dict({**tiny.to_dict(), "shedule": {}})
    with pytest.raises(UserError, match=r"optim\.lr"):
        from_dict({**tiny.to_dict(), "optim": {"lrr": 1}})


def test_missing_required_key_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.spec"):
        from_dict({"name": "x", "data": {}, "model": {"name": "m"}})


BAD_NAMES = [
    "../../../x", "/absolute", "a/b", "a\\b", "..", ".", ".hidden", "", " ", "a ", "a\0b", "a\nb",
    "a\x1b[31m", "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_is_no_path(tiny: Recipe, tmp_path: Path, name: str) -> None:
    values = tiny.to_dict() | {"name": name}
    for suffix, text in ((".json", json.dumps(values)), (".yaml", yaml.safe_dump(values))):
        file = tmp_path / f"recipe{suffix}"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"name = "):
            read_recipe(file)
    with pytest.raises(UserError, match=r"^name = ") as refused:
        replace_path(tiny, {"name": name})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["a", "digits_vit", "vit v1.2", "größer", "日本", "x" * 100, "a..b"]
)
def test_a_name_of_any_script_is_one(tiny: Recipe, name: str) -> None:
    assert replace_path(tiny, {"name": name}).name == name


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optim.lr", "fast"),
        ("optim.lr", -1.0),
        ("optim.lr", float("nan")),
        ("optim.betas", [0.9]),
        ("optim.accumulate", 0),
        ("data.batch_size", 1.5),
        ("data.batch_size", True),
        ("data.val_fraction", 1.0),
        ("schedule.epochs", 0),
        ("schedule.warmup_epochs", 9),
        ("schedule.cooldown_epochs", 99),
        ("schedule.cooldown_epochs", -1),
        ("schedule.name", "cosin"),
        ("schedule.power", 0.0),
        ("schedule.power", float("inf")),
        ("loss.label_smoothing", 1.0),
        ("loss.mixup", -0.1),
        ("loss.mixup_prob", 0.5),
        ("loss.mixup_off_epoch", 3),
        ("loss.similarity_blocks", 4),
        ("ema", 1.0),
        ("precision", "64"),
        ("model.drop_path", 1.0),
        ("augment.flip", "maybe"),
    ],
)
def test_unfit_value_is_refused_by_name(tiny: Recipe, path: str, value: object) -> None:
    with pytest.raises(UserError, match=path.rpartition(".")[2]):
        replace_path(tiny, {path: value})


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("data.image_size", "48", 48),
        ("data.image_size", "32,48", (32, 48)),
        ("data.image_size", "[32, 48]", (32, 48)),
        ("data.image_size", "null", None),
        ("data.limit", "1e3", 1000),
        ("optim.betas", "0.9,0.95", (0.9, 0.95)),
        ("optim.lr", "1e-3", 1e-3),
        ("augment.flip", "true", True),
        ("model.options", "{depth: 2}", {"depth": 2}),
        ("model.options.eps", "1e-5", 1e-5),
        ("task.options.class_weights", "{leaf: 1e-1, stem: 2E3}", {"leaf": 0.1, "stem": 2e3}),
        ("model.options.qk_norm", "true", True),
    ],
)
def test_options_are_read_in_their_types(path: str, text: str, value: object) -> None:
    assert parse_value(path, text) == value
    assert type(parse_value(path, text)) is type(value)


def test_equal_sides_are_one_size(tiny: Recipe) -> None:
    square = replace_path(tiny, {"data.image_size": [32, 32]})
    assert square == replace_path(tiny, {"data.image_size": 32})


@pytest.mark.parametrize("size", [0, (3, 4, 5), (32,), (32, 0), (32, 4.5)])
def test_image_size_is_a_side_or_height_and_width(size: object) -> None:
    with pytest.raises(UserError, match=r"data\.image_size = .* or height,width\.$"):
        DataConfig(spec="digits", image_size=size)  # type: ignore[arg-type]


def test_yaml_1_1_numbers_are_numbers(tiny: Recipe, tmp_path: Path) -> None:
    values = tiny.to_dict()
    text = yaml.safe_dump(values).replace("lr: 0.001", "lr: 1e-3")
    (tmp_path / "r.yaml").write_text(text)
    assert read_recipe(tmp_path / "r.yaml").optim.lr == 1e-3


def test_partial_mapping_merges_by_field(tiny: Recipe) -> None:
    merged = merge(tiny, {"optim": {"lr": 0.5}, "seed": 3})
    assert (merged.optim.lr, merged.seed) == (0.5, 3)
    assert merged.optim.weight_decay == tiny.optim.weight_decay


def test_model_options_are_open_by_key(tiny: Recipe) -> None:
    assert replace_path(tiny, {"model.options.depth": 2}).model.options["depth"] == 2
    assert replace_path(tiny, {"model.options.depth": 2}).model.options["num_heads"] == 2
    inner = replace_path(tiny, {"model.options.stem.depth": 3}).model.options
    assert inner["stem"] == {"depth": 3}
    with pytest.raises(
        UserError, match=r"model\.options\.num_heads\.more: num_heads is 2, which has"
    ):
        replace_path(tiny, {"model.options.num_heads.more": 1})


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b\n", ""])
def test_file_that_holds_no_recipe_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml") as refused:
        read_recipe(tmp_path / "bad.yaml")
    assert "\n" not in str(refused.value)


NESTED = "[" * 5000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.yaml", NESTED),
        ("deep.json", '{"a":' * 20_000),
        ("itself.yaml", "&a\nname: x\nmodel: {options: *a}\n"),
        ("twice.yaml", "optim: {lr: 1, lr: 0.5}"),
        ("number.yaml", "1: 2"),
        ("number.yaml", "model: {options: {1: 2}}"),
        ("date.yaml", "model: {options: {x: 2001-01-01}}"),
        ("set.yaml", "model: {options: {x: !!set {a}}}"),
        ("tag.yaml", "!!python/object/apply:os.getcwd []"),
        ("digits.json", f'{{"seed": {"9" * 5000}}}'),
        ("digits.yaml", f"seed: {'9' * 5000}"),
        ("utf16.yaml", "optim: {lr: 0.1}".encode("utf-16")),
        ("latin.yaml", "name: caf\u00e9".encode("latin-1")),
        ("list.json", "[1]"),
        ("number.json", "3"),
    ],
)
def test_a_broken_file_is_one_clear_error(
    name: str, text: str | bytes, tiny: Recipe, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=name) as refused:
        merge(tiny, read_mapping(file))
    assert "\n" not in str(refused.value)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name in ("folder.yaml", "nothing.yaml"):
        with pytest.raises(UserError, match=name):
            read_mapping(tmp_path / name)


def test_aliases_merges_and_a_byte_order_mark_are_read(tiny: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_bytes(b"\xef\xbb\xbfoptim: &o {lr: 0.25, name: sgd}\nmodel: {options: {<<: *o}}")
    merged = merge(tiny, read_mapping(file))
    assert (merged.optim.lr, merged.model.options) == (0.25, {"lr": 0.25, "name": "sgd"})


def test_a_broken_option_is_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"^--model\.options\.x = "):
        parse_value("model.options.x", NESTED)
    with pytest.raises(UserError, match=r"^--seed = "):
        parse_value("seed", "9" * 5000)


def test_every_field_has_a_dotted_path() -> None:
    assert {"name", "data.spec", "augment.flip", "optim.lr", "seed"} <= set(paths())


def test_recipes_import_without_torch() -> None:
    code = (
        "import sys, keymix.recipes as r; r.get('digits_vit'); r.names(); "
        "assert 'torch' not in sys.modules, 'torch'; assert 'lightning_fabric' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MASKS: dict[str, Any] = {
    "name": "masks",
    "data": {"spec": "uwgi:scans"},
    "model": {"name": "setr_micro"},
    "task": {"options": {"dice": 0.25, "masks": "multilabel"}},
}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dicee": 0.5}, r"task\.options\.dice'"),
        ({"dice": "much"}, r"task\.options\.dice = 'much'"),
        ({"dice": 2}, r"task\.options\.dice = 2\.0"),
        ({"masks": "both"}, r"task\.options\.masks 'both'"),
        ({"tversky": "0.3,0.7"}, r"task\.options\.tversky = \(0\.3, 0\.7\)"),  # without dice
        ({"dice": 0.5, "tversky": "-1,1"}, r"task\.options\.tversky = \(-1\.0, 1\.0\)"),
        ({"focal": 0.5}, r"task\.options\.focal = 0\.5"),
        ({"boundary": -1}, r"task\.options\.boundary = -1\.0"),
        ({"class_weights": "even"}, r"task\.options\.class_weights = 'even'"),
        ({"class_weights": {"stomach": -2}}, r"task\.options\.class_weights = .*stomach"),
    ],
)
def test_options_are_checked_by_their_task(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        from_dict({**MASKS, "task": {"options": options}})


def test_options_of_another_task_are_refused(tiny: Recipe) -> None:
    with pytest.raises(UserError, match=r"task\.options\.dice = 0\.5: .* classification"):
        replace_path(tiny, {"task.options.dice": 0.5})
    assert replace_path(tiny, {"task.options.dice": None}) == tiny


def test_equal_options_are_equal_records() -> None:
    typed = from_dict({**MASKS, "task": {"options": {"dice": "0.25", "masks": "multilabel"}}})
    assert typed == from_dict(MASKS)
    assert typed.data.task_options == {"masks": "multilabel"}
    assert from_dict(typed.to_dict()) == typed
    assert from_dict({**MASKS, "task": {"options": {"dice": 0.0}}}).task.options == {}
    weighted = {"dice": 0.5, "tversky": "0.3,0.7", "class_weights": {"stomach": 2}}
    typed = from_dict({**MASKS, "task": {"options": weighted}})
    assert typed.task.options == {**weighted, "tversky": (0.3, 0.7)}
    assert from_dict(typed.to_dict()) == typed


def test_two_milestones_make_a_tenth_and_a_hundredth_of_the_rate() -> None:
    recipe = replace_path(
        get("digits_vit"),
        {
            "optim.lr": 1.0,
            "schedule.name": "multistep",
            "schedule.epochs": 12,
            "schedule.warmup_epochs": 0,
            "schedule.milestones": [8, 11],
        },
    )
    optimizer = make_optimizer(recipe.optim, torch.nn.Linear(2, 2))
    schedule = make_schedule(recipe, optimizer, updates_per_epoch=10)
    assert schedule is not None
    rates = []
    for update in range(120):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(update + 1)
    falls = [i for i in range(1, 120) if rates[i] != rates[i - 1]]
    assert falls == pytest.approx([80, 110], abs=1)  # timm's come an update early
    assert [rates[0], rates[90], rates[-1]] == pytest.approx([1.0, 0.1, 0.01])
