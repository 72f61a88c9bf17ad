# SPDX-License-Identifier: Apache-2.0
"""Where memory runs out: one line that names images and batch, in place of an allocator's text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from keymix.errors import UserError
from keymix.models.memory import memory_of_this_machine, ran_out

_FLOAT = 4  # bytes


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
    if _FLOAT * height * width > memory_of_this_machine():
        raise UserError(f"{told}.")
    try:
        yield
    except (MemoryError, RuntimeError, UserError) as error:
        if ran_out(error):
            raise UserError(f"{told}.") from error
        raise


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size
