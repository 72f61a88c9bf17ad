# SPDX-License-Identifier: Apache-2.0
"""Functions on tensors: one folder a mechanism, ``reference.py`` the specification, then faster."""
