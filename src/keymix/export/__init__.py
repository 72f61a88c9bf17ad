# SPDX-License-Identifier: Apache-2.0
"""Models as files that run elsewhere, checked before they are written. ``keymix.export(…)``."""

from keymix._lazy import make_callable

make_callable(__name__, "export", "keymix.export.run")
