# SPDX-License-Identifier: Apache-2.0
"""Decoders that turn maps of an encoder into boxes and masks of instances."""
