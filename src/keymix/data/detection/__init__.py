# SPDX-License-Identifier: Apache-2.0
"""Images with instances: boxes and masks of objects, as COCO stores them."""
