# SPDX-License-Identifier: Apache-2.0
"""How long a set of recordings takes to start, the first time and later.

Writes a synthetic CIFAR10-DVS (random events in AEDAT 2.0) into a temporary folder, or the one that
``--folder`` names, and loads it twice as frames: the first start reads and counts all events, the
second maps the kept frames.

    python benchmarks/event_frames.py --per-class 20 --events 200000 --time-steps 16
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from keymix.data import Loader, load
from keymix.data.sources.cifar10dvs import CLASSES


def write(root: Path, per_class: int, events: int) -> int:
    """Write the set; returns its bytes."""
    rng = np.random.default_rng(0)
    total = 0
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            words = np.empty((events, 2), dtype=">u4")
            words[:, 0] = rng.integers(0, 1 << 15, events)
            words[:, 1] = np.sort(rng.integers(0, 1_300_000, events))
            content = b"#!AER-DAT2.0\r\n" + words.tobytes()
            (root / name / f"cifar10_{name}_{i}.aedat").write_bytes(content)
            total += len(content)
    return total


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-class", type=int, default=20)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--time-steps", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where the set is written; it must be new")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "set" if given.folder is None else given.folder
        size = write(root, given.per_class, given.events)
        count = 10 * given.per_class
        print(f"{count} recordings of {given.events:,} events, {size / 1e9:.2f} GB")
        for start in ("first", "second", "third"):
            began = time.perf_counter()
            data = load(f"cifar10dvs:{root}", time_steps=given.time_steps)
            print(f"{start} start: {time.perf_counter() - began:.2f} s")
        began = time.perf_counter()
        loader = Loader(data.train, data, batch_size=16, train=True)
        frames = sum(len(batch.images) for batch in loader)
        seconds = time.perf_counter() - began
        print(f"an epoch of {frames} recordings in batches of 16: {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
