# SPDX-License-Identifier: Apache-2.0
"""``keymix count``: the table, the JSON, and one clear line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keymix.analysis.counting import count
from keymix.cli import main
from keymix.models import create_model


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["count", *words]) == 0
    return capsys.readouterr().out


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def test_a_pipe_gets_tab_separated_lines_that_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(run(capsys, "vit_nano_p2_12"))
    assert table[0] == ["layer", "module", "params", "MACs", "FLOPs", "activations MiB"]
    body, total = table[1:-1], table[-1]
    wanted = count(create_model("vit_nano_p2_12"))
    assert total[0] == "total"
    assert [int(v) for v in total[2:5]] == [wanted.params, wanted.macs, 2 * wanted.macs]
    for column, whole in ((2, wanted.params), (3, wanted.macs), (4, wanted.flops)):
        assert sum(int(row[column]) for row in body) == whole
    assert "blocks.3" in [row[0] for row in body]


def test_json_is_the_whole_record(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("vit_micro_p4_32", "--mixers", "ska", "--input-size", "3,48,64", "--json")
    record = json.loads(run(capsys, *words))
    assert (record["model"], record["mixer"]) == ("vit_micro_p4_32", "static_key")
    assert record["input_size"] == [3, 48, 64]
    assert record["flops"] == 2 * record["macs"]
    keys = 12 * 16 + 1  # the grid of 48 x 64 pixels in patches of 4, and the class token
    model = create_model("vit_micro_p4_32", mixer="ska", img_size=(48, 64))
    assert model.blocks[0].attn.mixer.key.shape[1] == keys
    assert record["params"] == count(model).params


@pytest.mark.slow
def test_an_image_size_keeps_the_channels_that_the_model_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given, size in (("24", [1, 24, 24]), ("24,16", [1, 24, 16])):
        record = json.loads(run(capsys, "vit_nano_p2_12", "--image-size", given, "--json"))
        assert record["input_size"] == size
    wide = json.loads(run(capsys, "vit_nano_p2_12", "--input-size", "1,24,16", "--json"))
    assert record == wide


def test_several_mixers_get_a_line_of_totals_each(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "vit_nano_p2_12", "--mixers", "mhsa,ska(activation=relu),identity")
    assert [row[0] for row in rows(text)] == [
        "mixer",
        "softmax",
        "static_key(activation=relu)",
        "identity",
    ]


@pytest.mark.slow
def test_matched_mixers_are_as_wide_as_the_model_that_trains(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("vit_nano_p2_12", "--mixers", "mhsa,ska,identity", "--match", "params")
    head, own, wide, none = rows(run(capsys, *words))
    assert head[:3] == ["mixer", "heads x width", "params"]
    for row, mixer in ((own, "mhsa"), (wide, "ska")):
        built = create_model("vit_nano_p2_12", mixer=mixer, match="params")
        assert int(row[2]) == count(built).params
    assert own[1] != wide[1]
    assert none[1] == "none"
    plain = rows(run(capsys, "vit_nano_p2_12", "--mixers", "mhsa,ska"))[2]
    assert int(plain[1]) < int(wide[2])
    record = json.loads(run(capsys, *words[:2], "ska", *words[3:], "--json"))
    assert (record["inner_width"], record["params"]) == (wide[1], int(wide[2]))


@pytest.mark.slow
def test_any_timm_model_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, "vit_tiny_patch16_224", "--json"))["macs"] == 1_253_683_200
    small = json.loads(run(capsys, "resnet18", "--input-size", "1,32,32", "--json"))
    assert small["input_size"] == [1, 32, 32]


@pytest.mark.parametrize("error", ["TypeError", "ValueError", "AssertionError", "RuntimeError"])
def test_a_forward_that_fails_is_one_line(
    error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "failing.py"
    file.write_text(
        "import timm\n"
        "from torch import nn\n"
        "class Failing(nn.Linear):\n"
        "    def forward(self, x):\n"
        f"        raise {error}('it takes no image')\n"
        "@timm.models.register_model\n"
        f"def failing_{error.lower()}(pretrained=False, **given):\n"
        "    return Failing(2, 2)\n"
    )
    words = ("--input-size", "3,8,8", "--import", str(file))
    assert main(["count", f"failing_{error.lower()}", *words]) == 2
    text = capsys.readouterr().err
    assert "it takes no image" in text
    assert text.count("\n") == 1


def test_a_mixer_of_ones_own_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(
        "from keymix import TokenMixer, Traits, register_mixer\n"
        "@register_mixer('double_for_count')\n"
        "class Double(TokenMixer):\n"
        "    traits = Traits(mixes_prefix=False)\n"
        "    def forward(self, x, grid=None, bias=None):\n"
        "        return 2 * x\n"
    )
    words = ("vit_nano_p2_12", "--import", str(file), "--mixers", "double_for_count,identity")
    _, own, identity = rows(run(capsys, *words))
    assert own[1:4] == identity[1:4]


def test_an_operation_that_nobody_counts_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "distances.py"
    file.write_text(
        "import torch\n"
        "from keymix import TokenMixer, Traits, register_mixer\n"
        "@register_mixer('distances_for_count')\n"
        "class Distances(TokenMixer):\n"
        "    traits = Traits(maskable=False)\n"
        "    def forward(self, x, grid=None, bias=None):\n"
        "        return torch.cdist(x, x, p=1.0) @ x\n"
    )
    words = ["count", "vit_nano_p2_12", "--import", str(file), "--mixers", "distances_for_count"]
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["uncounted"] == ["aten._cdist_forward"]
    assert "aten._cdist_forward" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vit_nano_p2_13"], "vit_nano_p2_12"),
        (["vit_nano_p2_12", "--mixers", "sofmax"], "Did you mean 'softmax'"),
        (["vit_nano_p2_12", "--mixers", "softmax(num_heads=7)"], "does not divide"),
        (["vit_nano_p2_12", "--input-size", "banana"], "channels,height,width"),
        (["vit_nano_p2_12", "--input-size", "0,12,12"], "channels,height,width"),
        (["vit_nano_p2_12", "--image-size", "0"], "a side in pixels"),
        (["vit_nano_p2_13", "--image-size", "24"], "vit_nano_p2_12"),
        (["vit_nano_p2_12", "--depth", "-1"], "--depth -1"),
        (["vit_nano_p2_12", "--match", "params"], "give --mixers"),
        (["vit_nano_p2_12", "--mixers", "ska", "--match", "macs"], "'params'"),
        (["resnet18", "--mixers", "softmax"], "ResNet"),
        (["vit_nano_p2_12", "--import", "nothing.py"], "no such file"),
        (["vit_small_p4_32", "--image-size", "10000000"], "--image-size 10000000"),
        (["vit_small_p4_32", "--image-size", "1000000"], "(3, 1000000, 1000000)"),
        (["vit_nano_p2_12", "--input-size", "1000000000000,12,12"], "--input-size 1000000000000"),
        (["vit_nano_p2_12", "--num-classes", "1000000000000"], "num_classes=1000000000000"),
        (["qkformer_micro_32", "--time-steps", "1000000000"], "time_steps=1000000000"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["count", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("keymix: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_arguments_of_the_model_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["count", "setr", "--image-size", "64", "--json"]
    counts = []
    for backbone in ("test_resnet", "test_convnext"):
        options = ["--model.options.backbone", backbone, "--model.options.decoder_widths=[8]"]
        assert main([*words, *options]) == 0
        counts.append(json.loads(capsys.readouterr().out)["params"])
    assert counts[0] != counts[1]
    assert main([*words, "--model.options.backbone"]) == 2
    assert "--model.options.backbone" in capsys.readouterr().err
