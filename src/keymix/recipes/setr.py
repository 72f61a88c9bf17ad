# SPDX-License-Identifier: Apache-2.0
"""Hwa et al., KV attention in SETR, https://doi.org/10.1007/978-3-658-47422-5_71."""

from __future__ import annotations

from collections.abc import Callable

from keymix.data.augment import Augment
from keymix.recipes import add, recipe
from keymix.train.recipe import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    ScheduleConfig,
    replace_path,
)

AUGMENT = Augment(
    flip=True,
    vertical_flip=True,
    shift_scale_rotate=True,
    coarse_dropout=True,
    brightness_contrast=True,
)

_VARIANTS = {
    "setr_kv": (
        "on ViT-B/16 with key-value attention",
        "Jaccard 0.8727, weighted Jaccard 0.8667, 83.96 M parameters, 19.68 G multiply-adds",
    ),
    "setr_kv_pos": (
        "on ViT-B/16 with key-value attention and its position code",
        "Jaccard 0.8750, weighted Jaccard 0.8691, 83.96 M parameters, 19.97 G multiply-adds "
        "(the paper's asterisk; here 19.65, docs/papers.md)",
    ),
    "setr_qkv_ce": (
        "on ViT-B behind ResNet-50 stages, softmax attention,",
        "Jaccard 0.8990, weighted Jaccard 0.8946, 103.14 M parameters, 25.02 G multiply-adds",
    ),
    "setr_kv_ce": (
        "on ViT-B behind ResNet-50 stages, key-value attention,",
        "Jaccard 0.9015, weighted Jaccard 0.8960, 96.05 M parameters, 23.68 G multiply-adds",
    ),
    "setr_qkv_cvt": (
        "on CvT-13 with softmax attention",
        "Jaccard 0.8846, weighted Jaccard 0.8786, 22.9 M parameters, 9.86 G multiply-adds",
    ),
    "setr_kv_cvt": (
        "on CvT-13 with key-value attention",
        "Jaccard 0.8807, weighted Jaccard 0.8755, 21.3 M parameters, 9.49 G multiply-adds",
    ),
}
"""By model: what it is, and what Table 2 prints of it."""


@recipe
def setr_qkv_uwgi() -> Recipe:
    """SETR on ViT-B/16 with softmax attention on UW-Madison GI Tract: the KV paper's baseline.

    Paper: Hwa et al., KV attention in SETR, https://doi.org/10.1007/978-3-658-47422-5_71, Sec. 2.3
    and Table 2. Published, one run: Jaccard 0.8718, weighted Jaccard 0.8653, 91.04 M parameters,
    21.07 G multiply-adds; with key-value attention (``setr_kv_uwgi``) 0.8727, 0.8667.

        keymix train setr_qkv_uwgi --data uwgi:PATH --out setr-qkv
        keymix compare --recipe setr_qkv_uwgi --data uwgi:PATH --mixers 'mhsa,kv,kv(pos_dim=50)' \
            --seeds 3 --out setr-cmp

    The paper's settings: AdamW 1e-4, polynomial schedule of power 0.9 without warm-up, 100 epochs,
    batch 32, images of 224x224, no pre-training; horizontal and vertical flip, shift-scale-rotate,
    coarse dropout, brightness and contrast, each with probability 0.5; 80 : 16 : 4.
    Not given there: the loss (here the cross entropy of pixels), the weight decay (here 0.01, that
    of PyTorch), how the splits were drawn (here whole cases; ``--data.split_by slice`` spreads a
    case over them), the strengths of the augmentations, and how the Jaccard indices are averaged
    (here over organs, of the counts of all slices of the split).
    Differs: the schedule moves at every update; the last epoch is reported, and the best one on the
    validation split.

    Measured: not measured at this size.
    """
    return Recipe(
        name="setr_qkv_uwgi",
        data=DataConfig(
            spec="uwgi:uw-madison-gi",
            image_size=224,
            val_fraction=1 / 6,
            batch_size=32,
            eval_batch_size=32,
            workers=8,
        ),
        augment=AUGMENT,
        model=ModelConfig(name="setr_qkv"),
        optim=OptimConfig(name="adamw", lr=1e-4, weight_decay=0.01),
        schedule=ScheduleConfig(name="poly", power=0.9, epochs=100),
    )


def _with_model(model: str) -> Callable[[], Recipe]:
    return lambda: replace_path(setr_qkv_uwgi(), {"model.name": model})


for _model, (_what, _published) in _VARIANTS.items():
    add(
        f"{_model}_uwgi",
        f"""SETR {_what} on UW-Madison GI Tract.

        Paper: Hwa et al., KV attention in SETR, https://doi.org/10.1007/978-3-658-47422-5_71, Sec.
        2.2 and Table 2. Published, one run: {_published}.

            keymix train {_model}_uwgi --data uwgi:PATH --out {_model.replace("_", "-")}

        Settings and differences: those of ``setr_qkv_uwgi``.

        Measured: not measured at this size.
        """,
        _with_model(_model),
    )
