# SPDX-License-Identifier: Apache-2.0
"""Detection: boxes and masks of the instances in an image. See `keymix.task`."""
