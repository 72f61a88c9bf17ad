# SPDX-License-Identifier: Apache-2.0
"""The token mixers: one file a mechanism, found by looking into this folder.

``base`` holds the seam, ``map_mixer`` what all mixers with an attention map share,
``registry`` finds and makes mixers, ``spec`` reads them from text. Every other module is one
mechanism.
"""
