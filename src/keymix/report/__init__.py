# SPDX-License-Identifier: Apache-2.0
"""The report: a comparison's record as one offline HTML page with inline charts."""
