# SPDX-License-Identifier: Apache-2.0
"""Decoders from feature maps to the logits of pixels."""
