# SPDX-License-Identifier: Apache-2.0
"""SETR on CvT-13 with key-value attention on UW-Madison GI Tract.

Paper: Hwa et al., KV attention in SETR, https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.2 and
Table 2. Published, one run: Jaccard 0.8807, weighted Jaccard 0.8755, 21.3 M parameters, 9.49 G
multiply-adds.

    keymix train setr_kv_cvt_uwgi --data uwgi:PATH --out setr-kv-cvt

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
        setr_qkv_uwgi.recipe(), name="setr_kv_cvt_uwgi", model=ModelConfig(name="setr_kv_cvt")
    )
