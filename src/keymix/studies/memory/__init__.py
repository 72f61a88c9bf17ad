# SPDX-License-Identifier: Apache-2.0
"""Peak memory of attention against the number of tokens."""
