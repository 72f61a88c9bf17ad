# SPDX-License-Identifier: Apache-2.0
"""The version, alone in a file so that the build reads it without importing anything."""

__version__ = "0.1.0"
