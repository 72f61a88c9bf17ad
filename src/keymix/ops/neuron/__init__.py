# SPDX-License-Identifier: Apache-2.0
"""Spiking neurons over time: currents in, spikes out."""
