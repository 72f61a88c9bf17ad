# SPDX-License-Identifier: Apache-2.0
"""What makes dense answers of an encoder's features: one folder per task, one file a decoder."""
