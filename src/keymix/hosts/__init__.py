# SPDX-License-Identifier: Apache-2.0
"""Adapters that know where attention sits in models of other libraries: one file a family."""

from keymix._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "find_host": "keymix.hosts.base",
        "find_mixers": "keymix.hosts.base",
        "class_token_reads_image": "keymix.hosts.base",
        "put_mixers": "keymix.hosts.base",
    },
)
