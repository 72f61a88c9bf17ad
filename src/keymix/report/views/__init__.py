# SPDX-License-Identifier: Apache-2.0
"""From the plain record to what each section of the page shows: rows, charts, pictures."""
