# SPDX-License-Identifier: Apache-2.0
"""Arguments that a model cannot be built with: each is refused by name, before anything is built.

Everything is built on the meta device, where a number costs nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from each import together
from keymix import TokenMixer, Traits, register_mixer
from keymix.hosts import find_mixers
from keymix.mixers.base import Site
from keymix.models import create_model, memory
from keymix.models.arguments import arguments_of
from keymix.models.family import families, family_of
from mixer_cases import refused

NAN, INF = math.nan, math.inf
SHOWN = {
    "vit": "vit_nano_p2_12",
    "cait": "cait_micro_p4_32",
    "deepvit": "deepvit_micro_p4_32",
    "swin": "swin_micro_p2_32",
    "cvt": "cvt_micro_32",
    "metaformer": "caformer_micro_32",
    "qkformer": "qkformer_micro_32",
    "spikformer": "spikformer_4_384",
    "plain_convnet": "plain_convnet",
    "plain_unet": "plain_unet",
    "trans_unet": "trans_unet_micro",
    "setr": "setr_micro",
    "setr on a CvT": "setr_qkv_cvt",
    "setr on a backbone": "setr",
    "multi_scale": "unet",
    "mask_rcnn": "mask_rcnn",
    "cascade_mask_rcnn": "cascade_mask_rcnn",
}
BAD: dict[str, tuple[Any, ...]] = {
    "depth": (0, -1, 1.5, "a", NAN, [2, 2], True),
    "depths": ([], [1, 0, 1], "1,2", 3, [1] * 5, [1]),
    "depth_token_only": (0, -1),
    "dims": ([32, 48], [], [8] * 5, [8, 8, 8, NAN]),
    "embed_dim": (0, -1, "a", NAN, 1.5, [8, 8, 8]),
    "embed_dims": ([8, 8], [8, 8, 0]),
    "num_heads": (0, -1, 1.5, [1, 2], 5.0, "a"),
    "head_dim": (0, -1, [8, 8], "a"),
    "mlp_ratio": (-1, 0, "a", NAN, INF, [2.0, 2.0]),
    "patch_size": (0, -1, "a"),
    "decoder_width": (0, -1, 40, "a", 1.5),
    "width": (3, 0, -1, 7, "a", 1.5),
    "stem_stride": (0, 3, 8, "a"),
    "window_size": (0, "a"),
    "merging": ([2], [2, 0], 2),
    "kv_stride": (0, [2, 2], "a"),
    "embeds": ([[7, 2, 3]], [[7, -2, 3]] * 3),
    "stem": ([7, -2, 3], 7),
    "init_values": (NAN, "a"),
    "layer_scale_init_values": ([1.0, 1.0], NAN, [NAN] * 4, "a"),
    "res_scale_init_values": ([1.0], NAN, [NAN] * 4),
    "residual_scale": (0.0, -1.0, NAN, INF, "nan"),
    "last_blocks": (-1, 13, 99, True, 1.5),
    "norm_eps": (0.0, -1e-5, NAN, INF, "a"),
    "shifts": ("axes", "diagonale", 3),  # plain patches are not shifted
    "reg_tokens": (-1,),
    "class_heads": (0,),
    "class_head_dim": (0,),
    "in_chans": (0, -1, "a"),
    "num_classes": (-1, "ten", 1.5),
    "global_pool": ("mux",),
    "time_steps": (0, -1, 1.5, "a", True),
    "neuron": ("lfi",),
    "pool": ("third", 2),
    "shortcut": ("pre",),
    "images": ("mnist",),
    "stem_pool": ("behind",),
    "stem_depths": ([], [3, 0, 9], 3),
    "decoder_widths": ([], [64, 0], 64, "a"),
    "weight_init": ("xavier",),
    "backbone": (3,),
    "out_index": (-1, 1.5),
    "backbone_size": (0, -1, "a"),
    "out_channels": (0, -1, 1.5, "a"),
    "proposals": (0, 1.5, "a"),
    "samples": (0, 1.5, "a"),
    "detections": (0, 1.5, "a"),
    "score_threshold": (-0.1, 1.5, NAN, "a"),
    "nms_threshold": (-0.1, 1.5, NAN, "a"),
}
FLAGS = ("false", "maybe", "no", 1)


def refuse(name: str, says: str, **options: Any) -> None:
    with torch.device("meta"), refused(says):
        create_model(name, **options)


def test_every_family_and_every_rule_is_tried() -> None:
    assert {family_of(name)[0] for name in SHOWN.values()} == set(families())
    taken = {key for name in SHOWN.values() for key in arguments_of(family_of(name)[0])}
    assert taken >= BAD.keys()


@pytest.mark.slow
@together
@pytest.mark.parametrize("family", SHOWN)
def test_values_that_make_no_model_are_refused_by_name(family: str) -> None:
    name = SHOWN[family]
    for argument, (_, hint) in arguments_of(family_of(name)[0]).items():
        for value in FLAGS if hint is bool else BAD.get(argument, ()):
            rest = " must be true or false$" if hint is bool else ".*$"
            refuse(name, f"{argument}[= ]{re.escape(repr(value))}{rest}", **{argument: value})


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("metaformer", {"dims": [32, 48]}, "dims=[32, 48] must have 4 values, one for each of"),
        ("metaformer", {"depths": [1]}, "depths=[1] must have 4 values, one per stage as in dims="),
        ("metaformer", {"head_dim": 0}, "head_dim=0 must be a whole number of 1 or more"),
        ("metaformer", {"dorp_path_rate": 0.1}, "Did you mean 'drop_path_rate'"),
        ("metaformer", {"stem": (7, 0, 3)}, "cannot be built with stem=(7, 0, 3): ZeroDivision"),
        ("swin", {"merging": [2]}, "merging=[2] must have 2 values, one for each of the 3 stages"),
        ("swin", {"num_heads": 5}, "num_heads=5 must be a list, each a whole number of 1 or more"),
        ("swin", {"residual_scale": 0.5}, "Choose from always_partition, attn_drop_rate"),
        ("swin", {"mixer_options": "interpolate"}, "mixer_options='interpolate' must be"),
        ("cvt", {"global_pool": "max"}, "Choose from '', avg, token."),
        ("cait", {"global_pool": "max"}, "cannot be built with global_pool='max': Only token or"),
        ("deepvit", {"last_blocks": 13}, "last_blocks=13 must be at most depth=12"),
        ("deepvit", {"num_classes": "ten"}, "num_classes='ten' must be a whole number"),
    ],
)
def test_the_refusal_says_what_will_do(family: str, options: dict[str, Any], says: str) -> None:
    refuse(SHOWN[family], re.escape(says), **options)


@together
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("swin", {"head_dim": [8, 8, 4], "mlp_ratio": [1, 2.0, 3], "window_size": [4, 4, 2]}),
        ("swin", {"depths": [1, 1], "num_heads": [1, 2], "merging": [2]}),
        ("metaformer", {"depths": [1, 1], "dims": [16, 32], "mixer": "ska"}),
        ("metaformer", {"res_scale_init_values": 1.0, "layer_scale_init_values": [None] * 4}),
        ("cvt", {"kv_stride": [2, 1, 1], "mlp_ratio": 1.0}),
        ("cait", {"patch_size": (4, 8)}),
        ("deepvit", {"depth": 2, "num_classes": 0}),
    ],
)
def test_what_makes_a_model_is_taken(family: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = create_model(SHOWN[family], **options)
        model(torch.empty(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["vit_nano_p2_12", "vit_tiny_patch16_224"])
def test_weights_beyond_memory_are_refused_before_they_are_made(name: str) -> None:
    with refused(f"model '{name}' with embed_dim=61440 has weights of .* GiB"):
        create_model(name, embed_dim=61_440)
    with refused(f"model '{name}' with mixer_options=.* has weights of .* GiB"):
        create_model(name, mixer="key_value", mixer_options={"pos_dim": 10**10})


class _Looks(TokenMixer):
    """Looks at a number when it is built, which tensors without memory lack."""

    traits = Traits(mixes_prefix=False)

    def __init__(self, site: Site, *, width: int = 1) -> None:
        super().__init__(site)
        self.most = torch.full((width,), 2.0).max().item()

    def forward(self, x: Tensor, grid: Any = None, bias: Any = None) -> Tensor:
        return self.most * x


def test_what_looks_at_numbers_is_built_with_large_options_too() -> None:
    register_mixer("looks_for_arguments")(_Looks)
    options = {"width": 5_000}
    for name, given in (("vit_nano_p2_12", {}), ("vit_tiny_patch16_224", {"depth": 1})):
        model = create_model(name, mixer="looks_for_arguments", mixer_options=options, **given)
        assert {mixer.most for mixer in find_mixers(model).values()} == {2.0}


@pytest.mark.slow
def test_weights_are_fetched_once_and_not_for_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large number lets a model be built without memory first, and ``match`` for its shapes."""
    asked: list[str] = []

    @contextmanager
    def fetching(name: str, *_: object) -> Iterator[None]:
        asked.append(name)
        yield

    monkeypatch.setattr("keymix.models.factory.fetching", fetching)
    name = "vit_tiny_patch16_224"
    state = timm.create_model(name, depth=1).state_dict()
    more: dict[str, Any] = {"pretrained_cfg_overlay": {"state_dict": state}, "depth": 1}
    create_model(name, pretrained=True, in_chans=2_000, **more)
    assert asked == [name]
    create_model(name, mixer="mhsa", match="params", pretrained=True, **more)
    assert asked == [name] * 2


def test_the_memory_of_a_control_group_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    whole = memory.memory_of_this_machine()
    (tmp_path / "memory.max").write_text("20000\n")
    assert memory.memory_of_this_machine() == 20_000
    with refused("has weights of .* GiB"):
        create_model("vit_nano_p2_12", mixer="key_value", mixer_options={"pos_dim": 5_000})
    for text in ("max\n", str(10**30)):
        (tmp_path / "memory.max").write_text(text)
        assert memory.memory_of_this_machine() == whole
