# SPDX-License-Identifier: Apache-2.0
"""The sections of a comparison's page, a module each: `keymix.report.comparison_page` finds them.

A module has ``PLACE``, by which sections are ordered (those of the task are at `OWN`), and
``sections(shown)``, which yields what it shows of a `keymix.report.part.Shown`, in order. One that
needs more than a heading, charts, tables and notes has a template in ``templates/sections``.
"""

OWN = 50
"""Where the task's own sections are."""
