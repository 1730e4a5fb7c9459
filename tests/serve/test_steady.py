"""Many requests at random moments, some of them left, cancelled, late or malformed: all end once, nothing stays."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from families import model, token_bytes

from tessera.serve.engine import Engine
from tessera.util.errors import TesseraError


@pytest.mark.parametrize("ahead", [0, 1])
def test_everything_ends_once_and_nothing_is_left(ahead: int) -> None:
    """What ends how depends on the clock; that it ends does not."""
    draw, accepted = Random(0), []
    served = Engine(
        model("llama"), block_size=4, budget=24, memory=4 * 24 * token_bytes("llama"), most_running=8,
        speculate=0 if ahead else 2, compiled=False, check=True,
    )  # fmt: skip
    served._ahead = ahead

    async def ask() -> None:
        await asyncio.sleep(draw.random() / 4)
        wrong = draw.choice([[], [999], [1] * 70]) if draw.random() < 0.1 else None
        prompt = [draw.randrange(2, 64) for _ in range(draw.randint(1, 30))]
        try:
            stream = served.submit(
                prompt if wrong is None else wrong, max_tokens=draw.randint(1, 12), n=draw.choice([1, 1, 2]),
                temperature=draw.choice([0.0, 1.0]), priority=draw.randint(0, 2),
                deadline=draw.choice([None, None, 0.5]), presence_penalty=draw.choice([0.0, 0.5]),
            )  # fmt: skip
        except TesseraError:
            assert wrong is not None
            return
        assert wrong is None
        accepted.append(stream.request.settings.n)
        ends, leave = 0, draw.randint(1, 6) if draw.random() < 0.3 else None
        async for piece in stream:
            ends += piece.finish is not None
            if leave is not None and (leave := leave - 1) == 0:
                return
        assert ends == stream.request.settings.n

    async def everybody() -> list:
        tasks = [asyncio.create_task(ask()) for _ in range(60)]
        for task in tasks[::12]:
            await asyncio.sleep(0.02)
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    failed = [x for x in asyncio.run(everybody()) if x is not None and not isinstance(x, asyncio.CancelledError)]
    served.step()  # reads the notes of streams that were dropped
    facts = served.metrics()
    assert not failed and not served.busy and facts.used_blocks == facts.running == facts.waiting == 0
    assert sum(facts.ended.values()) == sum(accepted) and "error" not in facts.ended
