# SPDX-License-Identifier: Apache-2.0
"""The task classification: facts, training, answers, page."""
