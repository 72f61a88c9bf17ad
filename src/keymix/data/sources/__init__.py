# SPDX-License-Identifier: Apache-2.0
"""Where inputs come from, one file a source.

A file declares what it opens as ``SPECS``, a tuple of calls of `keymix.data.specs.DataSpec` whose
arguments are constants, and offers ``open_source(argument, faults) -> Source``. The folder is
searched: nothing else names a source.
"""
