"""A long prompt passes in pieces beside streams: no step takes much longer than is asked, whatever attention costs."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from tessera.serve.cache import Cache
from tessera.serve.pace import Pace
from tessera.serve.scheduler import Answer, Batch, Scheduler, Work

LONG, STREAMS, ASKED = 32768, 32, 0.05


class Simulated:
    """A device with such costs, to which steps are launched one ahead. `launch`: the least that prompts take."""

    def __init__(self, pair: float, launch: float, asked: float | None = ASKED):
        self.scheduler = Scheduler(Cache(16, [0], [6000], False), 4096, 64, 4096, None, asked)
        self.pair, self.launch, self.draw = pair, launch, Random(0)
        self.under_way = deque[Batch]()

    def seconds(self, batch: Batch) -> float:
        prompts = [(w.first, len(w.tokens)) for w in batch.works if not w.decodes]
        pairs = sum(count * (first + count / 2) for first, count in prompts)
        took = 0.006 + 23e-6 * sum(count for _, count in prompts) + self.pair * pairs
        return (max(took, self.launch) if prompts else took) * self.draw.uniform(0.96, 1.04)

    def step(self) -> float:
        """Launch a step, then land the one before it: how long that took."""
        s, took = self.scheduler, 0.0
        batch = s.schedule()
        s.launched(batch)
        self.under_way.append(batch)
        if len(self.under_way) > bool(batch.works):
            landed = self.under_way.popleft()
            took = self.seconds(landed)
            for work in landed.works:
                answer = work.sequence
                if answer.ended is None:
                    s.advance(work, [1] * work.samples)
                    if len(answer.tokens) - answer.prompt >= answer.max_tokens:
                        s.end(answer, "length")
            s.took(took, landed)
        return took

    def whole(self, number: int) -> list[float]:
        """A long prompt from its arrival to its first token: how long each step took."""
        late, took = Answer(number, [1] * LONG, 1), []
        self.scheduler.put(late)
        while late.ended is None:
            took.append(self.step())
        return took


@pytest.mark.parametrize("launch", [0.02, 0.04])
@pytest.mark.parametrize("pair", [1e-9, 2.6e-9, 8e-9])  # attention at its best; as good as products; slow
def test_a_long_prompt_keeps_the_asked_time(pair: float, launch: float) -> None:
    device = Simulated(pair, launch)
    alone = sum(device.whole(1))
    for i in range(STREAMS):
        device.scheduler.put(Answer(i + 2, [1] * 64, 4000))
    for _ in range(20):
        device.step()
    for number in (100, 101):
        took = device.whole(number)
        assert max(took) <= 1.25 * ASKED and sum(took) <= 1.5 * alone


@pytest.mark.parametrize("pair", [1e-9, 2.6e-9, 8e-9])
def test_the_first_long_prompt_does_so_before_anything_is_known(pair: float) -> None:
    device = Simulated(pair, 0.03)
    for i in range(STREAMS):
        device.scheduler.put(Answer(i + 2, [1] * 64, 4000))
    for _ in range(20):
        device.step()
    took = device.whole(100)
    assert max(took) <= 1.4 * ASKED and sorted(took)[len(took) // 2] >= 0.7 * ASKED


def test_a_step_that_took_strangely_long_is_soon_forgotten() -> None:
    pace = Pace(4096, ASKED)
    for first in range(0, 20_000, 1000):
        pace.took(0.045, True, [(first, 1000)])
    before = pace.tokens(20_000, pace.room)
    pace.took(2.0, True, [(20_000, 1000)])
    assert pace.tokens(21_000, pace.room) < before / 10
    pace.took(0.005, True, [(21_000, 64)])
    pace.took(0.045, True, [(21_064, 1000)])
    assert pace.tokens(22_000, pace.room) > 0.7 * before


def test_a_slow_first_step_of_others_is_forgotten_by_the_next_prompt() -> None:
    """Kernels that were not ready delay the prompts of streams. Only steps that decode come between that and a long
    prompt, whose first pieces are too small to tell anything."""
    device = Simulated(1.9e-9, 0.026)
    alone = sum(device.whole(1))
    for i in range(STREAMS):
        device.scheduler.put(Answer(i + 3, [1] * 64, 4000))
    for _ in range(20):
        device.step()
    device.scheduler.took(1.0, Batch([Work(Answer(2, [1] * 64, 1), 0, (1,) * 64, True)] * STREAMS, [], []))
    took = device.whole(100)
    assert max(took) <= 1.2 * ASKED and sum(took) <= 1.5 * alone


def test_layers_that_look_a_little_back_cost_the_same_everywhere() -> None:
    pace = Pace(4096, ASKED, reach=512)
    for first in range(0, 20_000, 1000):
        pace.took(0.02, True, [(first, 500)])
    counts = {pace.tokens(first, pace.room) for first in (1000, 10_000, 100_000)}
    assert len(counts) == 1 and 700 <= counts.pop() <= 750  # no more than half as many again as ever were tried
