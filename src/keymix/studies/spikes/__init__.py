# SPDX-License-Identifier: Apache-2.0
"""Firing rates, operations and energy of spiking networks."""
