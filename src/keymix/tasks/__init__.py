# SPDX-License-Identifier: Apache-2.0
"""The built-in tasks, a folder each; `keymix.task` says what a task is and finds them by name."""
