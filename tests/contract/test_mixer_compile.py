# SPDX-License-Identifier: Apache-2.0
"""Every registered mixer compiles without graph breaks and exports.

Run without the shape-checking hook, which is Python that a compiler cannot see through.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from keymix.mixers.registry import list_mixers, mixer_options
from mixer_cases import DEVICE, DTYPE, close, gradients, images, make, tokens

# what Inductor compiles: products and softmax, neurons over time, convolutions
CODE = ["softmax", "qk_token", "conv_static_key"]


def quick(name: str, *values: Any) -> Any:
    """A case of a mixer, slow but for a few."""
    marks = () if name in CODE else pytest.mark.slow
    return pytest.param(name, *values, marks=marks)


every_mixer = pytest.mark.parametrize("name", [quick(name) for name in list_mixers()])
# what takes another way through forward than the defaults
VARIED = {
    "pos_dim": 6,
    "temperature": True,
    "mask_diagonal": True,
    "norm": "layer",
    "activation": "star_relu",
    "talking_heads": True,
    "act": "star_relu",
}


@pytest.fixture(autouse=True)
def _without_hook(shapes_checked: bool) -> Any:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    yield
    torch.compiler.reset()


def compiled_is_eager(name: str, options: dict[str, Any], backend: str) -> None:
    mixer = make(name, options, num_prefix_tokens=1, grid=(3, 4))
    x = tokens(mixer, 2)
    wanted = gradients(copy.deepcopy(mixer), x)
    compiled = torch.compile(mixer, backend=backend, fullgraph=True)
    y = compiled(x.clone().requires_grad_())
    close(y, wanted[0])
    _, grads = gradients(compiled, x)
    for key, grad in grads.items():
        name = key.removeprefix("_orig_mod.")
        if name not in mixer.zero_gradients:  # there, only rounding is left to compare
            close(grad, wanted[1][name])


@pytest.mark.slow
@every_mixer
def test_a_mixer_is_one_graph(name: str) -> None:
    """Inductor, which begins as the other backend does, computes those of the kinds of code."""
    compiled_is_eager(name, {}, "inductor" if name in CODE else "aot_eager")


def varied(name: str, *, masked: bool) -> dict[str, Any]:
    """All options of a mixer that vary and that a masked diagonal bears, or all but that mask."""
    refused = {"talking_heads", "activation"} if masked else {"mask_diagonal"}
    return {key: VARIED[key] for key in mixer_options(name) if key in VARIED.keys() - refused}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "masked"),
    [
        quick(name, masked)
        for name in list_mixers()
        for masked in (True, False)
        if varied(name, masked=masked) and (not masked or name in CODE)
        if ("mask_diagonal" in varied(name, masked=masked)) == masked
    ],
)
def test_a_mixer_with_its_options_is_one_graph(name: str, masked: bool) -> None:
    """What breaks the graph with one option breaks it with the others too, so all come at once.

    None leads past the code of another; a mixer with none of them compiles above. The mask of the
    diagonal is one line of the base of all mixers that form maps.
    """
    options = varied(name, masked=masked)
    mixer = make(name, options, num_prefix_tokens=1)
    x = tokens(mixer)
    wanted = copy.deepcopy(mixer)(x)
    close(torch.compile(mixer, backend="aot_eager", fullgraph=True)(x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "static_key", "spatial_reduction"])
def test_a_mixer_under_a_mask_in_windows_is_one_graph(name: str) -> None:
    mixer = make(name, windows=2)
    x = tokens(mixer, 2, 2)
    bias = torch.zeros(2, 1, 6, 6, device=DEVICE, dtype=DTYPE)
    bias[1, :, :3, 3:] = -100.0
    wanted = copy.deepcopy(mixer)(x, bias=bias)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    close(compiled(x, bias=bias), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", [quick(name) for name in list_mixers()])
def test_a_mixer_exports(name: str) -> None:
    mixer = make(name, num_prefix_tokens=1).eval()
    x = tokens(mixer, 2)
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {"x": {images(mixer): batch}}  # the steps of a spiking mixer are unrolled
    program = torch.export.export(mixer, (x,), strict=False, dynamic_shapes=shapes)
    exported = program.module()
    close(exported(x), mixer(x))
    more = tokens(mixer, 5, seed=4)
    close(exported(more), mixer(more))
