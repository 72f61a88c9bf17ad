# SPDX-License-Identifier: Apache-2.0
"""Published sizes: the KV paper's Table 2, SETR on 224x224 images with 4 classes."""

from __future__ import annotations

import pytest

from costs import cost
from costs import params as trainable
from each import together

pytestmark = pytest.mark.slow  # all of them together

# printed parameters in M and multiply-adds in G; counted; how far apart they may be, of 1
ROWS: list[tuple[str, float, float, int, int, float]] = [
    ("setr_qkv", 91.04, 21.07, 90_889_028, 21_044_070_400, 0.002),
    ("setr_kv", 83.96, 19.68, 83_801_924, 19_649_726_464, 0.002),
    ("setr_kv_pos", 83.96, 19.97, 83_802_536, 19_649_849_392, 0.017),
    ("setr_qkv_ce", 103.14, 25.02, 102_980_484, 25_015_601_152, 0.002),
    ("setr_kv_ce", 96.05, 23.68, 95_893_380, 23_621_257_216, 0.003),
    ("setr_qkv_cvt", 22.9, 9.86, 22_933_380, 9_776_884_224, 0.009),
    ("setr_kv_cvt", 21.3, 9.49, 21_329_540, 9_404_458_496, 0.010),
]
CODE = 12 * 12 * 197**2 * 50  # layers, heads, tokens, m: the linear map as the paper has it


@pytest.mark.parametrize(("name", "params_m", "macs_g", "params", "macs", "apart"), ROWS)
def test_costs_are_the_published(
    name: str, params_m: float, macs_g: float, params: int, macs: int, apart: float
) -> None:
    found = cost(name, (3, 224, 224))
    assert (found.params, found.macs) == (params, macs)
    assert params / 1e6 == pytest.approx(params_m, rel=0.002)
    assert macs / 1e9 == pytest.approx(macs_g, rel=apart)


def test_the_position_code_of_the_paper_is_the_rest_of_its_row() -> None:
    macs = {name: macs for name, _, _, _, macs, _ in ROWS}
    assert (macs["setr_kv"] + CODE) / 1e9 == pytest.approx(19.97, rel=0.0025)


def test_dropping_the_query_saves_its_projection() -> None:
    linear = 768**2 + 768
    assert trainable("setr_qkv") - trainable("setr_kv") == 12 * linear
    assert trainable("setr_qkv_ce") - trainable("setr_kv_ce") == 12 * linear
    assert trainable("setr_qkv_cvt") - trainable("setr_kv_cvt") == 1_603_840
    assert trainable("setr_kv_pos") - trainable("setr_kv") == 12 * 51


def test_a_class_is_a_row_of_the_last_convolution() -> None:
    fewer = trainable("setr_qkv", num_classes=3)
    assert trainable("setr_qkv") - fewer == 65


@together
@pytest.mark.parametrize(
    ("strides", "macs_g"),
    [((1, 1, 2), 9.11), ((2, 1, 1), 8.81), ((1, 2, 2), 8.67), ((2, 2, 1), 8.37), ((2, 2, 2), 7.70)],
)
def test_other_strides_of_the_cvt_are_not_the_papers(
    strides: tuple[int, int, int], macs_g: float
) -> None:
    found = cost("setr_qkv_cvt", (3, 224, 224), kv_stride=strides)
    assert found.macs / 1e9 == pytest.approx(macs_g, abs=0.005)


def test_the_small_one_is_small() -> None:
    assert trainable("setr_micro") < 700_000
