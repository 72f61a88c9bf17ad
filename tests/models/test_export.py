# SPDX-License-Identifier: Apache-2.0
"""Every family exports with a batch of any size: torch.export, and both exporters to ONNX."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from keymix.mixers.registry import list_mixers
from mixer_cases import stir
from shrunk import images, shrunk
from tolerances import close

DENSE = [
    "vit_micro_p4_32",
    "cait_micro_p4_32",
    "swin_micro_p2_32",
    "cvt_micro_32",
    "caformer_micro_32",
    "deepvit_micro_p4_32",
    "setr_qkv",
    "setr_qkv_ce",
    "setr_qkv_cvt",
]
SPIKING = {"qkformer_micro_32": "qk_token", "spikformer_2_256": "spiking_self"}
EVERY = {**dict.fromkeys(DENSE, "softmax"), **SPIKING}
OWN_MAPS = ("conv_static_key", "re_attention")  # logits from a convolution, maps mixed over heads
QUICK = [
    ("vit_micro_p4_32", "softmax"),
    ("swin_micro_p2_32", "conv_static_key"),
    ("qkformer_micro_32", "qk_token"),
]
# A mixer alone exports in tests/contract; here every model has its own, and all stand in windows.
# Class tokens and strided keys are what else meets a mixer's convolutions and mixed maps.
REST = [
    *EVERY.items(),
    *(("swin_micro_p2_32", mixer) for mixer in list_mixers(domain="dense")),
    *((name, mixer) for name in ("cait_micro_p4_32", "cvt_micro_32") for mixer in OWN_MAPS),
    *(("qkformer_micro_32", mixer) for mixer in list_mixers(domain="spiking")),
]
ALL = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in dict.fromkeys([*QUICK, *REST])
]
BATCH = torch.export.Dim("batch", min=1, max=64)


@pytest.fixture(autouse=True)
def _without_hook(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("exporters cannot see through the shape checks")


def small(name: str, mixer: str) -> nn.Module:
    """A small model for inference; its mixers see no shifted windows if they take no mask."""
    unmasked = ("re_attention", "pooling", "random", "sep_conv", "static_key_re_attention")
    unshifted = {"shifted": False} if "swin" in name and mixer in unmasked else {}
    model = shrunk(name, mixer=mixer, **unshifted).eval()
    stir(model)
    return model


def batches(name: str) -> list[Tensor]:
    """One image, those that the model is exported with, and more."""
    x = images(name)
    return [x[:1], x, torch.cat((x, 1 - x, 2 * x[:1]))]


@pytest.mark.parametrize(("name", "mixer"), ALL)
def test_it_exports_with_a_batch_of_any_size(name: str, mixer: str) -> None:
    model = small(name, mixer)
    shapes = ({0: BATCH},)
    with torch.no_grad():
        program = torch.export.export(model, (images(name),), strict=False, dynamic_shapes=shapes)
        for x in batches(name):
            close(program.module()(x), model(x))


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


@pytest.mark.parametrize(("name", "mixer"), ALL)
def test_the_older_exporter_to_onnx_knows_its_operations(name: str, mixer: str) -> None:
    needs_onnx()
    model, file = small(name, mixer), io.BytesIO()
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


def exported_to_onnx(name: str, mixer: str, folder: Path) -> None:
    needs_onnx()
    model, file = small(name, mixer), folder / "model.onnx"
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
    exported_to_onnx("swin_micro_p2_32", "softmax", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_micro_p4_32", "cvt_micro_32", "setr_qkv", "spikformer_2_256"]
)
def test_it_goes_to_onnx_with_a_batch_of_any_size(name: str, tmp_path: Path) -> None:
    exported_to_onnx(name, EVERY[name], tmp_path)
