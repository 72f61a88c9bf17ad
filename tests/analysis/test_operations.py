# SPDX-License-Identifier: Apache-2.0
"""Operations: what torch's layers cost by hand, what is free, and what is named as uncounted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import flop_counter
from torchvision import ops

from each import together
from keymix.analysis.counting import count


class Calls(nn.Module):
    """A function as a layer, with a module that it may call."""

    def __init__(self, function: Callable[..., Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.part = function, part

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) if self.part is None else self.function(x, self.part)


class Unpooled(nn.Module):
    """Pooling and its reverse."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.back = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(*self.pool(x))
        return out


def named(layer: nn.Module, size: tuple[int, ...], macs: int = 0, name: str = "") -> Any:
    return pytest.param(layer, size, macs, id=name or type(layer).__name__)


def assert_free(layer: nn.Module, size: tuple[int, ...]) -> None:
    found = count(layer, size)
    assert (found.macs, found.uncounted) == (0, ())


MAP = (4, 8, 8)
TEXT = (6, 8)  # six steps of eight channels

ACTIVATIONS = [
    nn.CELU(), nn.ELU(), nn.GELU(), nn.GELU("tanh"), nn.GLU(), nn.Hardshrink(), nn.Hardsigmoid(),
    nn.Hardswish(), nn.Hardtanh(), nn.LeakyReLU(), nn.LogSigmoid(), nn.LogSoftmax(1), nn.Mish(),
    nn.PReLU(), nn.ReLU(), nn.ReLU6(), nn.RReLU(), nn.SELU(), nn.SiLU(), nn.Sigmoid(),
    nn.Softmax(1), nn.Softmax2d(), nn.Softmin(1), nn.Softplus(), nn.Softshrink(), nn.Softsign(),
    nn.Tanh(), nn.Tanhshrink(), nn.Threshold(0.1, 0.0), nn.CELU(inplace=True),
    nn.ELU(inplace=True), nn.Hardsigmoid(inplace=True), nn.Hardswish(inplace=True),
    nn.Hardtanh(inplace=True), nn.LeakyReLU(inplace=True), nn.Mish(inplace=True),
    nn.ReLU(inplace=True), nn.ReLU6(inplace=True), nn.RReLU(inplace=True), nn.SELU(inplace=True),
    nn.SiLU(inplace=True), nn.Threshold(0.1, 0.0, inplace=True),
]  # fmt: skip


@together
@pytest.mark.parametrize("layer", ACTIVATIONS, ids=repr)
def test_activations_are_free(layer: nn.Module) -> None:
    # after an addition, since what is changed in place may be no input
    after = Calls(lambda x, part: part(x + 1), layer)
    assert_free(after, MAP)


def _free_layers() -> list[Any]:
    found = [
        named(nn.CrossMapLRN2d(2), MAP),
        named(nn.LocalResponseNorm(2), MAP),
        named(nn.LayerNorm(8), TEXT),
        named(nn.RMSNorm(8), TEXT),
        named(nn.GroupNorm(2, 4), MAP),
        named(nn.SyncBatchNorm(4), MAP),
        named(nn.PixelShuffle(2), MAP),
        named(nn.PixelUnshuffle(2), MAP),
        named(nn.ChannelShuffle(2), MAP),
        named(nn.Unfold(3), MAP),
        named(nn.Fold((6, 6), 3), (18, 16)),
        named(nn.AlphaDropout(), MAP),
        named(nn.FeatureAlphaDropout(), MAP),
    ]
    modes = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}
    for dims in (1, 2, 3):
        size = (4,) + (8,) * dims

        def layer(kind: str, *args: Any, dims: int = dims, **more: Any) -> nn.Module:
            made: nn.Module = getattr(nn, f"{kind}{dims}d")(*args, **more)
            return made

        found += [
            named(layer(kind, *args), size)
            for kind, args in (
                ("MaxPool", (2,)),
                ("AvgPool", (2,)),
                ("LPPool", (2, 2)),
                ("AdaptiveAvgPool", (3,)),
                ("AdaptiveMaxPool", (3,)),
                ("ReflectionPad", (2,)),
                ("ReplicationPad", (2,)),
                ("ZeroPad", (2,)),
                ("CircularPad", (2,)),
                ("ConstantPad", (2, 1.0)),
                ("BatchNorm", (4,)),
                ("InstanceNorm", (4,)),
            )
        ]
        found += [
            named(nn.Upsample(scale_factor=2, mode=mode), size, name=f"Upsample{dims}d-{mode}")
            for mode in ("nearest", "nearest-exact", "area", *modes[dims])
        ]
        found.append(named(Unpooled(dims), size, name=f"MaxUnpool{dims}d"))
    for dims in (2, 3):
        pool = getattr(nn, f"FractionalMaxPool{dims}d")(2, output_size=3)
        found.append(named(pool, (4,) + (8,) * dims))
    return found


@pytest.mark.slow
@together
@pytest.mark.parametrize(("layer", "size", "macs"), _free_layers())
def test_norms_pools_pads_and_resampling_are_free(
    layer: nn.Module, size: tuple[int, ...], macs: int
) -> None:
    assert_free(layer, size)


def _boxes(kind: Callable[..., Tensor], size: Any) -> nn.Module:
    return Calls(lambda x: kind(x, x.new_tensor([[0.0, 0.0, 0.0, 4.0, 4.0]]), size))


@together
@pytest.mark.parametrize(
    ("layer", "size", "macs"),
    [
        named(_boxes(ops.roi_align, (3, 3)), MAP, name="roi_align"),
        named(_boxes(ops.roi_pool, (3, 3)), MAP, name="roi_pool"),
        named(_boxes(ops.ps_roi_align, 2), MAP, name="ps_roi_align"),
        named(_boxes(ops.ps_roi_pool, 2), MAP, name="ps_roi_pool"),
        named(Calls(lambda x: ops.nms(x[0], x[0, :, 0], 0.5)), (6, 4), name="nms"),
        named(
            Calls(lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False)),
            MAP,
            name="grid2d",
        ),
        named(
            Calls(lambda x: F.grid_sample(x, x[:, :3].permute(0, 2, 3, 4, 1), align_corners=False)),
            (4, 4, 4, 4),
            name="grid3d",
        ),
        named(Calls(lambda x: x.index_add(1, torch.tensor([0, 2]), x[:, :2])), TEXT, name="add"),
        named(Calls(lambda x: (x + 1).copysign_(x)), TEXT, name="copysign_"),
        named(Calls(lambda x: (x + 1).lt_(2)), TEXT, name="lt_"),
        named(Calls(lambda x: x.nonzero()), TEXT, name="nonzero"),
        named(Calls(torch.unique), TEXT, name="unique"),
        named(Calls(lambda x: torch.block_diag(x[0], x[0])), TEXT, name="block_diag"),
        named(Calls(lambda x: torch.linalg.cross(x, x)), (6, 3), name="cross"),
        named(Calls(lambda x: F.binary_cross_entropy(x, x)), TEXT, name="loss"),
    ],
)
def test_moving_choosing_and_reducing_are_free(
    layer: nn.Module, size: tuple[int, ...], macs: int
) -> None:
    assert_free(layer, size)


CONV = {"groups": 2, "padding": 1, "stride": 2}  # 8 -> 4 a side; transposed 8 -> 15


@together
@pytest.mark.parametrize(
    ("layer", "size", "macs"),
    [
        named(nn.Conv1d(4, 6, 3, **CONV), (4, 8), 6 * 4 * 2 * 3),
        named(nn.Conv2d(4, 6, 3, **CONV), MAP, 6 * 4**2 * 2 * 3**2),
        named(nn.Conv3d(4, 6, 3, **CONV), (4, 8, 8, 8), 6 * 4**3 * 2 * 3**3),
        named(nn.ConvTranspose1d(4, 6, 3, **CONV), (4, 8), 4 * 8 * 3 * 3),
        named(nn.ConvTranspose2d(4, 6, 3, **CONV), MAP, 4 * 8**2 * 3 * 3**2),
        named(nn.ConvTranspose3d(4, 6, 3, **CONV), (4, 8, 8, 8), 4 * 8**3 * 3 * 3**3),
        named(
            nn.Conv3d(4, 6, 3, padding=1, padding_mode="replicate"),
            (4, 8, 8, 8),
            6 * 8**3 * 4 * 3**3,
            name="Conv3d-replicate",
        ),
    ],
)
def test_convolutions_have_their_closed_form(
    layer: nn.Module, size: tuple[int, ...], macs: int
) -> None:
    assert count(layer, size).macs == macs


@together
@pytest.mark.parametrize(
    ("layer", "size", "macs"),
    [
        named(
            Calls(lambda x, part: part(x, x, x)[0], nn.MultiheadAttention(8, 2, batch_first=True)),
            TEXT,
            6 * 4 * 8 * 8 + 2 * 6 * 6 * 8,
            name="MultiheadAttention",
        ),
        named(
            Calls(
                lambda x, part: part(x, x),
                nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
            ),
            TEXT,
            2 * (6 * 4 * 8 * 8 + 2 * 6 * 6 * 8) + 2 * 6 * 8 * 16,
            name="TransformerDecoderLayer",
        ),
        named(Calls(lambda x: torch.einsum("bnc,bmc->bnm", x, x)), TEXT, 6 * 6 * 8, name="einsum"),
        named(
            Calls(lambda x: torch.einsum("bnc,bmc,bmd->bnd", x, x, x)),
            TEXT,
            2 * 6 * 6 * 8,
            name="einsum of three",
        ),
        named(Calls(lambda x: x @ x[0, 0]), TEXT, 6 * 8, name="vector"),
        named(Calls(lambda x: x[0, 0] @ x[0, 1]), TEXT, 8, name="dot"),
        # n log2 n of n = 64 real numbers in a transform, twice that of complex ones
        named(
            Calls(lambda x: torch.fft.irfft2(torch.fft.rfft2(x))), MAP, 2 * 4 * 64 * 6, name="fft"
        ),
        named(
            Calls(lambda x: torch.fft.fft2(x + 0j).abs()), MAP, 2 * 4 * 64 * 6, name="complex fft"
        ),
    ],
)
def test_products_have_their_closed_form(
    layer: nn.Module, size: tuple[int, ...], macs: int
) -> None:
    assert count(layer, size).macs == macs


@together
@pytest.mark.parametrize(
    ("layer", "size", "name"),
    [
        (Calls(lambda x, part: part(x)[0], nn.LSTM(8, 5)), TEXT, "aten.mkldnn_rnn_layer"),
        (
            Calls(lambda x, part: part(x, x.new_zeros(1, 18, 8, 8)), ops.DeformConv2d(4, 6, 3)),
            (4, 10, 10),
            "torchvision.deform_conv2d",
        ),
        (Calls(lambda x: torch.cdist(x, x)), TEXT, "aten._cdist_forward"),
        (Calls(torch.linalg.inv), (8, 8), "aten.linalg_inv_ex"),
        (Calls(lambda x, part: part(x, x), nn.Bilinear(8, 8, 4)), TEXT, "aten._trilinear"),
    ],
    ids=["LSTM", "DeformConv2d", "cdist", "inv", "Bilinear"],
)
def test_an_operation_that_nobody_counts_is_named(
    layer: nn.Module, size: tuple[int, ...], name: str
) -> None:
    assert count(layer, size).uncounted == (name,)


def test_an_operation_of_another_library_is_named_until_a_formula_is_registered() -> None:
    @torch.library.custom_op("keymix_test::relu", mutates_args=())
    def relu(x: Tensor) -> Tensor:
        return x.relu()

    relu.register_fake(torch.empty_like)
    layer = nn.Sequential(nn.Linear(8, 4), Calls(lambda x: relu(x + 1)))
    found = count(layer, TEXT)
    assert (found.macs, found.uncounted) == (6 * 8 * 4, ("keymix_test.relu",))
    packet = torch.ops.keymix_test.relu
    flop_counter.register_flop_formula(packet)(lambda shape, out_shape: 2 * 100)
    try:
        found = count(layer, TEXT)
        assert (found.macs, found.uncounted) == (6 * 8 * 4 + 100, ())
    finally:
        del flop_counter.flop_registry[packet]


def test_a_weight_that_a_layer_computed_does_not_stop_the_count() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(8, 5))
    assert count(layer, TEXT).macs == 6 * 8 * 5
    assert layer.weight.grad_fn is not None  # the model keeps its own
