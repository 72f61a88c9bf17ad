# SPDX-License-Identifier: Apache-2.0
"""Segmentation: a class for every pixel."""
