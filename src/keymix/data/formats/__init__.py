# SPDX-License-Identifier: Apache-2.0
"""Formats of volumes: a file for each, which says how its voxels lie and reads and writes them."""
