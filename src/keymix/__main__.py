# SPDX-License-Identifier: Apache-2.0
"""``python -m keymix`` is the ``keymix`` command."""

import sys

from keymix.cli import main

if __name__ == "__main__":
    sys.exit(main())
