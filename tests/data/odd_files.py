# SPDX-License-Identifier: Apache-2.0
"""Things that are named like files of data and are none; reading a pipe would take for ever."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from pathlib import Path

PATIENCE = 20  # seconds until a reader of a pipe is let go, so that a test fails and does not hang


def pipe(path: Path) -> None:
    os.mkfifo(path)

    def let_go() -> None:
        time.sleep(PATIENCE)
        while path.exists():
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError as error:
                if error.errno != errno.ENXIO:  # nobody reads it
                    return
            time.sleep(0.2)

    threading.Thread(target=let_go, daemon=True).start()


def listener(path: Path) -> None:
    at = Path.cwd()
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # a socket's path is short
        made.bind(path.name)
    os.chdir(at)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def loop(path: Path) -> None:
    path.symlink_to(path)


ODD = {
    "pipe": (pipe, "a named pipe"),
    "socket": (listener, "a socket"),
    "device": (device, "a device"),
    "dangling link": (dangling, "No such file"),
    "loop of links": (loop, "symbolic links"),
}
"""How each is made, and what is said of it."""
