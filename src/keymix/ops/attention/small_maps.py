# SPDX-License-Identifier: Apache-2.0
"""Where whole maps are faster on a CPU than PyTorch's fused attention: where they are small.

The fused kernel of PyTorch makes two products of matrices for each image, head and 32 queries (64
from 192 queries on). At 64 tokens and 32 channels per head one takes 2.6 us, of which little is
arithmetic, and 4.3 us in each of two threads of a process: they hinder each other in the library
of matrix products. Whole maps are two batched products, which two threads halve. But whole maps of
8 MiB or more are made of memory that is fresh in each pass, and leave the cache. Backward, the
kernel is slower still in bfloat16, by one thread as well. In float16 logits above 65504 would
overflow, which the kernel forms in 32 bits. Times are in ``docs/performance.md``.
"""

from __future__ import annotations

import torch

FROM_ENTRIES, TO_ENTRIES = 3 * 2**14, 2**20
"""Entries of the maps of a call from which and up to which whole maps are faster."""

FROM_NARROW, TO_NARROW = 2**11, 2**21
"""The same in training in bfloat16."""

FEWEST_KEYS = 16
"""Keys below which a softmax over them fills no vector of 512 bits, and is slow."""


def whole_is_faster(entries: int, keys: int, dtype: torch.dtype) -> str | None:
    """Why whole maps are faster in the present mode and number of threads; None if they are not.

    They have ``entries`` in all, at most 4 MiB in either width, so that a layer keeps no more than
    that for its backward pass. Whether gradients are tracked, autocast and the threads of this
    process are asked of PyTorch.
    """
    small = f"maps of {entries:,} entries are small: as a whole they are faster than "
    tracks = torch.is_grad_enabled()
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if dtype == torch.float16:
        return None
    if tracks and dtype == torch.bfloat16 and FROM_NARROW <= entries <= TO_NARROW:
        return f"{small}the backward pass of fused attention in bfloat16"
    between = FROM_ENTRIES <= entries <= TO_ENTRIES
    if between and (tracks or keys >= FEWEST_KEYS) and torch.get_num_threads() > 1:
        return f"{small}the many small products of fused attention in several threads"
    return None
