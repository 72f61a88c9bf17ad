# SPDX-License-Identifier: Apache-2.0
"""Training: recipes, the task, the engine, checkpoints. ``keymix.train(recipe, out)`` runs one."""

from keymix._lazy import make_callable

make_callable(__name__, "train", "keymix.train.engine")
