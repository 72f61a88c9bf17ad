# SPDX-License-Identifier: Apache-2.0
"""Layers between spikes, trained with little memory: bytes for inputs, potentials recomputed."""
