"""One measured step, from the host's clock or from a torch profile, in the same form.

A `Step` holds what ran, in seconds since it began: programs and equations on the host, and kernels on the streams of
a GPU. A kernel belongs to the equation during whose range the host launched it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.tools.profile.instrument import RANGE, WHOLE, Log

STEP = f"{RANGE}step"
LAUNCHES = ("cuda_runtime", "cuda_driver")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Ran:
    """An equation, a whole program or a kernel; `equation` is (program, index), or None for a kernel of nobody's."""

    equation: tuple[int, int] | None
    start: float
    seconds: float
    name: str = ""  # of a kernel
    stream: str = ""


@dataclass
class Step:
    seconds: float
    host: list[Ran] = field(default_factory=list)
    kernels: list[Ran] = field(default_factory=list)

    def inside(self) -> float:
        """Seconds of the host inside equations."""
        return sum(ran.seconds for ran in self.host if ran.equation is not None and ran.equation[1] != WHOLE)

    def busy(self) -> tuple[float, list[tuple[float, float]]]:
        """Seconds in which some kernel ran, and the gaps between (start, seconds)."""
        total, gaps, end = 0.0, [], None
        for ran in sorted(self.kernels, key=lambda r: r.start):
            stop = ran.start + ran.seconds
            if end is None or ran.start > end:
                if end is not None:
                    gaps.append((end, ran.start - end))
                total += ran.seconds
                end = stop
            elif stop > end:
                total += stop - end
                end = stop
        return total, gaps


def from_log(log: Log, start: int, end: int) -> Step:
    """A step on the host alone."""
    host = [Ran((number, index), (a - start) / 1e9, (b - a) / 1e9) for number, index, a, b in log]
    return Step((end - start) / 1e9, host)


def from_torch_profile(events: Sequence[dict]) -> list[Step]:
    """The steps in a torch profile, exported as trace events."""
    whole = [e for e in events if e.get("ph") == "X"]
    ranges = sorted((e for e in whole if str(e.get("name", "")).startswith(RANGE)), key=lambda e: e["ts"])
    steps = [e for e in ranges if e["name"] == STEP]
    sampled = [Step(e["dur"] / 1e6) for e in steps]
    begins = [e["ts"] for e in steps]

    def step_at(ts: float) -> int | None:
        number = bisect.bisect_right(begins, ts) - 1
        return number if number >= 0 and ts <= begins[number] + steps[number]["dur"] else None

    equations = [e for e in ranges if e["name"] != STEP and not e["name"].endswith(f"/{WHOLE}")]
    for event in ranges:
        number = step_at(event["ts"])
        if number is not None and event["name"] != STEP:
            sampled[number].host.append(Ran(_key(event), (event["ts"] - begins[number]) / 1e6, event["dur"] / 1e6))
    launched = {e["args"]["correlation"]: e["ts"] for e in whole if e.get("cat") in LAUNCHES and _correlated(e)}
    starts = [e["ts"] for e in equations]
    for event in whole:
        if event.get("cat") not in KERNELS:
            continue
        when = launched.get(event.get("args", {}).get("correlation"), event["ts"])
        number = step_at(when)
        if number is None:
            continue
        place = bisect.bisect_right(starts, when) - 1
        inside = place >= 0 and when <= starts[place] + equations[place]["dur"]
        stream = f"GPU {event['args'].get('device', 0)} stream {event['args'].get('stream', 0)}"
        start = (event["ts"] - begins[number]) / 1e6
        owner = _key(equations[place]) if inside else None
        sampled[number].kernels.append(Ran(owner, start, event["dur"] / 1e6, event["name"], stream))
    return sampled


def _correlated(event: dict) -> bool:
    return "correlation" in event.get("args", {})


def _key(event: dict) -> tuple[int, int]:
    number, index = event["name"].removeprefix(RANGE).split("/")
    return int(number), int(index)
