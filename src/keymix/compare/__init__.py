# SPDX-License-Identifier: Apache-2.0
"""Comparison: many runs, statistics, one report. ``keymix.compare(...)`` runs it."""

from keymix._lazy import make_callable

make_callable(__name__, "compare", "keymix.compare.run")
