# SPDX-License-Identifier: Apache-2.0
"""Every family exports with a batch of any size: torch.export, and both exporters to ONNX."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix import fold_for_inference
from mixer_cases import stir
from shrunk import family_of, images, shrunk
from tolerances import close

# Every host, stem and decoder once, and every mixer once (a mixer alone exports in tests/contract):
# most with the softmax attention that their papers have, the others where they meet what is not
# alike anywhere else. Logits from a convolution and maps mixed over heads, which compute by ways
# of their own, stand with class tokens, strided keys and shifted and plain windows; of the rest
# that a host hands to a mixer, a batch and perhaps a bias, one mixer sees what all do. Where there
# are stages, several mixers share a model; those that take no mask stand where no window shifts.
CASES = [
    ("vit_micro_p4_32", "softmax"),
    ("swin_micro_p2_32", "static_key_re_attention/conv_static_key/softmax"),
    ("cait_micro_p4_32", "conv_static_key"),
    ("cait_micro_p4_32", "static_key"),
    ("cvt_micro_32", "re_attention"),
    ("caformer_micro_32", "sep_conv"),
    ("deepvit_micro_p4_32", "random"),
    ("setr_qkv", "key_value"),
    ("setr_qkv_ce", "pooling"),
    ("setr_qkv_cvt", "softmax/identity/softmax"),
    ("qkformer_micro_32", "qk_token/qk_channel/spike_driven"),
    ("spikformer_2_256", "spiking_self"),
    ("plain_convnet", ""),
    ("plain_unet", ""),
]
FEWER = {  # blocks: one of each kind
    "swin": {"depths": (1, 2, 2)},
    "cvt": {"depths": (1, 1, 1)},
    "caformer": {"depths": (1, 1, 1, 1)},
    "qkformer": {"depths": (1, 1, 1)},
}
BATCH = torch.export.Dim("batch", min=1, max=64)


@pytest.fixture(autouse=True)
def _without_hook(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("exporters cannot see through the shape checks")


def small(name: str, mixer: str, **options: Any) -> nn.Module:
    """A small model for inference, with this mixer, one per stage by slashes, or none."""
    fewer = FEWER.get(name.partition("_")[0], {})
    if "depth" in family_of(name).options:
        fewer = {"depth": 1}
    elif name == "setr_qkv_cvt":
        fewer = FEWER["cvt"]
    mixers = mixer.split("/") if "/" in mixer else mixer or None
    model = shrunk(name, mixer=mixers, **{**fewer, **options}).eval()
    stir(model)
    return model


def batches(name: str) -> list[Tensor]:
    """One image, those that the model is exported with, and more."""
    x = images(name)
    return [x[:1], x, torch.cat((x, 1 - x, 2 * x[:1]))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mixer"), CASES)
def test_it_exports_with_a_batch_of_any_size(name: str, mixer: str) -> None:
    model = small(name, mixer)
    shapes = ({0: BATCH},)
    with torch.no_grad():
        program = torch.export.export(model, (images(name),), strict=False, dynamic_shapes=shapes)
        exported = program.module()
        for x in batches(name):
            close(exported(x), model(x))


FOLDED = [
    ("cvt_micro_32", "re_attention"),
    ("setr_qkv", "key_value"),
    ("spikformer_2_256", "spiking_self"),
    ("plain_unet", ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mixer"), FOLDED)
def test_a_folded_model_exports_with_a_batch_of_any_size(name: str, mixer: str) -> None:
    folded = fold_for_inference(small(name, mixer))
    with torch.no_grad():
        program = torch.export.export(
            folded, (images(name),), strict=False, dynamic_shapes=({0: BATCH},)
        )
        exported = program.module()
        for x in batches(name):
            close(exported(x), folded(x))
    ops = {str(node.target) for node in program.graph.nodes}
    assert not any("batch_norm" in op for op in ops)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mixer"), FOLDED)
def test_a_folded_model_goes_to_onnx(name: str, mixer: str) -> None:
    older_onnx(fold_for_inference(small(name, mixer)), name)


def needs_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install keymix[test])")


def computes_the_same(model: nn.Module, name: str, file: bytes | str) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (there,) = session.get_inputs()
    for x in batches(name):
        (y,) = session.run(None, {there.name: x.numpy()})
        with torch.no_grad():
            close(torch.from_numpy(y), model(x))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mixer"), CASES)
def test_the_older_exporter_to_onnx_knows_its_operations(name: str, mixer: str) -> None:
    older_onnx(small(name, mixer), name)


def older_onnx(model: nn.Module, name: str) -> None:
    needs_onnx()
    file = io.BytesIO()
    torch.onnx.export(
        model,
        (images(name),),
        file,
        dynamo=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
    )
    computes_the_same(model, name, file.getvalue())


def exported_to_onnx(name: str, folder: Path, **options: Any) -> None:
    needs_onnx()
    mixer = "spiking_self" if name.startswith("spikformer") else "softmax"
    model, file = small(name, mixer, **options), folder / "model.onnx"
    shapes = ({0: BATCH},)
    program = torch.onnx.export(
        model, (images(name),), dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    assert program is not None
    program.save(str(file))
    computes_the_same(model, name, str(file))


@pytest.mark.slow
def test_swin_with_gradients_on_goes_to_onnx(tmp_path: Path) -> None:
    """Its bias trains, so that not the fused kernel serves while the exporter looks at it."""
    two = {"depths": (1, 1), "num_heads": (1, 2), "merging": (2,)}
    exported_to_onnx("swin_micro_p2_32", tmp_path, **two)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cvt_micro_32", "setr_qkv", "spikformer_2_256"])
def test_it_goes_to_onnx_with_a_batch_of_any_size(name: str, tmp_path: Path) -> None:
    """A class token with convolutions, a ViT's blocks behind a decoder, and time steps."""
    exported_to_onnx(name, tmp_path)
