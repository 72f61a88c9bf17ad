# SPDX-License-Identifier: Apache-2.0
"""How long a set of recordings takes to start, the first time and later.

Writes a synthetic CIFAR10-DVS (random events in AEDAT 2.0) into a temporary folder and loads it as
frames: the first start reads and counts all events, the second maps the kept frames.

    python benchmarks/event_frames.py --per-class 200
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keymix.data import Loader, load
from keymix.data.sources.cifar10dvs import CLASSES
from measured import begin, options, table


def write(root: Path, per_class: int, events: int) -> None:
    """Write the set."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            words = np.empty((events, 2), dtype=">u4")
            words[:, 0] = rng.integers(0, 1 << 15, events)
            words[:, 1] = np.sort(rng.integers(0, 1_300_000, events))
            content = b"#!AER-DAT2.0\r\n" + words.tobytes()
            (root / name / f"cifar10_{name}_{i}.aedat").write_bytes(content)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--per-class", type=int, default=20, help="recordings (default 20)")
    parser.add_argument("--events", type=int, default=200_000, help="of each (default 200000)")
    given = begin(parser, argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "set", given.per_class, given.events)
        for start in ("first start", "second start"):
            began = time.perf_counter()
            data = load(f"cifar10dvs:{folder}/set", time_steps=16)
            rows.append([start, f"{time.perf_counter() - began:.2f} s"])
        began = time.perf_counter()
        loader = Loader(data.train, data, batch_size=16, train=True)
        frames = sum(len(batch.images) for batch in loader)
        what = f"an epoch of {frames:,} recordings in batches of 16"
        rows.append([what, f"{time.perf_counter() - began:.2f} s"])
    recordings = given.per_class * len(CLASSES)
    table([f"{recordings:,} recordings of {given.events:,} events at T = 16", "time"], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
