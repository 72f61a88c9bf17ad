# SPDX-License-Identifier: Apache-2.0
"""The task segmentation: facts, training, answers, page."""
