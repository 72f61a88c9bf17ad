# SPDX-License-Identifier: Apache-2.0
"""Timing in turns and the test of two latencies, on simulated machines: no clock of this one."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from keymix.analysis import timing
from keymix.analysis.timing import Clock, Paired, Pass, Samples, Turns, compare, fewest_rounds

SELF = 100
"""Comparisons of a pass with itself on every machine: at level 1 %, two at most."""


class Machine:
    """Wall and CPU time of a core that drifts, falters and is shared with other programs.

    Args:
        speed: Factor of a pass at a time.
        tail: Share of passes that take far longer, on this core.
        others: Slices that other programs run between two of ours.
        granted: Seconds of a slice.
    """

    def __init__(
        self,
        seed: int,
        speed: Callable[[float], float] = lambda at: 1.0,
        tail: float = 0.0,
        others: float = 0.0,
        granted: float = 0.003,
    ) -> None:
        self.chance, self.speed, self.tail = random.Random(seed), speed, tail
        self.others, self.granted, self.left = others, granted, granted
        self.wall = self.cpu = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.cpu, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.left = self.granted  # a program that slept gets a whole slice

    def work(self, seconds: float) -> None:
        seconds *= self.speed(self.wall) * math.exp(self.chance.gauss(0, 0.01))
        if self.chance.random() < self.tail:
            seconds *= 1 + self.chance.paretovariate(1.1)
        while self.others and seconds > self.left:
            self.wall += self.left + self.granted * self.others * self.chance.uniform(0.3, 1.7)
            self.cpu += self.left
            seconds -= self.left
            self.left = self.granted
        self.wall += seconds
        self.cpu += seconds
        self.left -= seconds


MACHINES: dict[str, dict[str, Any]] = {
    "quiet": {},
    "drifts": {"speed": lambda at: 1 + 2 * at},
    "slows down halfway": {"speed": lambda at: 1.0 if at < 0.12 else 2.5},
    "falters": {"tail": 0.2},
    "waves": {"speed": lambda at: 1 + 0.5 * math.sin(300 * at)},
    "has slow spells": {"speed": lambda at: 1.5 if math.sin(7 * at) > 0 else 1.0},
    "is shared by three": {"others": 1.0},
    "is shared by ten": {"others": 4.0},
}


def compared(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    passes: tuple[Callable[[], object], Callable[[], object]],
    rounds: int = 20,
) -> Paired:
    monkeypatch.setattr(timing, "CLOCK", machine.clock())
    turns = Turns(dict(zip("ab", map(Pass, passes), strict=True)))
    for _ in range(rounds):
        turns.round()
    return compare(turns.samples["a"], turns.samples["b"])


def steady(machine: Machine, seconds: float, ratio: float) -> tuple[Any, Any]:
    return (lambda: machine.work(seconds)), (lambda: machine.work(ratio * seconds))


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_ORDER", random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0021, 0.012])
@pytest.mark.parametrize("name", MACHINES)
def test_a_pass_is_not_called_different_from_itself(
    name: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = Counter()
    for seed in range(SELF):
        machine = Machine(seed, **MACHINES[name])
        verdicts[compared(machine, monkeypatch, steady(machine, seconds, 1.0)).verdict] += 1
    assert verdicts["different"] <= 0.02 * SELF, verdicts
    if name == "quiet":
        assert verdicts["not distinguishable"] == SELF


@pytest.mark.parametrize("seconds", [0.0002, 0.0021, 0.012])
@pytest.mark.parametrize("name", ["quiet", "drifts", "slows down halfway", "has slow spells"])
def test_a_slower_pass_is_called_different_by_how_much_it_is(
    name: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(10):
        machine = Machine(seed, **MACHINES[name])
        found = compared(machine, monkeypatch, steady(machine, seconds, 1.3))
        assert found.verdict == "different"
        assert found.ratio == pytest.approx(1.3, rel=0.05)
        assert found.ratio_q1 <= found.ratio <= found.ratio_q3
        assert found.p <= 0.01


def test_next_to_other_programs_short_passes_are_compared_by_undisturbed_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("is shared by three", "is shared by ten"):
        for seed in range(20):
            machine = Machine(seed, **MACHINES[name])
            found = compared(machine, monkeypatch, steady(machine, 0.0015, 1.3))
            assert found.verdict == "different"
            assert found.ratio == pytest.approx(1.3, rel=0.02)


def test_a_ratio_that_is_the_scheduler_s_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass just longer than a slice waits for others in every round: 5 times, not 6 %."""
    for seed in range(20):
        machine = Machine(seed, others=4.0)
        found = compared(machine, monkeypatch, steady(machine, 0.0029, 1.08))
        assert found.ratio > 2
        assert (found.verdict, found.ratio_text()) == ("busy", "busy")


@pytest.mark.parametrize("before", [1.0, 0.8])
def test_halves_that_contradict_each_other_claim_nothing(
    before: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What disturbs one of two passes from the middle on makes no difference of theirs."""
    machine = Machine(0)

    def disturbed() -> None:
        machine.work(0.01 * (before if machine.wall < 0.25 else 1.3))

    found = compared(machine, monkeypatch, (lambda: machine.work(0.01), disturbed))
    assert found.verdict == "busy"


def test_a_half_that_says_nothing_alone_confirms_nothing() -> None:
    base = [1 + 0.01 * i for i in range(20)]
    ratios = [*(1.06 + 0.0001 * i for i in range(15)), *(0.99 + 0.0001 * i for i in range(5))]
    other = [each * ratio for each, ratio in zip(base, ratios, strict=True)]
    found = compare(Samples(base, base), Samples(other, other))
    assert found.p <= 0.001
    assert found.verdict == "not distinguishable"


def test_one_preempted_pass_of_the_warm_up_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(6):
        machine, passes = Machine(0), 0

        def work(machine: Machine = machine, at: int = at) -> None:
            nonlocal passes
            machine.work(0.0002)
            if passes == at:  # of the six of the warm-up
                machine.wall += 0.3
                machine.cpu += 0.1
            passes += 1

        monkeypatch.setattr(timing, "CLOCK", machine.clock())
        assert Turns({"a": Pass(work), "b": Pass(work)}).inner in (5, 6)


def test_every_round_times_all_equally_often_in_an_order_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, log = Machine(0), []

    def work(name: str, seconds: float) -> None:
        log.append(name)
        machine.work(seconds)

    monkeypatch.setattr(timing, "CLOCK", machine.clock())
    turns = Turns(
        {"a": Pass(lambda: work("a", 0.001)), "b": Pass(lambda: work("b", 0.003))}, warmup=5
    )
    assert turns.inner == 1
    assert log == ["a", "b"] * 5
    log.clear()
    for _ in range(20):
        turns.round()
    rounds = list(zip(log[::2], log[1::2], strict=True))
    assert set(rounds) == {("a", "b"), ("b", "a")}
    assert len(turns.samples["a"].wall) == len(turns.samples["b"].wall) == len(rounds)
    assert len(rounds) in (40, 60)  # short passes have several samples: about 5 ms each a round
    assert sorted(turns.samples["a"].wall)[30] == pytest.approx(0.001, rel=0.02)


@pytest.mark.slow
def test_comparisons_that_are_read_together_share_the_level() -> None:
    base = [1.0 + 0.001 * i for i in range(12)]
    other = [1.3 * each for each in base]
    samples = Samples(base, base), Samples(other, other)
    assert compare(*samples).p == pytest.approx(2 / 2**12)
    assert compare(*samples, comparisons=20).verdict == "different"
    assert compare(*samples, comparisons=21).verdict == "too few rounds"
    assert [fewest_rounds(n) for n in (1, 5, 6, 13, 20, 21)] == [10, 10, 11, 12, 12, 13]


@pytest.mark.parametrize(("rounds", "verdict"), [(9, "too few rounds"), (10, "different")])
def test_few_rounds_show_nothing(rounds: int, verdict: str) -> None:
    base = [1.0 + 0.001 * i for i in range(rounds)]
    other = [1.3 * each for each in base]
    assert compare(Samples(base, base), Samples(other, other)).verdict == verdict


def test_a_difference_as_small_as_memory_makes_is_not_called() -> None:
    base = [1.0 + 0.001 * i for i in range(40)]
    for ratio, verdict in (
        (1.015, "not distinguishable"),
        (1.03, "different"),
        (0.97, "different"),
    ):
        other = [ratio * each for each in base]
        assert compare(Samples(base, base), Samples(other, other)).verdict == verdict


def test_one_round_of_equal_times_says_nothing() -> None:
    one = Samples([0.5], [0.5])
    found = compare(one, one)
    assert (found.verdict, found.p, found.ratio) == ("too few rounds", 1.0, 1.0)
    assert found.ratio_text() == "few"


def test_a_device_is_waited_for_and_its_samples_are_never_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, log = Machine(0), []
    monkeypatch.setattr(timing, "CLOCK", machine.clock())

    def launch() -> None:
        log.append("call")

    def wait() -> None:
        log.append("wait")
        machine.wall += 0.01  # of which this thread runs nothing

    turns = Turns({"a": Pass(launch, wait)})
    turns.round()
    assert log[-3:] == ["wait", "call", "wait"]
    assert turns.samples["a"].quiet() == [True]
    assert turns.samples["a"].wall == [pytest.approx(0.01)]


def test_disturbed_samples_are_left_out_where_enough_are_quiet() -> None:
    wall = [1.0] * 12 + [3.0] * 12
    samples = Samples(wall, [1.0] * 24)
    assert samples.kept() == [1.0] * 12
    assert samples.quiet_share() == 0.5
    assert Samples(wall[4:], [1.0] * 20).kept() == wall[4:]  # eight quiet ones are too few


def test_rounds_are_set_aside_only_where_the_rest_can_show_a_difference() -> None:
    own = [1.0 + 0.001 * i for i in range(15)]
    base = Samples([each * (1.0 if i < 11 else 1.5) for i, each in enumerate(own)], own)
    other = Samples([1.3 * each for each in base.wall], [1.3 * each for each in own])
    one, many = compare(base, other), compare(base, other, comparisons=13)
    assert (one.rounds, one.verdict) == (11, "different")
    assert (many.rounds, many.verdict) == (15, "different")


def test_where_all_rounds_count_a_few_disturbed_ones_give_no_ratio_of_the_scheduler_s() -> None:
    """Eight of 14 rounds are quiet, too few alone; the waits of the others move the median."""
    own = [1.0 + 0.001 * i for i in range(14)]
    ran = [1.3, 1.6, 1.3, 1.6, 1.3, 1.3, 1.3] * 2
    waited = [1.3, 1.6, 1.3, 1.6, 2.0, 2.0, 2.0] * 2
    cpu, wall = ([own[i] * (each[i] + 0.001 * i) for i in range(14)] for each in (ran, waited))
    found = compare(Samples(own, own), Samples(wall, cpu), comparisons=13)
    assert (found.rounds, found.quiet_share) == (14, 8 / 14)
    assert (found.p < 0.0007, found.verdict) == (True, "busy")
    assert compare(Samples(own, own), Samples(cpu, cpu), comparisons=13).verdict == "different"
