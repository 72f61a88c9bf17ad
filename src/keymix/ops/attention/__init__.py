# SPDX-License-Identifier: Apache-2.0
"""softmax(s Q K^T + b) V, whatever Q and K are: computed, learned, or the same."""
