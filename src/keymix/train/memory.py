# SPDX-License-Identifier: Apache-2.0
"""Where memory runs out: one line that names images and batch, in place of an allocator's text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from keymix.errors import UserError

_FLOAT = 4  # bytes
_ALLOCATORS = ("can't allocate memory", "not enough memory", "out of memory")


@contextmanager
def enough_memory(
    image_size: int | tuple[int, int] | None, batch_size: int | None = None
) -> Iterator[None]:
    """Tell in one line that memory ran out within.

    Args:
        image_size: Side, or height and width, of the images, pixels; None where nobody named it.
        batch_size: Training images at once; None where nothing is trained.

    Raises:
        UserError: If memory ran out, or cannot hold the pixels of a single image.
    """
    height, width = (0, 0) if image_size is None else _pair(image_size)
    pixels = "" if image_size is None else f" for images of {height}x{width} pixels"
    told = f"out of memory{pixels}: name a smaller image size"
    if batch_size is not None:
        told = f"{told}, data.batch_size ({batch_size}) or data.eval_batch_size"
    if _FLOAT * height * width > _of_this_machine():
        raise UserError(f"{told}.")
    try:
        yield
    except (MemoryError, RuntimeError, UserError) as error:
        if _ran_out(error) or _ran_out(error.__cause__):
            raise UserError(f"{told}.") from error
        raise


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _of_this_machine() -> float:
    """Bytes of its memory; infinite where the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")


def _ran_out(error: BaseException | None) -> bool:
    """Whether an error is an allocator's; on a CPU PyTorch has no class for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _ALLOCATORS)
