# SPDX-License-Identifier: Apache-2.0
"""What a comparison is going to do and what its test split can show, in words, before it trains."""

from __future__ import annotations

from keymix.analysis.certainty import CLEAR_SEEDS, TYPICAL_ACCURACY, foreseen_margin
from keymix.compare.defaults import updates
from keymix.compare.plan import Plan
from keymix.data.dataset import ImageData
from keymix.report.formats import seeds as in_words


def summary(plan: Plan, data: ImageData) -> str:
    """Say in a line what a comparison uses and does.

    Such as ``13,165 grey images of 64x64, as they are · limited to 1,800 to train on, 200 to
    validate, 2,000 to test · vit_micro_conv_p4_32, patches of 8 · 1,026 updates of 32 · 6 mixers +
    plain network × 3 seeds``.
    """
    model, train = plan.recipe.model, len(data.train)
    sizes = f"{train:,} to train on, {len(data.val):,} to validate, {len(data.test):,} to test"
    limit = plan.recipe.data.limit
    host = [model.name]
    if "patch_size" in model.options:
        host.append(f"patches of {model.options['patch_size']}")
    mixers = f"{len(plan.mixed)} mixers"
    extra = [each.label for each in plan.mixers if each.reference]
    runs = " + ".join([mixers, *extra])
    seeds = in_words(len(plan.seeds))
    parts = [
        plan.used,
        sizes if limit is None else f"limited to {sizes}",
        ", ".join(host),
        f"{updates(plan.recipe, train):,} updates of {min(plan.recipe.data.batch_size, train)}",
        f"{runs} × {seeds}",
    ]
    return " · ".join(part for part in parts if part)


def what_it_can_show(plan: Plan, data: ImageData) -> str:
    """Say the least margin within which mixers could be found equal; empty if nothing is known."""
    units = len(data.test)
    if not data.task.right_or_wrong or data.facts.compared_by or units < 2:
        return ""
    seeds = max(CLEAR_SEEDS, len(plan.seeds))
    margin = data.task.score.changed(foreseen_margin(units, seeds), sign=False)
    text = (
        f"{units:,} test {data.kind.nouns} and {seeds} seeds can show that mixers are equal within "
        f"{margin} (at {100 * TYPICAL_ACCURACY:.0f} % accuracy)"
    )
    few = len(plan.seeds) < CLEAR_SEEDS
    return f"{text}; {in_words(len(plan.seeds))} cannot" if few else text
