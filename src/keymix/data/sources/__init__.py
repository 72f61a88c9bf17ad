# SPDX-License-Identifier: Apache-2.0
"""Where inputs come from, one file a source.

A source is a function under the decorator `keymix.data.specs.source`, whose arguments are
constants. The folder is searched: nothing else names a source.
"""
