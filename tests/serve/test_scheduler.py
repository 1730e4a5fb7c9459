"""Who runs when: the budget, ranks, deadlines, preemption and refusal; and random traffic over all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from traffic import simulate

from tessera.serve.cache import Cache
from tessera.serve.scheduler import Answer, Batch, Refused, Scheduler


def scheduler(blocks: int = 64, **options: object) -> Scheduler:
    return Scheduler(Cache(4, [0], [blocks]), **options)  # type: ignore[arg-type]


def answer(number: int, length: int, most: int = 8, **fields: object) -> Answer:
    return Answer(number, [number * 1000 + i for i in range(length)], most, **fields)  # type: ignore[arg-type]


def run(s: Scheduler, now: float = 0.0) -> Batch:
    """A step whose sampled tokens are all 0."""
    batch = s.schedule(now)
    s.launched(batch)
    for work in batch.works:
        s.advance(work, [0] if work.samples else [])
    s.check()
    return batch


def parts(batch: Batch) -> dict[int, int]:
    return {work.sequence.id: len(work.tokens) for work in batch.works}


def test_running_sequences_first_then_prompts_in_chunks() -> None:
    s = scheduler(budget=8)
    s.put(answer(1, 4))
    assert parts(run(s)) == {1: 4}
    s.put(answer(2, 20))
    s.put(answer(3, 3))
    assert parts(run(s)) == {1: 1, 2: 7}
    assert parts(run(s)) == {1: 1, 2: 7}
    assert parts(run(s)) == {1: 1, 2: 6, 3: 1}
    assert parts(run(s)) == {1: 1, 2: 1, 3: 2}


def test_prompts_get_as_much_of_a_step_as_keeps_the_asked_time() -> None:
    """A token of a prompt costs a millisecond, then five: steps keep the asked time, from the first one on."""
    s = scheduler(blocks=1024, budget=320, step_seconds=0.1, longest=4000)
    s.put(answer(1, 1, most=50))
    run(s)
    s.put(answer(2, 2000))
    seconds = []
    for cost in [0.001] * 6 + [0.005] * 6:
        batch = run(s)
        seconds.append(0.002 + cost * parts(batch)[2])
        s.took(seconds[-1], batch)
    assert max(seconds[:6]) <= 0.1 and seconds[5] > 0.08
    assert seconds[6] > 0.1 and max(seconds[7:]) <= 0.1 and seconds[-1] > 0.08


def test_prompts_advance_where_decoding_alone_is_too_slow() -> None:
    s = scheduler(budget=64, step_seconds=0.01)
    s.put(answer(1, 1, most=50))
    run(s)
    s.put(answer(2, 40))
    for _ in range(20):
        batch = run(s)
        s.took(1.0, batch)
    assert s.running[1].computed > s.running[1].prompt
    s.put(answer(3, 100))
    most = 0
    for _ in range(6):
        batch = run(s)
        most = max(most, parts(batch)[3])
        s.took(0.001, batch)
    assert most > 20


def test_priority_goes_before_arrival_but_waiting_makes_up_for_it() -> None:
    s = scheduler(budget=4, most_running=1)
    s.put(answer(1, 4, arrival=0.0))
    s.put(answer(2, 4, arrival=1.0, priority=1))
    s.put(answer(3, 4, arrival=50.0, priority=1))
    assert [a.id for a in s.waiting] == [2, 1, 3]


def test_deadlines_end_what_waits_and_what_runs() -> None:
    s = scheduler(budget=4, most_running=1)
    s.put(answer(1, 4, deadline=5.0))
    s.put(answer(2, 4, deadline=4.0))
    run(s, now=1.0)
    assert [a.id for a in run(s, now=4.5).expired] == [2]
    batch = run(s, now=5.0)
    assert [a.ended for a in batch.expired] == ["deadline"] and not batch.works
    assert s.cache.pools[0].available == 64


def test_the_lowest_rank_gives_way_and_is_computed_again() -> None:
    s = scheduler(blocks=6, budget=16)
    for number in (1, 2):
        s.put(answer(number, 8, most=12))
        run(s)
    ended: list[int] = []
    for _ in range(60):
        for a in [a for a in s.running if len(a.tokens) - a.prompt >= a.max_tokens]:
            s.end(a, "length")
            ended.append(a.id)
        run(s)
    assert ended == [1, 2] and s.preemptions >= 1


def test_what_never_fits_is_refused_with_numbers() -> None:
    s = scheduler(blocks=4, longest=100)
    with pytest.raises(Refused, match=r"10 tokens of prompt and up to 8 more are 18; the cache's blocks hold 16"):
        s.admits(10, 8)
    with pytest.raises(Refused, match="at least one token"):
        s.admits(0, 8)
    s = scheduler(most_waiting=1)
    s.put(answer(1, 4))
    with pytest.raises(Refused, match="1 sequences are waiting; at most 1 may") as refused:
        s.admits(4, 8)
    assert refused.value.retry
    with pytest.raises(Refused, match="n: 2 answers are asked for at once; at most 1 sequences may wait") as refused:
        s.admits(4, 8, 2)
    assert not refused.value.retry


def test_ending_twice_is_noticed() -> None:
    s = scheduler()
    a = answer(1, 4)
    s.put(a)
    s.end(a, "cancelled")
    with pytest.raises(AssertionError, match="ended twice"):
        s.end(a, "cancelled")


def test_answers_to_one_prompt_compute_it_once() -> None:
    s = scheduler(budget=64)
    parent = answer(1, 10)
    s.put(parent)
    s.put(Answer(2, list(parent.tokens), 8, parent=parent))
    assert parts(run(s)) == {1: 10}
    batch = run(s)
    assert parts(batch) == {1: 1, 2: 1} and len(batch.copies) == 1


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic(seed: int) -> None:
    """250 steps each; `traffic.py` as a script runs as many as one likes."""
    world = simulate(seed, 250)
    assert world.asked


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(8, 108))
def test_more_random_traffic(seed: int) -> None:
    simulate(seed, 250)


def test_it_needs_no_torch() -> None:
    code = "import sys; import tessera.serve.scheduler; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
