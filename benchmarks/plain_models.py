# SPDX-License-Identifier: Apache-2.0
"""Train small models of other libraries without keymix, as a user's own script does.

    python benchmarks/plain_models.py timm_vit --data CIFAR10_FOLDER --out FOLDER

CIFAR-10, enlarged to 56x56 pixels and cut into 4x4 patches: 196 tokens (and a class token where
the library has one), so that the share of attention is that of a ViT at 224x224. The weights are
written after every epoch; the same command resumes.
"""

from __future__ import annotations

import argparse
import io
import math
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import timm
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

SIDE = 56
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.244, 0.262)


def timm_vit(depth: int = 4) -> nn.Module:
    """Build timm's ViT."""
    return timm.models.VisionTransformer(
        img_size=SIDE, patch_size=4, embed_dim=96, depth=depth, num_heads=3, num_classes=10
    )


def timm_vit_small() -> nn.Module:
    """Build timm's ViT with three blocks, the way to a faster model that needs no other library."""
    return timm_vit(3)


def torchvision_vit() -> nn.Module:
    """Build torchvision's ViT."""
    return torchvision.models.VisionTransformer(
        image_size=SIDE,
        patch_size=4,
        num_layers=4,
        num_heads=3,
        hidden_dim=96,
        mlp_dim=384,
        num_classes=10,
    )


class _Logits(nn.Module):
    """Hugging Face's classifier, answering with logits alone."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.vit = ViTForImageClassification(
            ViTConfig(
                hidden_size=96,
                num_hidden_layers=4,
                num_attention_heads=3,
                intermediate_size=384,
                image_size=SIDE,
                patch_size=4,
                num_labels=10,
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.vit(images).logits
        return logits


def timm_swin() -> nn.Module:
    """Build timm's Swin with windows of 7 x 7 tokens."""
    return timm.models.SwinTransformer(
        img_size=SIDE,
        patch_size=4,
        window_size=7,
        embed_dim=96,
        depths=(2, 2),
        num_heads=(3, 6),
        num_classes=10,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm_vit": timm_vit,
    "timm_vit_small": timm_vit_small,
    "torchvision_vit": torchvision_vit,
    "transformers_vit": _Logits,
    "timm_swin": timm_swin,
}


def split(folder: Path, name: str, number: int | None = None) -> tuple[Tensor, Tensor]:
    """Read a split's first images ``[n, 3, 32, 32]`` in bytes, and labels ``[n]``."""
    tables = [pq.read_table(file) for file in sorted(folder.rglob(f"{name}*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [rows[i] for i in order[:number]]
    images = [pil_to_tensor(Image.open(io.BytesIO(row["image"]["bytes"]))) for row in chosen]
    return torch.stack(images), torch.tensor([row["label"] for row in chosen])


def prepared(images: Tensor) -> Tensor:
    """Enlarge and normalise images in bytes."""
    large = F.interpolate(images.float() / 255, SIDE, mode="bilinear", antialias=True)
    return (large - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def augmented(images: Tensor) -> Tensor:
    """Flip and shift a batch of images in bytes, each by itself."""
    flips = torch.rand(len(images)) < 0.5
    images = torch.where(flips[:, None, None, None], images.flip(-1), images)
    padded = F.pad(images, (4, 4, 4, 4))
    shifts = torch.randint(0, 9, (len(images), 2)).tolist()
    cut = [padded[i, :, y : y + 32, x : x + 32] for i, (y, x) in enumerate(shifts)]
    return torch.stack(cut)


def train(model: nn.Module, data: tuple[Tensor, Tensor], path: Path, epochs: int) -> None:
    """Train with AdamW and a cosine; a checkpoint after every epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = len(data[0]) // 64
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / steps, 0.5 * (1 + math.cos(math.pi * i / (steps * epochs)))),
    )
    begun = 0
    if path.exists():
        kept = torch.load(path, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        begun = kept["epoch"]
    for epoch in range(begun, epochs):
        torch.manual_seed(epoch)
        start = time.monotonic()
        loss = one_epoch(model, data, optimizer, schedule)
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        seconds = time.monotonic() - start
        print(f"epoch {epoch + 1}: loss {loss:.3f}, {seconds:.0f} s", flush=True)


def one_epoch(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> float:
    """Train on every image once, in batches of 64; return the mean loss."""
    images, labels = data
    model.train()
    losses = []
    for batch in torch.randperm(len(images)).split(64)[: len(images) // 64]:
        loss = F.cross_entropy(
            model(prepared(augmented(images[batch]))), labels[batch], label_smoothing=0.1
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


@torch.inference_mode()
def right(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return which answers are right, ``[n]`` booleans."""
    model.eval()
    parts = zip(images.split(100), labels.split(100), strict=True)
    return torch.cat([model(prepared(some)).argmax(1) == theirs for some, theirs in parts])


def main() -> None:
    """Train one model and print its test accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10 as parquet")
    parser.add_argument("--images", type=int, default=20000, help="training images")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = MODELS[given.model]()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{given.model}.pt"
    train(model, split(given.data, "train", given.images), path, given.epochs)
    answers = right(model, *split(given.data, "test", 2000)).float()
    print(f"{given.model}: {100 * float(answers.mean()):.1f} % of 2,000 test images")


if __name__ == "__main__":
    main()
