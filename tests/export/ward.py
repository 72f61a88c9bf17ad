# SPDX-License-Identifier: Apache-2.0
"""A run on images of which path and names must not leave: it is exported and pushed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

import keymix
from keymix.cli import main

PLACE, NAME = "ward_of_miller", "patient_0815"


def write_ward(place: Path) -> None:
    """Write a folder with ``photos`` and a ``run`` trained on them by its command."""
    numbers = np.random.default_rng(0)
    photos = place / PLACE / "photos"
    for label, light in (("dark", 60), ("light", 200)):
        (photos / label).mkdir(parents=True)
        for i in range(20):
            pixels = numbers.normal(light, 40, (12, 12, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(photos / label / f"{NAME}_{i}.png")
    small = ["--model.options.depth", "1", "--model.options.embed_dim", "16"]
    few = ["--schedule.epochs", "1", "--data.batch_size", "8"]
    words = ["train", "digits_vit", "--data", f"folder:{photos}", "--data.image_size", "12"]
    assert main([*words, *small, *few, "--out", str(place / PLACE / "run")]) == 0


def refuse_secrets(content: bytes, made_in: Path) -> None:
    """Fail if a path or a name of a file stands in what leaves."""
    source = Path(keymix.__file__).parent
    for secret in (PLACE, NAME, ".png", "photos", str(made_in), str(source), str(Path.home())):
        assert secret.encode() not in content, secret
    assert b"site-packages" not in content
