# SPDX-License-Identifier: Apache-2.0
"""Images per second of shards and of a folder, the decode rate of a core, memory over an epoch.

    KEYMIX_DATA=DATA python benchmarks/streaming.py           # the photographs photos-6, 20 times
    python benchmarks/streaming.py --data PATH --copies 1     # a folder of one's own

Epochs of the same images take turns in one process, augmented as for ImageNet (crop, flip, 224
pixels), without workers. Rates are per second of processor time of this process, all threads
included, which other programs disturb little. Copies are links to the same files. Memory is what
is resident after each tenth of a last epoch of shards, and the most of a first one.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from keymix.data import Augment, ImageData, Loader, load
from keymix.data.sharding import LAYOUTS, write_shards
from measured import begin, options, spread, table

BATCH = 64
IMAGES = 2000  # decoded alone


def resident() -> float:
    """MiB that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def copied(source: Path, folder: Path, copies: int) -> Path:
    """Link the images of each class several times."""
    for file in (file for file in source.rglob("*.*") if file.is_file()):
        place = folder / file.relative_to(source).parent
        place.mkdir(parents=True, exist_ok=True)
        for copy in range(copies):
            (place / f"{copy}-{file.name}").symlink_to(file.absolute())
    return folder


def rate(serve: Callable[[], int]) -> float:
    """Images per second of processor time."""
    start = time.process_time()
    return serve() / (time.process_time() - start)


def epochs(data: ImageData) -> Callable[[], int]:
    """Serve the next epoch of the training images."""
    loader = Loader(
        data.train, data, batch_size=BATCH, train=True, augment=Augment(flip=True), seed=0
    )

    def serve() -> int:
        loader.set_epoch(loader.epoch + 1)
        return sum(len(batch.index) for batch in loader)

    return serve


def decoded(data: ImageData) -> Callable[[], int]:
    """Decode training images to pixels, and nothing else."""
    number = min(IMAGES, len(data.train))

    def serve() -> int:
        return sum(data.train.rows[i].image().ndim == 3 for i in range(number))

    return serve


def memory(data: ImageData) -> list[float]:
    """MiB resident after each tenth of an epoch."""
    loader = Loader(data.train, data, batch_size=BATCH, train=True, augment=Augment(flip=True))
    marks = {len(loader) * tenth // 10 for tenth in range(1, 11)}
    return [resident() for number, _ in enumerate(loader, 1) if number in marks]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--data", type=Path, help="a folder of a folder per class")
    parser.add_argument("--copies", type=int, default=20)
    parser.add_argument("--per-shard", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    given = begin(parser, argv)
    source = given.data or Path(os.environ["KEYMIX_DATA"]) / "photos-6"
    with tempfile.TemporaryDirectory() as place:
        folder = copied(source, Path(place) / "images", given.copies)
        maps = load(f"folder:{folder}", image_size=224)
        calls = {"decode alone": decoded(maps), "folder": epochs(maps)}
        for layout in LAYOUTS:
            out = Path(place) / layout
            write_shards(f"folder:{folder}", out, layout=layout, images=given.per_shard)
            data = load(f"stream:{out}", image_size=224)
            calls[f"{layout} shards"] = epochs(data)
        size = statistics.fmean(file.stat().st_size for file in source.rglob("*.*"))
        print(f"{len(maps.train):,} training images of {size / 1e3:.0f} kB on average")
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(given.rounds):
            for name, serve in calls.items():
                found[name].append(rate(serve))
        rows = [[f"{name}, images/s", *spread(of, ".0f")] for name, of in found.items()]
        for name in [name for name in calls if "shards" in name]:
            ratios = [a / b for a, b in zip(found[name], found["folder"], strict=True)]
            rows.append([f"{name} / folder", *spread(ratios, ".3f")])
        tenths = memory(data)
        rows.append(["resident over an epoch of shards, MiB", *spread(tenths, ".0f")])
        table(["what", "median", "least", "most"], rows)
        print(f"resident by tenths, MiB: {', '.join(f'{each:.0f}' for each in tenths)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
