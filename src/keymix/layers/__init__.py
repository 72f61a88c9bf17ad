# SPDX-License-Identifier: Apache-2.0
"""Shared parts of models that no library has."""
