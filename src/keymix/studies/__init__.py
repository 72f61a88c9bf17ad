# SPDX-License-Identifier: Apache-2.0
"""The analyses of ``keymix analyze``, a folder each: its options, what it measures, its page."""
