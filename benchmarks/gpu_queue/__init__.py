# SPDX-License-Identifier: Apache-2.0
"""Measurements on one GPU that is there for half an hour: jobs in order, each resumable."""
