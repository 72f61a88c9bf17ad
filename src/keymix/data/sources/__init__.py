# SPDX-License-Identifier: Apache-2.0
"""Where images come from, one file a source.

Each file offers ``open_source(argument) -> Source``; `keymix.data.specs` names it.
"""
