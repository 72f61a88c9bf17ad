# SPDX-License-Identifier: Apache-2.0
"""Q-K attention: neurons of the queries, their sum, its neurons, and the keys that these keep."""
