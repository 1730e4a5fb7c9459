"""Ten times the load that an engine can bear: whoever is accepted is served as if alone, and the rest is refused."""

from __future__ import annotations

from random import Random

import pytest
from families import model, token_bytes

from tessera.serve.engine import Engine
from tessera.serve.scheduler import Refused
from tessera.serve.stream import Stream

RUNNING, WAITING, BUDGET, OUT = 4, 6, 16, 12
STEPS = 150


def gaps(arrived: list[int]) -> list[int]:
    return [later - earlier for earlier, later in zip(arrived, arrived[1:], strict=False)]


@pytest.mark.parametrize("blocks", [200, 20])  # room for all that run; and too little, so that some give way
def test_accepted_requests_keep_their_pace(blocks: int) -> None:
    """Time is counted in steps, none of which has more tokens than the budget: alone, every step gives a token."""
    draw = Random(4)
    engine = Engine(
        model("llama"), memory=blocks * 4 * token_bytes("llama"), block_size=4, budget=BUDGET, most_running=RUNNING,
        most_waiting=WAITING, compiled=False, check=True,
    )  # fmt: skip
    # A request takes about OUT steps of one of RUNNING places: so many of them come in a step.
    rate, owed, refused = 10 * RUNNING / (OUT + 1), 0.0, 0
    arrived: dict[Stream, list[int]] = {}
    for step in range(10_000):
        if step >= STEPS and not engine.busy:
            break
        owed += rate if step < STEPS else 0.0
        while owed >= 1:
            owed -= 1
            prompt = [draw.randrange(2, 64) for _ in range(draw.randint(1, 20))]
            try:
                arrived[engine.submit(prompt, max_tokens=OUT, temperature=0, ignore_eos=True)] = []
            except Refused as error:
                assert error.retry  # the server answers 429, with Retry-After
                refused += 1
        engine.step()
        for stream, steps in arrived.items():
            while stream.request.pieces:
                steps += [step] * len(stream.request.pieces.popleft().tokens)
    facts = engine.metrics()
    assert all(len(steps) == OUT for steps in arrived.values())  # each was answered, whole
    assert facts.ended == {"length": len(arrived)} and facts.refused == refused and facts.used_blocks == 0
    assert refused > 0.8 * (refused + len(arrived)) and len(arrived) > RUNNING * STEPS / (OUT + 1) * 0.5
    assert (facts.preemptions > 0) == (blocks < 200)
    between = sorted(gap for steps in arrived.values() for gap in gaps(steps))
    assert sum(between) / len(between) <= 1.5 and between[len(between) // 2] == 1
    if not facts.preemptions:
        assert between[-1] == 1  # nobody waited for a step
