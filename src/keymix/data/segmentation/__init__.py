# SPDX-License-Identifier: Apache-2.0
"""Images with masks: run lengths, scans of cases, splits by case, augmentation."""
