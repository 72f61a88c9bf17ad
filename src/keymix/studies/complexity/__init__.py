# SPDX-License-Identifier: Apache-2.0
"""What token mixers cost."""
