# SPDX-License-Identifier: Apache-2.0
"""What a swap, its images and its files do at the edges: odd loaders, broken files, odd models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import images, tiny
from torch import Tensor

from keymix.errors import UserError
from keymix.surgery import gather, load_swapped

SIZE = (8, 12)  # of images of tiny("timm_vit")


class Endless:
    """A loader that never stops, and counts its batches."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(50):
            self.read += 1
            yield images(SIZE, 4)


def test_an_endless_loader_is_read_for_as_many_images_as_were_asked_for() -> None:
    loader = Endless()
    statistics = gather(tiny("timm_vit"), loader, number=8)
    assert loader.read == 2
    assert all(moments.images == 8 for moments in statistics.layers.values())


MODEL = "timm.models.vision_transformer.VisionTransformer"


@pytest.mark.parametrize(
    "told",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"model": MODEL, "swaps": []}),
        json.dumps({"model": MODEL, "swaps": ["x"]}),
        json.dumps({"model": MODEL, "swaps": [{"path": "blocks.0.attn"}]}),
        json.dumps({"model": MODEL, "swaps": [{"path": "a", "mixer": "softmax", "options": [1]}]}),
        json.dumps({"swaps": [{"path": "a", "mixer": "softmax", "options": {}}]}),
    ],
)
def test_a_file_with_a_broken_record_of_its_swaps_is_refused(told: str, tmp_path: Path) -> None:
    file = tmp_path / "broken"
    save_file({"weight": torch.ones(1)}, file, metadata={"keymix_swap": told})
    with pytest.raises(UserError, match="broken: what it says of its swaps is broken") as error:
        load_swapped(tiny("timm_vit"), file)
    assert "\n" not in str(error.value)
