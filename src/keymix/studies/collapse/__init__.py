# SPDX-License-Identifier: Apache-2.0
"""Whether deep layers repeat their attention."""
