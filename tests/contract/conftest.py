# SPDX-License-Identifier: Apache-2.0
"""Every contract test runs on the device and in the precision of the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """Compute as ``--precision`` says: under autocast, or without TF32, which has 10 bits.

    Autocast keeps no narrow copies of weights, since tests change weights between two calls.
    """
    from mixer_cases import ARITHMETIC, DEVICE, DTYPE  # not before the options are known

    convolutions, products = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.autocast(
            DEVICE.type, ARITHMETIC, enabled=ARITHMETIC != DTYPE, cache_enabled=False
        ):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.backends.cuda.matmul.allow_tf32 = products
