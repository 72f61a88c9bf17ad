# SPDX-License-Identifier: Apache-2.0
"""Files of data are regular files: a named pipe or a device would be waited for without end."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def regular(path: str | Path) -> Path:
    """Check that a path leads to a regular file, before anything opens it."""
    path = Path(path)
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise OSError(
            errno.EINVAL, f"{_KINDS.get(kind, 'something else')}, not a regular file", str(path)
        )
    return path
