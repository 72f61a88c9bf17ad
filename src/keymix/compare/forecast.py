# SPDX-License-Identifier: Apache-2.0
"""From the trials of the mixers to one estimate, told before the runs start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keymix.compare import spike_costs
from keymix.compare.costs import expected_seconds
from keymix.compare.estimate import Estimate, Trial
from keymix.compare.events import Event, Job, Watcher
from keymix.compare.plan import Plan

MAPS_SECONDS, MAPS_IMAGES = 2.0, 150
"""What attention maps and the page take: a fixed part, and so many images through every model."""


class Forecast:
    """Gathers what the trials say, and passes every other event on.

    Args:
        plan: The comparison.
        jobs: The runs that are left.
        sizes: Images of ``train``, ``val`` and ``test``.
        processes: Training processes side by side.
        unmeasured: Mixers whose cost will be measured.
        watch: Gets the estimate once all trials are in, and all other events.
    """

    def __init__(
        self,
        plan: Plan,
        jobs: Sequence[Job],
        *,
        sizes: Mapping[str, int],
        processes: int,
        unmeasured: Sequence[str],
        watch: Watcher,
    ) -> None:
        self._plan, self._jobs, self._sizes = plan, jobs, sizes
        self._processes, self._unmeasured, self._watch = processes, unmeasured, watch
        self._first = {job.mixer: job for job in reversed(jobs)}
        self._trials: dict[str, Trial | None] = {}

    def trials(self) -> list[Job]:
        """Return a trial for every mixer with runs left."""
        in_a_row = len(self._jobs) / len(self._first) / min(self._processes, len(self._jobs))
        return [
            Job(
                mixer=label,
                seed=self._first[label].seed,
                recipe=self._first[label].recipe,
                folder=self._first[label].folder,
                trial=in_a_row,
            )
            for label in self._plan.labels
            if label in self._first
        ]

    def __call__(self, event: Event) -> None:
        """Take a trial's event; pass any other on."""
        if event.kind != "tried":
            self._watch(event)
            return
        self._trials[event.mixer] = event.trial
        if self._trials.keys() == self._first.keys():
            estimate = self._estimate()
            if estimate is not None:
                self._watch(Event(kind="estimate", text=estimate.text(), estimate=estimate))

    def _estimate(self) -> Estimate | None:
        """Add it up; a mixer whose trial failed counts nothing, for its runs will fail as soon."""
        trials = {label: trial for label, trial in self._trials.items() if trial is not None}
        if not trials:
            return None
        runs, whole = {}, {}
        for job in self._jobs:
            trial = trials.get(job.mixer)
            if trial is not None:
                done = _epochs_done(job)
                runs[job.mixer, job.seed] = trial.run(job.recipe, self._sizes, epochs_done=done)
                whole[job.mixer] = trial.run(job.recipe, self._sizes)
        images = {label: trial.image for label, trial in trials.items()}
        typical = sum(images.values()) / len(images)
        every = [images.get(label, typical) for label in self._plan.labels]
        costs = [images.get(label, typical) for label in self._unmeasured]
        maps = MAPS_SECONDS + MAPS_IMAGES * sum(every)
        each = dict(zip(self._plan.labels, every, strict=True))
        spikes = spike_costs.expected_seconds(self._plan, each)
        return Estimate(
            runs=runs,
            whole=whole,
            after=expected_seconds(costs) + maps + spikes,
            processes=min(self._processes, len(self._jobs)),
        )


def _epochs_done(job: Job) -> int:
    from keymix.train.files import METRICS, read_metrics

    return min(len(read_metrics(job.folder / METRICS)), job.recipe.schedule.epochs)
