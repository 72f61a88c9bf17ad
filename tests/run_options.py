# SPDX-License-Identifier: Apache-2.0
"""Where and how exactly the contract tests compute; tests/conftest.py sets it from its options."""

from __future__ import annotations

DEVICES = ("cpu", "cuda")
PRECISIONS = ("64", "32", "bf16", "16")  # of numbers; the last two by autocast of float32

device = "cpu"
precision = "64"
