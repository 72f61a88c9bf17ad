# SPDX-License-Identifier: Apache-2.0
"""SETR on ViT-B behind ResNet-50 stages, softmax attention, on UW-Madison GI Tract.

Paper: Hwa et al., KV attention in SETR, https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.2 and
Table 2. Published, one run: Jaccard 0.8990, weighted Jaccard 0.8946, 103.14 M parameters, 25.02 G
multiply-adds.

    keymix train setr_qkv_ce_uwgi --data uwgi:PATH --out setr-qkv-ce

Settings and differences: those of ``setr_qkv_uwgi``.

Measured: not measured at this size.
"""

from __future__ import annotations

from dataclasses import replace

from keymix.recipes.segmentation import setr_qkv_uwgi
from keymix.train.recipe import ModelConfig, Recipe


def recipe() -> Recipe:
    """The run of ``setr_qkv_uwgi`` with another model."""
    return replace(
        setr_qkv_uwgi.recipe(), name="setr_qkv_ce_uwgi", model=ModelConfig(name="setr_qkv_ce")
    )
