# SPDX-License-Identifier: Apache-2.0
"""What needs no attention: logistic regression and a plain convolutional network on small images.

Both learn from the training images that ``keymix compare --limit 10000`` trains on, and are scored
on the same test images, so that their accuracies stand next to those of a comparison:

    python benchmarks/plain_baselines.py --data parquet:data/cifar10

The regression sees each image averaged to 8x8 pixels. The network has four 3x3 convolutions, 39.5
million multiply-adds at 32x32 pixels, as many as ``vit_micro_p4_32`` (38.8 million), and trains for
two epochs with AdamW, a one-cycle learning rate and flipped images.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from keymix.data import load
from keymix.data.dataset import Split
from measured import begin, options, table

SIDE = 8
BATCH = 64
RATE = 3e-3


def images_of(split: Split) -> tuple[Tensor, Tensor]:
    """Return a split's images ``[n, C, H, W]``, pixels in 0..1, and its labels."""
    pixels = torch.stack([split.read(i) for i in range(len(split))]).float() / 255
    return pixels, torch.from_numpy(np.asarray(split.labels, dtype=np.int64))


def regression(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """Fit logistic regression to images of 8x8 pixels and return its test accuracy."""

    def seen(pixels: Tensor) -> np.ndarray:
        small: np.ndarray = F.adaptive_avg_pool2d(pixels, SIDE).flatten(1).numpy()
        return small

    fitted = LogisticRegression(max_iter=1000).fit(seen(train[0]), train[1].numpy())
    return float(fitted.score(seen(test[0]), test[1].numpy()))


def network(in_chans: int, classes: int) -> nn.Sequential:
    """Make four 3x3 convolutions with BatchNorm and ReLU, the mean over places, a classifier."""
    layers: list[nn.Module] = []
    for width, stride in ((64, 1), (64, 2), (128, 1), (128, 2)):
        layers += [nn.Conv2d(in_chans, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]
        layers += [nn.ReLU()]
        in_chans = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_chans, classes)]
    return nn.Sequential(*layers, *head)


def convolutions(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, epochs: int, seed: int
) -> float:
    """Train the network and return its test accuracy."""
    torch.manual_seed(seed)
    pixels, labels = train
    model = network(pixels.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    steps = epochs * -(-len(pixels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(pixels)).split(BATCH):
            flipped = torch.rand(len(rows), 1, 1, 1) < 0.5
            batch = torch.where(flipped, pixels[rows].flip(-1), pixels[rows]) - 0.5
            loss = F.cross_entropy(model(batch), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.inference_mode():
        answers = torch.cat([model(part - 0.5).argmax(1) for part in test[0].split(500)])
    return float((answers == test[1]).float().mean())


def main(argv: list[str] | None = None) -> int:
    """Run both."""
    parser = options(__doc__)
    parser.add_argument("--data", required=True, help="data spec, e.g. parquet:data/cifar10")
    parser.add_argument("--limit", type=int, default=10000, help="training and validation images")
    parser.add_argument("--epochs", type=int, default=2, help="of the convolutional network")
    parser.add_argument("--seeds", type=int, default=3, help="of the convolutional network")
    given = begin(parser, argv)
    data = load(given.data, limit=given.limit)
    train, test = images_of(data.train), images_of(data.test)
    scores = [
        convolutions(train, test, epochs=given.epochs, seed=seed) for seed in range(given.seeds)
    ]
    rows = [
        ("logistic regression", f"{SIDE}x{SIDE} pixels", f"{regression(train, test):.1%}"),
        ("convolutions", f"{given.epochs} epochs", ", ".join(f"{score:.1%}" for score in scores)),
    ]
    head = f"{len(train[0])} training images, {len(test[0])} test images"
    table((head, "", "test accuracy"), rows, names=2)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
