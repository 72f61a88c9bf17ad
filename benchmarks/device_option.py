# SPDX-License-Identifier: Apache-2.0
"""The option ``--device`` of benchmarks: one line where a device cannot be used."""

from __future__ import annotations

import argparse

from keymix.analysis.complexity_sites import usable_device
from keymix.errors import UserError


def device_name(name: str) -> str:
    """Check the name of a device, as the ``type`` of an argparse option.

    Raises:
        ArgumentTypeError: If it cannot be used here.
    """
    try:
        usable_device(name)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name
