# SPDX-License-Identifier: Apache-2.0
"""The UW-Madison GI Tract set as it is: run lengths in a CSV, 16-bit slices in folders of cases."""
