# SPDX-License-Identifier: Apache-2.0
"""What a Chrome trace of `torch.profiler` says of the GPU: kernels, copies, waits, and idle time.

Work on the GPU belongs to the part of the program that launched it: a kernel's ``correlation`` is
that of its launch, and the launch lies within labels, ``record_function`` with names that begin
with `PREFIX`, all of one thread. A launch by another thread, such as autograd's, counts to the
label that is open at its time: the thread of the labels waits for it.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_queue.job import Result

Event = Mapping[str, Any]

PREFIX = "keymix: "
NOWHERE = "between parts"
TOP = 25
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")
_WAIT = re.compile(r"cuda(Stream|Device|Event)Synchronize")
_ASK = ("aten::item", "aten::_local_scalar_dense")  # the first calls the second
_WIDEST = 110  # characters of a kernel's name

GROUPS = (  # the first that fits counts; of a kernel's name and of the operation that launched it
    ("attention", r"flash|fmha|attention|sdpa|mem_eff"),
    (
        "matrix products",
        r"gemm|gemv|nvjet|cublas|splitk|cutlass|xmma|triton_tem|cudnn|conv|dgrad|wgrad|"
        r"aten::(addmm|mm|bmm|baddbmm|linear|matmul)$",
    ),
    ("normalisation and softmax", r"(layer|batch|group|rms)_?norm|gammabeta|softmax"),
    ("reductions", r"reduce|triton_(red|per)_|argmax|topk|aten::(sum|mean|norm)$"),
    (
        "copies and casts",
        r"memcpy|memset|_copy_kernel|catarray|transpose|aten::(copy_|_to_copy|clone|cat|stack)$",
    ),
    ("elementwise", r"elementwise|triton_poi_|dropout|gelu|gather|scatter|index|fill|functor"),
)
OTHER = "other"


def read(path: Path) -> list[Event]:
    """Read the events of a trace that last."""
    content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return [event for event in content["traceEvents"] if event.get("ph") == "X"]


class Labels:
    """Which label is the innermost at a time."""

    def __init__(self, events: Iterable[Event]) -> None:
        marks = []
        self.first: dict[str, float] = {}
        for event in events:
            name = event["name"]
            if event.get("cat") != "user_annotation" or not name.startswith(PREFIX):
                continue
            start, name = float(event["ts"]), name.removeprefix(PREFIX)
            self.first[name] = min(start, self.first.get(name, start))
            if event["dur"] > 0:  # ends come first, then the longest of those that begin
                marks += [(start, 1, -event["dur"], name), (start + event["dur"], 0, 0.0, name)]
        open_now: list[str] = []
        self._times, self._names = [-1.0], [NOWHERE]
        for time, begins, _, name in sorted(marks):
            if begins:
                open_now.append(name)
            else:
                open_now.reverse()  # the innermost of this name ends
                open_now.remove(name)
                open_now.reverse()
            self._times.append(time)
            self._names.append(open_now[-1] if open_now else NOWHERE)

    def at(self, time: float) -> str:
        """Name the innermost label, or `NOWHERE`."""
        return self._names[bisect.bisect_right(self._times, time) - 1]


class Work(NamedTuple):
    """Something that the GPU did.

    Args:
        start: When, microseconds.
        end: Until when.
        name: Of the kernel or copy.
        label: Of the part that launched it.
        operation: Of PyTorch, that launched it; empty if unknown.
        size: Bytes of a copy.
    """

    start: float
    end: float
    name: str
    label: str
    operation: str
    size: int


def work_of(events: Iterable[Event], labels: Labels) -> list[Work]:
    """List what the GPU did, in the order of its start."""
    events = list(events)
    launched: dict[Any, float] = {}
    operations: dict[Any, str] = {}
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") in _CALLS and "correlation" in arguments:
            launched[arguments["correlation"]] = float(event["ts"])
        elif event.get("cat") == "cpu_op" and "External id" in arguments:
            operations[arguments["External id"]] = event["name"]
    found = []
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        arguments, start = event.get("args", {}), float(event["ts"])
        found.append(
            Work(
                start,
                start + float(event["dur"]),
                event["name"],
                labels.at(launched.get(arguments.get("correlation"), start)),
                operations.get(arguments.get("External id"), ""),
                int(arguments.get("bytes", 0)),
            )
        )
    return sorted(found)


def group_of(work: Work, owners: Mapping[str, str]) -> str:
    """Classify a kernel: by the part that launched it if it owns its kernels, else by names."""
    return owners.get(work.label) or _group(work.name.lower(), work.operation.lower())


@functools.cache
def _group(*names: str) -> str:
    for group, pattern in GROUPS:
        if any(re.search(pattern, name) for name in names):
            return group
    return OTHER


def idle(work: Sequence[Work], start: float, end: float) -> tuple[float, dict[str, float]]:
    """Microseconds in which the GPU worked, and those of its gaps by the part that ended each.

    The gap at the end counts as `NOWHERE`.
    """
    busy, until, gaps = 0.0, start, dict.fromkeys([NOWHERE], 0.0)
    for each in work:
        first, last = max(each.start, until), min(each.end, end)
        if first > until:
            gap = min(first, end) - until
            gaps[each.label] = gaps.get(each.label, 0.0) + max(0.0, gap)
        busy += max(0.0, last - first)
        until = max(until, last)
    gaps[NOWHERE] += max(0.0, end - until)
    return busy, gaps


def summary(
    events: Sequence[Event],
    *,
    steps: int,
    parts: Collection[str],
    ends: str,
    owners: Mapping[str, str],
) -> Result:
    """Sum up what the GPU did for some parts of the program, a step.

    Args:
        events: Of the trace.
        steps: How many steps it has.
        parts: Labels of these parts.
        ends: The label at whose first begin they end.
        owners: Groups of all kernels that a part launches.
    """
    labels = Labels(events)
    begun = [labels.first[name] for name in parts if name in labels.first]
    start, end = min(begun), labels.first[ends]
    work = [each for each in work_of(events, labels) if each.label in parts]
    busy, gaps = idle(work, start, end)
    groups, kernels = defaultdict(list), defaultdict(list)
    for each in work:
        group, length = group_of(each, owners), each.end - each.start
        groups[group].append(length)
        kernels[each.name[:_WIDEST], group].append(length)
    calls = [e for e in events if e.get("cat") in _CALLS and labels.at(e["ts"]) in parts]
    launches = [e["dur"] for e in calls if _LAUNCH.match(e["name"])]
    asked: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"] == _ASK[-1]:
            asked[labels.at(event["ts"])] += 1
    return {
        "steps": steps,
        "wall_ms": (end - start) / 1e3,
        "busy_ms": busy / 1e3,
        "idle_ms": {name: gap / 1e3 for name, gap in gaps.items()},
        "groups": {name: _sums(lengths) for name, lengths in groups.items()},
        "top": [
            {"kernel": name, "group": group, **_sums(lengths)}
            for (name, group), lengths in _most(kernels)[:TOP]
        ],
        "launches_per_step": len(launches) / steps,
        "launches_ms": sum(launches) / 1e3,
        "copies": _copies(work),
        "waits": _waits(calls, labels),
        "asked": {name: count for name, count in asked.items() if name in parts},
    }


def _sums(lengths: Sequence[float]) -> Result:
    return {"ms": sum(lengths) / 1e3, "calls": len(lengths)}


def _most(named: Mapping[Any, list[float]]) -> list[tuple[Any, list[float]]]:
    return sorted(named.items(), key=lambda item: -sum(item[1]))


def _copies(work: Iterable[Work]) -> list[Result]:
    """Copies to and from the GPU by part and direction."""
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for each in work:
        way = re.search(r"HtoD|DtoH", each.name)
        if way:
            found[each.label, way[0]].append(each.size)
    return [
        {"part": part, "way": way, "copies": len(sizes), "bytes": sum(sizes)}
        for (part, way), sizes in sorted(found.items())
    ]


def _waits(calls: Iterable[Event], labels: Labels) -> list[Result]:
    """Waits of the host for the GPU by part and call."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in calls:
        if _WAIT.match(event["name"]):
            found[labels.at(event["ts"]), event["name"]].append(event["dur"])
    return [{"part": part, "call": call, **_sums(each)} for (part, call), each in _most(found)]


def cut(events: Iterable[Event], start: float, end: float) -> list[Event]:
    """The events that begin within a time."""
    return [event for event in events if start <= event["ts"] < end]
