# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share lies next to them, in no installed package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
