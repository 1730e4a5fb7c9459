"""What is counted of each step and of each token, and the latest steps for a timeline.

In: steps that have landed. Out: `Metrics`, and how long each step took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tessera.serve.metrics import Metrics
from tessera.serve.requests import Request
from tessera.serve.roofline import Roofline
from tessera.serve.runner import Flight, Moment, between

EVENTS = 10_000  # steps that a timeline shows


@dataclass(frozen=True, slots=True)
class Event:
    """One step, for the timeline."""

    name: str
    start: float
    seconds: float
    tokens: int
    sequences: int

    def plain(self) -> dict[str, object]:
        """As Perfetto and Chrome read it."""
        times = {"ts": self.start * 1e6, "dur": self.seconds * 1e6}
        args = {"tokens": self.tokens, "sequences": self.sequences}
        return {"name": self.name, "ph": "X", "pid": 1, "tid": 1, **times, "args": args}


class Meter:
    def __init__(self, roofline: Roofline):
        self.counts, self._roofline = Metrics(), roofline
        self._events = deque[Event](maxlen=EVENTS)
        self._landed = 0.0  # when the latest step landed
        self._done: Moment | None = None  # when the device ended it; None: nobody was left then

    def step(self, flight: Flight, waited: float, now: float, more: bool) -> float:
        """A step has landed, for which the host has waited since `waited`; is there `more` to compute? Counted is its
        time since its launch, or since the step before landed; given back is the time that the device took for it. Two
        steps may land at once, and the second seems to take no time at all."""
        counts, works, start = self.counts, flight.batch.works, max(flight.start, self._landed)
        counts.host_idle += now - waited
        if self._done is not None:
            counts.device_idle += max(0.0, between(self._done, flight.begun))
        self._landed, self._done = now, flight.done if more else None
        counts.steps += 1
        counts.step.add(now - start)
        counts.step_limit += self._roofline.seconds(works)
        tokens = flight.batch.tokens
        name = "decode" if tokens == len(works) else "mixed"
        self._events.append(Event(name, start, now - start, tokens, len(works)))
        return between(flight.begun, flight.done)

    def tokens(self, request: Request, count: int, now: float) -> None:
        """A request got so many new tokens."""
        self.counts.new_tokens += count
        if request.first_token is None:
            request.first_token = now
            self.counts.first_token.add(now - request.arrival)
        elif request.last_token is not None and request.settings.n == 1:
            self.counts.between_tokens.add(now - request.last_token)
        request.last_token = now

    def timeline(self) -> dict[str, object]:
        return {"traceEvents": [event.plain() for event in self._events], "displayTimeUnit": "ms"}
