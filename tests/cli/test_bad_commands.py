# SPDX-License-Identifier: Apache-2.0
"""Mistakes in commands as they are made: the words, and the one line that answers them.

``python tests/cli/test_bad_commands.py`` prints the table of `docs/reliability.md`. Lines that come
from other libraries' words or lists are left out: they change with those.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from keymix.cli import main

ROWS = (
    ("train digit_vit", "unknown recipe 'digit_vit'. Did you mean 'digits_vit'?"),
    (
        "train digits_vit --optm.lr 1e-3",
        "unknown option '--optm.lr'. Did you mean '--optim.lr' or '--optim.clip_grad' or "
        "'--optim.name'?",
    ),
    (
        "train digits_vit --devices 0",
        "--devices 0: give how many devices train together, such as 2.",
    ),
    (
        "train digits_vit --neuron plif",
        "unknown option '--neuron': the neurons of a spiking model are --model.options.neuron: "
        "lif, if, plif or relu.",
    ),
    (
        "train digits_vit --time-steps 2",
        "unknown option '--time-steps': the time steps of a spiking model are "
        "--model.options.time_steps on images, --data.time_steps on recordings of events.",
    ),
    (
        "train digits_vit --data.time_steps 2",
        "data.time_steps = 2: data digits holds images, not events. Leave it out, or take a "
        "recipe for images, such as digits_vit or small_images_vit; a spiking model's steps on "
        "images are model.options.time_steps.",
    ),
    ("train digits_vit --optim.lr -1", "optim.lr = -1.0: must be a number in [1e-12, 1000.0]."),
    (
        "train digits_vit --mixer skaa",
        "unknown mixer 'skaa'. Did you mean 'ska' or 'cska' or 'ssa'?",
    ),
    (
        "train digits_vit --mixer 'ska(activation=rellu)'",
        "mixer 'static_key': activation='rellu' is not one of softmax, gelu, relu, star_relu",
    ),
    (
        "train digits_vit --model.options.depth 0",
        "model 'vit_nano_p4_12': depth=0 must be a whole number of 1 or more",
    ),
    ("train digits_vit --epochs 0", "schedule.epochs = 0: must be a whole number in [1, 1000000]."),
    (
        "train digits_vit --data.batch_size 1e12",
        "data.batch_size = 1000000000000: must be a whole number in [1, 65536].",
    ),
    (
        "train digits_vit --schedule.min_lr 0.5",
        "schedule.min_lr = 0.5: must be at most optim.lr = 0.005, the peak; set both.",
    ),
    (
        "train digits_vit --seed 18446744073709551616",
        "seed = 18446744073709551616: must be a whole number in [0, 18446744073709551615].",
    ),
    (
        "train digits_vit --model.options.depth 1000000",
        "depth=1000000 must be at most 1,024",
    ),
    (
        "train digits_vit --augment.rand_augment 2,99",
        "augment.rand_augment = (2, 99): must be a whole number in [0, 14] and a whole number in "
        "[0, 30].",
    ),
    (
        "train digits_vit --out notes",
        "the folder 'notes' is not empty and holds no run: name another with --out.",
    ),
    (
        "count vit_nano_p2_12 --time-steps 2",
        "time_steps=2 is for spiking models such as qkformer_micro_32; MixerVisionTransformer has "
        "no time steps. Leave --time-steps out.",
    ),
    (
        "train digits_vit --data moving_digits",
        "augment.crop_padding=1 does not fit frames of events, which take augment.flip, "
        "augment.snn_wide. Set it to 0, or take a recipe for frames of events, such as "
        "moving_digits_qkformer.",
    ),
    (
        "compare --mixers qkta,mhsa",
        "spiking mixers (qk_token) and dense ones (softmax) take different tokens and cannot be "
        "compared in one model: name mixers of one kind. --ann adds a spiking baseline's "
        "ANN counterpart.",
    ),
    (
        "compare --data moving_digits --model vit_micro_p4_32",
        "model 'vit_micro_p4_32' takes images, and data 'moving_digits' has frames of events [B, "
        "T, C, H, W]: choose a spiking model, such as qkformer_micro_32 for frames of 32x32 "
        "pixels or qkformer_hst_2_256 for 128x128, or data of images.",
    ),
    (
        "train digits_vit --task.options.masks multilabel",
        "task.options.masks = 'multilabel': the task classification of the data has no options; "
        "leave it out.",
    ),
    (
        "train digits_vit --augment.vertical_flip true",
        "augment.vertical_flip=True does not fit images, which take augment.flip, "
        "augment.crop_padding, augment.rand_augment, augment.rand_augment_first, "
        "augment.auto_augment, augment.erasing. Set it to false, or take a recipe for images, such "
        "as digits_vit.",
    ),
    (
        "train digits_vit --data masks:leaves",
        "augment.crop_padding=1 does not fit images with masks, which take augment.flip, "
        "augment.vertical_flip, augment.shift_scale_rotate, augment.coarse_dropout, "
        "augment.brightness_contrast. Set it to 0, or take a recipe for images with masks, such as "
        "small_masks_unet.",
    ),
    (
        "train digits_vit --data uwgi:scans --task.options.masks both",
        "unknown task.options.masks 'both'. Choose from exclusive, multilabel.",
    ),
    (
        "train digits_vit --data uwgi:scans --data.stack 2",
        "data.stack = 2: must be an odd number of slices, such as 3.",
    ),
    (
        "train digits_vit --data uwgi:scans --data.split_by slices",
        "unknown data.split_by 'slices'. Did you mean 'slice'?",
    ),
    (
        "train digits_vit --data uwgi:scans --data.test_fraction 2",
        "data.test_fraction = 2.0: must be a number in (0, 1).",
    ),
    (
        "data check masks:leaves --stack 3",
        "data.stack = 3: images of masks:leaves have no neighbours. Leave it out, or take data of "
        "scans, such as uwgi:PATH.",
    ),
    ("compare --seeds 0", "seeds=0 must be at least 1"),
    (
        "compare --mixers mhsa,ska --no-controls --seeds 1000000",
        "1,000,000 seeds of 2 mixers are 2,000,000 runs, and a comparison holds at most 10,000: "
        "give at most 5,000 seeds",
    ),
    ("analyze", "which analysis? Choose from attention, collapse, complexity, memory, spikes."),
    ("analyze complexty", "unknown analysis 'complexty'. Did you mean 'complexity'?"),
    ("data", "which verb of keymix data? Choose from check, shard."),
    ("help cuont", "unknown verb 'cuont'. Did you mean 'count'?"),
    (
        "count resnet18 --image-size 10000000",
        "--image-size 10000000: give a side in pixels, such as 48, or height,width, each at most "
        "1,048,576",
    ),
    (
        "compare --mixers ska --no-controls",
        "only 'static_key' to compare. Name at least two mixers.",
    ),
    (
        "compare --out notes",
        "the folder 'notes' is not empty and holds no comparison. Name another with --out.",
    ),
    (
        "report notes",
        "'notes' holds no comparison: it has no plan.json. Name the folder given as --out to "
        "keymix compare.",
    ),
    ("eval notes", "'notes' is no run's folder: it holds no recipe.json."),
)


def table() -> str:
    """The rows as a table in Markdown."""
    rows = [f"| `{command}` | `{answer}` |" for command, answer in ROWS]
    return "\n".join(["| `keymix` … | answered |", "|---|---|", *rows]) + "\n"


@pytest.mark.parametrize(("command", "answer"), ROWS, ids=[command for command, _ in ROWS])
def test_the_line_is_as_the_table_says(
    command: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    assert main(shlex.split(command)) == 2
    assert capsys.readouterr().err.replace("`", "") == f"keymix: error: {answer}\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine.txt", "notes"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_memory_that_runs_out_anywhere_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("keymix.cli.list.main", run)
    assert main(["list"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("keymix: error: out of memory in `keymix list`: ")
    assert text.count("\n") == 1
    error = RuntimeError("a mistake of keymix")
    with pytest.raises(RuntimeError, match="a mistake of keymix"):
        main(["list"])


@pytest.mark.parametrize("words", [["help", "data"], ["help", "analyze"], ["help"], []])
def test_help_that_is_asked_for_is_no_mistake(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    text = capsys.readouterr()
    assert text.out.startswith(" ".join(["usage: keymix", *words[1:]]))
    assert not text.err


def test_the_page_holds_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    assert table() in page.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.write(table())
