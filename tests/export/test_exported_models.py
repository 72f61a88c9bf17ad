# SPDX-License-Identifier: Apache-2.0
"""A file of any family computes what the model does, and what does not is never written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keymix
from keymix import Traits, UserError, fold_for_inference
from keymix.hosts.base import find_mixers
from keymix.mixers.base import TokenMixer
from keymix.mixers.registry import register_mixer
from keymix.mixers.static_key import StaticKeyAttention
from keymix.train.exported import read_exported
from mixer_cases import stir
from shrunk import images, shrunk
from tolerances import close

FEWER: dict[str, dict[str, Any]] = {  # blocks: one of each kind
    "vit": {"depth": 1},
    "cait": {"depth": 1},
    "deepvit": {"depth": 1},
    "swin": {"depths": (2, 1), "num_heads": (1, 2), "merging": (2,)},
    "cvt": {"depths": (1, 1, 1)},
    "caformer": {"depths": (1, 1, 1, 1)},
    "spikformer": {"depth": 1, "time_steps": 2},
    "setr": {"depth": 1},
    "plain": {},
}
DETECTOR: dict[str, Any] = {
    "backbone": "caformer_micro_32",
    "backbone_options": {"depths": (1, 1, 1, 1)},
    "backbone_size": 64,
    "mixer": "static_key",
    "num_classes": 3,
    "out_channels": 8,
}
# Every host, stem and decoder, and every mixer; benchmarks/export_table.py crosses them. ``.pt2``
# files are quicker to make. Mixers that take no mask stand where no window shifts. What follows
# the size of images is below.
CASES = [
    ("vit_micro_p4_32", "static_key", "onnx"),
    ("vit_micro_p4_32", "key_value", "onnx"),
    ("cait_micro_p4_32", "conv_static_key", "onnx"),
    ("swin_micro_p2_32", "re_attention/softmax/softmax", "onnx"),
    ("caformer_micro_32", "sep_conv", "pt2"),
    ("deepvit_micro_p4_32", "random", "pt2"),
    ("setr_qkv_ce", "pooling", "pt2"),
    ("setr_qkv_cvt", "softmax/identity/static_key_re_attention", "pt2"),
    ("plain_convnet", None, "pt2"),
    ("plain_unet", None, "pt2"),
]


@pytest.fixture(autouse=True)
def _without_hook(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("exporters cannot see through the shape checks")
    pytest.importorskip("onnxscript")


def small(name: str, mixer: Any = None, **options: Any) -> nn.Module:
    """A small model whose answers vary; a spiking one with the statistics of a batch.

    Slashes divide the mixers of blocks or stages.
    """
    fewer = FEWER["cvt"] if name == "setr_qkv_cvt" else FEWER[name.partition("_")[0]]
    mixers = mixer.split("/") if isinstance(mixer, str) and "/" in mixer else mixer
    model = shrunk(name, mixer=mixers, **fewer, **options).eval()
    stir(model)
    return model


def answers(path: Path, x: Tensor, **options: Any) -> Tensor:
    found: Tensor = keymix.load(path, **options).outputs([*x])
    return found


@pytest.mark.parametrize(
    ("name", "mixer", "ending"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i > 0)) for i, case in enumerate(CASES)],
)
def test_a_file_answers_as_its_model_does(
    name: str, mixer: str | None, ending: str, tmp_path: Path
) -> None:
    model, file = small(name, mixer), tmp_path / f"model.{ending}"
    format = "onnx" if ending == "onnx" else "torch"
    found = keymix.export(model, file, format=format, images=images(name, 4))
    assert found.same
    assert [check.batch for check in found.checks] == [1, 3]
    x = images(name, 5, seed=3)
    with torch.no_grad():
        close(read_exported(file)[0](x), model(x))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.slow
def test_a_file_without_images_given_is_loaded(tmp_path: Path) -> None:
    model, file = small("vit_micro_p4_32", "static_key"), tmp_path / "model.pt2"
    found = keymix.export(model, file, format="torch")
    assert found.bytes == file.stat().st_size
    x = images("vit_micro_p4_32", 5)
    with torch.no_grad():
        close(answers(file, x), model(x))


@pytest.mark.slow
def test_halves_are_near_and_inputs_stay_floats(tmp_path: Path) -> None:
    model, file = small("vit_micro_p4_32", "softmax"), tmp_path / "model.onnx"
    whole = keymix.export(model, tmp_path / "whole.onnx")
    half = keymix.export(model, file, half=True)
    assert 1e-5 < half.difference < 2e-2
    assert half.bytes < whole.bytes
    x = images("vit_micro_p4_32", 5)
    with torch.no_grad():
        close(answers(file, x), model(x), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mixer", "step"),
    [
        ("vit_micro_p4_32", "static_key", 4),
        ("deepvit_micro_p4_32", "re_attention", 4),
    ],
)
def test_images_of_other_sizes_are_answered_as_by_the_model_at_their_size(
    name: str, mixer: str, step: int, tmp_path: Path
) -> None:
    model, file = small(name, mixer), tmp_path / "model.onnx"
    resize = "interpolate" if mixer == "static_key" else None
    found = keymix.export(model, file, dynamic="size", resize=resize, images=images(name, 4))
    assert found.step == (step, step)
    height, width = images(name).shape[-2:]
    own, other = (height, width), (height + 5 * step, width + 3 * step)
    assert own in {(check.height, check.width) for check in found.checks}
    assert len({(check.height, check.width) for check in found.checks}) == 2
    for size in (own, other):
        x = torch.randn(2, 3, *size)
        there = small(name, mixer)
        there.load_state_dict(model.state_dict())
        keymix.models.set_image_size(there, size, resize=resize)
        with torch.no_grad():
            close(answers(file, x, image_size=size), there(x))
    with pytest.raises(UserError, match=rf"{step}x{step}"):
        keymix.load(file, image_size=(height + 1, width))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mixer", "step"),
    [("setr_micro", "static_key", 8), ("spikformer_4_384", None, 16)],
)
def test_masks_and_spikes_follow_the_size_of_images(
    name: str, mixer: str | None, step: int, tmp_path: Path
) -> None:
    model, file = small(name, mixer), tmp_path / "model.onnx"
    resize = "interpolate" if mixer else None
    found = keymix.export(model, file, dynamic="size", resize=resize, images=images(name, 4))
    assert found.step == (step, step)
    height, width = images(name).shape[-2:]
    x = torch.randn(2, 3, height + 5 * step, width + 3 * step)
    keymix.models.set_image_size(model, (x.shape[-2], x.shape[-1]), resize=resize)
    with torch.no_grad():
        close(read_exported(file)[0](x), model(x))


@pytest.mark.parametrize("resize", ["interpolate", None])
def test_keys_on_a_grid_of_their_own_are_refused_without_a_policy(
    resize: str | None, tmp_path: Path
) -> None:
    model = small("vit_micro_p4_32", "static_key", mixer_options={"key_grid": "1/4"})
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.mixer.*--dynamic batch") as raised:
        keymix.export(model, tmp_path / "model.onnx", dynamic="size", resize=resize)
    assert "resize" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model.onnx", {"dynamic": "size", "resize": "interpolate"}),
        ("model.pt2", {"dynamic": "batch", "half": True, "format": "torch"}),
    ],
)
def test_the_pyramid_of_a_detector_is_exported_by_level(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = keymix.create_model("mask_rcnn", **DETECTOR).eval()
    given = images("caformer_micro_32", 4)[..., :50]
    found = keymix.export(model, tmp_path / name, images=given, **options)
    assert {(check.height, check.width) for check in found.checks} >= {(64, 64)}
    file, facts = read_exported(tmp_path / name)
    assert facts.model.levels == ("p2", "p3", "p4", "p5", "p6")
    sides = (96, 64) if options["dynamic"] == "size" else (64, 64)
    x = torch.randn(2, 3, *sides)
    if options["dynamic"] == "size":
        for mixer in find_mixers(model).values():
            if isinstance(mixer, StaticKeyAttention):
                mixer.take_policy("interpolate")
    with torch.no_grad():
        wanted = model.forward_features(x)
    maps = file(x)
    assert [each.shape[-2:] for each in maps.values()] == [
        (-(-sides[0] // 2**i), -(-sides[1] // 2**i)) for i in range(2, 7)
    ]
    for level, each in zip(facts.model.levels, wanted.values(), strict=True):
        close(maps[level], each, torch.float16 if "half" in options else torch.float32)


@pytest.mark.parametrize(
    ("name", "mixer", "resize", "culprit"),
    [
        ("vit_micro_p4_32", "static_key", None, "interpolate"),
        ("vit_micro_p4_32", "static_key", "pool_values", "interpolate"),
        ("cait_micro_p4_32", "softmax", None, "--dynamic batch"),
        ("swin_micro_p2_32", "softmax", None, "--dynamic batch"),
    ],
)
def test_what_cannot_follow_the_size_is_refused_with_the_remedy(
    name: str, mixer: str, resize: str | None, culprit: str, tmp_path: Path
) -> None:
    model = small(name, mixer)
    with pytest.raises(UserError, match=culprit):
        keymix.export(model, tmp_path / "model.onnx", dynamic="size", resize=resize)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("model", ["a silent spiking model", "a model of zeros"])
def test_outputs_that_do_not_vary_are_refused(model: str, tmp_path: Path) -> None:
    options = {"embed_dim": 32, "num_heads": 2, "depths": (1, 1, 1), "time_steps": 2}
    if model == "a silent spiking model":
        made = keymix.create_model("qkformer_micro_32", **options).eval()
    else:
        made = small("vit_micro_p4_32")
        torch.nn.init.zeros_(made.head.weight)
    with pytest.raises(UserError, match="do not vary"):
        keymix.export(made, tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


class _Passing(TokenMixer):
    traits = Traits(maskable=False)

    def __init__(self, site: keymix.Site) -> None:
        super().__init__(site)
        self.proj = nn.Linear(site.dim, site.dim)


def registered(change: Any) -> str:
    """Register a mixer whose forward pass ends in a change of the test's."""

    @register_mixer("of_this_test")
    class Changed(_Passing):
        def forward(self, x: Tensor, grid: Any = None, bias: Any = None) -> Tensor:
            made: Tensor = change(self.proj(x + x.mean(-2, keepdim=True)))
            return made

    return "of_this_test"


def interrupted(x: Tensor) -> Tensor:
    if torch.compiler.is_exporting():
        os.kill(os.getpid(), signal.SIGINT)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize(
    ("change", "error", "culprit"),
    [
        (
            lambda x: x * (1 + 1e-3 * torch.compiler.is_exporting()),
            UserError,
            "computes something else",
        ),
        (lambda x: x * 2 if x.sum() > 0 else x, UserError, r"blocks\.0\.attn\.mixer"),
        (interrupted, KeyboardInterrupt, None),
    ],
    ids=["differs", "branches", "interrupted"],
)
def test_nothing_is_left_of_an_export_that_fails(
    change: Any, error: type[BaseException], culprit: str | None, format: Any, tmp_path: Path
) -> None:
    model = small("vit_micro_p4_32", registered(change))
    ending = {"onnx": "onnx", "torch": "pt2"}[format]
    with pytest.raises(error, match=culprit):
        keymix.export(model, tmp_path / f"model.{ending}", format=format)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_an_operation_that_onnx_lacks_is_named_with_its_layer(tmp_path: Path) -> None:
    model = small("vit_micro_p4_32", registered(torch.special.airy_ai))
    with pytest.raises(UserError, match=r"blocks\.0\.attn\.mixer.*special_airy_ai"):
        keymix.export(model, tmp_path / "model.onnx")
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB, where mounting one is allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"a small disk cannot be mounted: {error}")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_disk_that_fills_up_leaves_nothing(full_disk: Path, format: Any) -> None:
    path = full_disk / {"onnx": "model.onnx", "torch": "model.pt2"}[format]
    with pytest.raises(UserError, match="No space left") as raised:
        keymix.export(small("vit_micro_p4_32"), path, format=format)
    assert "\n" not in str(raised.value)
    assert not [*full_disk.iterdir()]
    (full_disk / "other").write_bytes(bytes(16_000))  # all of the disk is free again


def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.export.export", None)  # what would be the work
    model, there = small("vit_micro_p4_32"), tmp_path / "there.onnx"
    there.write_text("mine")
    for path, culprit in [
        (tmp_path / "gone" / "model.onnx", "gone"),
        (tmp_path / "model.bin", r"model\.bin.*\.onnx"),
        (there, r"there\.onnx"),
        (tmp_path, re.escape(str(tmp_path))),
    ]:
        with pytest.raises(UserError, match=culprit):
            keymix.export(model, path)
    assert there.read_text() == "mine"


def test_missing_packages_are_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keymix.train.exported.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"onnxruntime.*keymix\[onnx\]"):
        keymix.export(small("vit_micro_p4_32"), tmp_path / "model.onnx")


@pytest.mark.slow
def test_a_folded_model_and_one_in_training_are_exported_as_they_evaluate(tmp_path: Path) -> None:
    model = small("vit_micro_p4_32", "re_attention")
    x = images("vit_micro_p4_32", 3)
    with torch.no_grad():
        wanted = model(x)
    keymix.export(fold_for_inference(model), tmp_path / "folded.onnx")
    keymix.export(model.train(), tmp_path / "training.onnx")
    assert model.training
    for name in ("folded", "training"):
        close(answers(tmp_path / f"{name}.onnx", x), wanted)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.onnx"
    keymix.export(small("vit_micro_p4_32", "static_key"), path)
    return path


def test_a_file_that_keymix_cannot_read_is_refused_in_a_line(file: Path, tmp_path: Path) -> None:
    import onnx

    def changed(name: str, value: str | None) -> Path:
        model, path = onnx.load(file), tmp_path / f"{name}.onnx"
        del model.metadata_props[:]
        if value is not None:
            onnx.helper.set_model_props(model, {"keymix": value})
        onnx.save(model, path)
        return path

    (facts,) = (p.value for p in onnx.load(file).metadata_props if p.key == "keymix")
    newer = json.dumps({**json.loads(facts), "format": 99})
    (tmp_path / "damaged.onnx").write_bytes(file.read_bytes()[:-2000])
    (tmp_path / "damaged.pt2").write_bytes(b"PK")
    for path, culprit in [
        (changed("elsewhere", None), "elsewhere.*not exported by keymix"),
        (changed("newer", newer), "newer.*99"),
        (changed("odd", "[]"), "odd"),
        (tmp_path / "damaged.onnx", "damaged"),
        (tmp_path / "damaged.pt2", "damaged"),
        (tmp_path / "gone.onnx", "gone"),
    ]:
        with pytest.raises(UserError, match=culprit) as raised:
            keymix.load(path)
        assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_part_of_a_file_that_might_run_code_is_refused(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "model.pt2"
    keymix.export(small("vit_micro_p4_32"), path, format="torch")
    keymix.load(path)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/data/constants/opaque_obj_0", b"")
    with pytest.raises(UserError, match="opaque_obj_0"):
        keymix.load(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value"),
    [("which", "best"), ("resize", "interpolate"), ("time_steps", 2), ("image_size", 64)],
)
def test_what_a_file_has_fixed_cannot_be_asked_for(file: Path, option: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"{option}.*model\.onnx"):
        keymix.load(file, **{option: value})


@pytest.mark.slow
def test_what_needs_the_run_or_the_layers_names_the_file(file: Path) -> None:
    loaded = keymix.load(file)
    assert "vit_micro_p4_32" in repr(loaded)
    for ask in (
        lambda: loaded.run,
        lambda: loaded.recipe,
        lambda: fold_for_inference(file),
        lambda: keymix.export(file, file.with_name("again.onnx")),
    ):
        with pytest.raises(UserError, match=r"model\.onnx"):
            ask()


def test_a_model_of_several_outputs_is_refused(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(UserError, match="tuple"):
        keymix.export(Two(), tmp_path / "model.onnx", images=torch.randn(2, 3, 8, 8))


@pytest.mark.slow
def test_a_model_that_does_not_say_its_classes_is_exported_and_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    keymix.export(model, file, images=torch.randn(4, 3, 8, 8))
    with pytest.raises(UserError, match=r"model\.onnx"):
        keymix.load(file)
