# SPDX-License-Identifier: Apache-2.0
"""Peak memory and time of one image's mask: in sliding windows, and with the whole image at once.

    keymix train small_masks_unet --data uwgi:DATA --model unet --model.options.backbone resnet18 \
        --epochs 1 --out unet
    python benchmarks/windows.py unet

Each is ``keymix.load(run).predict`` of an image of random pixels in a process of its own, of one
thread. Memory, in MiB, is by how much the resident set grows over that, at most. "kept" is the part
of it that any way must have in memory per pixel: the image as bytes and as values, its logits, and
the sum of the windows' weights.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

import keymix
from measured import begin, options, table

SIDES, WHOLE = (512, 1024, 2048, 4096), 2048
MIB = 2**20


def resident(key: str) -> float:
    """MiB that this process has (VmRSS) or had at most (VmHWM)."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) / 1024


def predicted(run: Path, size: int, side: int, overlap: float | None) -> tuple[float, float, int]:
    """Predict an image of a side at a size; MiB, seconds, and bytes that a pixel keeps."""
    torch.set_num_threads(1)
    trained = keymix.load(run, image_size=size, overlap=overlap)
    shape = (side, side) if trained.data.in_chans == 1 else (side, side, trained.data.in_chans)
    image = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    trained.predict(image[:size, :size])  # code is loaded now
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the most starts again from here
    before, start = resident("VmRSS"), time.process_time()
    trained.predict(image)
    kept = trained.data.in_chans * 5 + len(trained.classes) * 4 + 4
    return resident("VmHWM") - before, time.process_time() - start, kept


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("run", type=Path, help="a run on masks")
    parser.add_argument("--window", type=int, default=256, help="default: 256")
    parser.add_argument("--overlap", type=float, default=0.5, help="default: 0.5")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, help="of images, pixels")
    parser.add_argument("--whole", type=int, default=WHOLE, help="side up to which all is seen")
    given = begin(parser, argv)
    rows = []
    for side in given.sides:
        wanted = [(given.window, given.overlap), *([(side, None)] if side <= given.whole else [])]
        # a process each: memory that was freed but not returned would hide what the next takes
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            found = [pool.submit(predicted, given.run, size, side, at) for size, at in wanted]
        (grown, seconds, kept), *whole = (each.result() for each in found)
        least = kept * side**2 / MIB
        numbers = [least, grown, grown - least, *(each[0] for each in whole)]
        cells = [f"{number:,.0f}" for number in numbers] + ["–"] * (1 - len(whole))
        times = [f"{number:.1f}" for number in (seconds, *(each[1] for each in whole))]
        rows.append([f"{side}²", *cells, *times, *["–"] * (1 - len(whole))])
    heads = ("pixels", "kept", "windows", "windows less kept", "whole", "windows, s", "whole, s")
    table(heads, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
