# SPDX-License-Identifier: Apache-2.0
"""Where whole maps are faster on a CPU than PyTorch's fused attention: where they are small.

The fused kernel of PyTorch makes two products of matrices for each image, head and 32 queries (64
from 192 queries on). At 64 tokens and 32 channels per head one takes 2.6 us, of which little is
arithmetic, and 4.3 us in each of two threads of a process: they hinder each other in the library
of matrix products. Whole maps are two batched products, which two threads halve. But whole maps of
8 MiB or more are made of memory that is fresh in each pass, and leave the cache. In 16 bits whole
maps would round the logits, which the kernel forms in 32, and in float16 those above 65504 would
overflow. Times are in ``docs/performance.md``.
"""

from __future__ import annotations

import torch

FROM_ENTRIES, TO_ENTRIES = 3 * 2**14, 2**20
"""Entries of the maps of a call from which and up to which whole maps are faster."""

FEWEST_KEYS = 16
"""Keys below which a softmax over them fills no vector of 512 bits, and is slow."""


def whole_is_faster(entries: int, keys: int, dtype: torch.dtype) -> str | None:
    """Why whole maps are faster in the present mode and number of threads; None if they are not.

    They have ``entries`` in all, at most 4 MiB in float32, so that a layer keeps no more than that
    for its backward pass. Whether gradients are tracked, autocast and the threads of this process
    are asked of PyTorch.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    between = FROM_ENTRIES <= entries <= TO_ENTRIES and dtype.itemsize >= torch.float32.itemsize
    enough = torch.is_grad_enabled() or keys >= FEWEST_KEYS
    if not (between and enough and torch.get_num_threads() > 1):
        return None
    return (
        f"maps of {entries:,} entries are small: as a whole they are faster than the many small "
        "products of fused attention in several threads"
    )
