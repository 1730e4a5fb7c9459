"""Random traffic for the scheduler and the cache, without a model. Also a script:

    PYTHONPATH=. python tests/serve/traffic.py 100000

Memory is played: every slot remembers the sequence prefix that was written there. Before each token is "computed", all
that it would attend to must hold exactly its own prefix: so sharing, copies, windows and eviction are all looked at.
Some worlds choose a step before they are told the tokens of the one before, as the engine does on a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from random import Random

from tessera.serve.blocks import NULL
from tessera.serve.cache import Cache
from tessera.serve.scheduler import UNKNOWN, Answer, Batch, Refused, Scheduler, Work


class World:
    """A scheduler, what is in its memory, and everybody who has asked for something."""

    def __init__(self, seed: int):
        self.random = draw = Random(seed)
        size = draw.choice([1, 2, 4, 8])
        windows = draw.choice([[0], [0], [0, 7], [5], [0, 3, 12]])
        blocks = draw.randint(8, 40)
        sizes = [blocks if not w else max(blocks // 2, -(-w // size) + 2) for w in windows]
        self.cache = Cache(size, windows, sizes, reuse=draw.random() < 0.8)
        self.scheduler = Scheduler(
            self.cache, budget=draw.choice([3, 8, 32, 64]), most_running=draw.choice([1, 3, 16]), most_waiting=12,
            longest=100, step_seconds=draw.choice([None, 0.5]),
        )  # fmt: skip
        self.speculates = draw.random() < 0.3
        self.ahead = 0 if self.speculates else draw.randint(0, 1)
        self.flights: deque[list[tuple[Work, list[int]]]] = deque()  # steps under way, and what they will give
        self.memory: dict[tuple[int, int], int] = {}
        self.asked: list[Answer] = []
        self.ends: Counter[int] = Counter()
        self.refused = 0
        self.number, self.now = 0, 0.0

    def step(self) -> None:
        self.now += self.random.random()
        if self.random.random() < 0.5:
            self.arrive()
        if self.random.random() < 0.1:
            self.cancel()
        for answer in self.scheduler.running:
            self.guess(answer)
        batch = self.scheduler.schedule(self.now)
        self.ends.update(answer.id for answer in batch.expired)
        self.run(batch, self.ahead)
        self.scheduler.took(self.random.random(), batch)
        self.scheduler.check()

    def arrive(self) -> None:
        """A request, often beginning like others, sometimes for several answers."""
        draw = self.random
        tokens = [draw.randrange(3) for _ in range(draw.choice([1, 2, 5, 12, 30, 70]))]
        if draw.random() < 0.5:
            tokens = ([7] * 20 + tokens)[-90:]
        fields = {
            "max_tokens": draw.randint(1, 12),
            "arrival": self.now,
            "priority": draw.randint(-1, 2),
            "deadline": self.now + draw.random() * 20 if draw.random() < 0.2 else None,
            "salt": draw.choice([b"", b"", b"x"]),
        }
        parent = None
        for _ in range(draw.choice([1, 1, 1, 3])):
            self.number += 1
            answer = Answer(self.number, list(tokens), parent=parent, **fields)
            parent = parent or answer
            try:
                self.scheduler.admits(len(tokens), answer.max_tokens)
                self.scheduler.put(answer)
            except Refused:
                self.refused += 1
                return
            self.asked.append(answer)

    def cancel(self) -> None:
        alive = [answer for answer in self.asked if answer.ended is None]
        if alive:
            self.finish(self.random.choice(alive), "cancelled")

    def finish(self, answer: Answer, why: str) -> None:
        self.scheduler.end(answer, why)
        self.ends[answer.id] += 1

    def guess(self, answer: Answer) -> None:
        left = answer.max_tokens - (len(answer.tokens) - answer.prompt) - 1
        answer.draft = [self.random.randrange(3) for _ in range(min(left, 3))] if self.speculates else []

    # --- memory ---

    def run(self, batch: Batch, ahead: int = 0) -> None:
        assert batch.tokens <= self.scheduler.budget and len(batch.works) <= self.scheduler.most_running
        for group, source, target in batch.copies:
            for offset in range(self.cache.block_size):
                here, there = (block * self.cache.block_size + offset for block in (source, target))
                self.memory[group, there] = self.memory.get((group, here), 0)
        coming = {work.sequence: given for flight in self.flights for work, given in flight}
        for work in batch.works:
            if work.tokens == (UNKNOWN,):
                work.tokens = (coming[work.sequence][-1],)
        for work in batch.works:
            self.write(work)
        for work in batch.works:
            self.read(work)
        self.scheduler.launched(batch)
        self.flights.append([(work, self.sample(work)) for work in batch.works])
        while len(self.flights) > ahead:
            for work, given in self.flights.popleft():
                self.take(work, given)

    def slot(self, answer: Answer, group: int, position: int) -> tuple[int, int]:
        assert answer.table is not None
        block = answer.table.blocks[group][position // self.cache.block_size]
        assert block != NULL
        return group, block * self.cache.block_size + position % self.cache.block_size

    def text(self, work: Work) -> list[int]:
        return [*work.sequence.tokens[: work.first], *work.tokens]

    def write(self, work: Work) -> None:
        text = self.text(work)
        for group in range(len(self.cache.pools)):
            for position in range(work.first, work.end):
                prefix = hash((work.sequence.salt, *text[: position + 1]))
                self.memory[self.slot(work.sequence, group, position)] = prefix

    def read(self, work: Work) -> None:
        text = self.text(work)
        for group, window in enumerate(self.cache.windows):
            for position in range(max(0, work.first - window + 1) if window else 0, work.end):
                prefix = hash((work.sequence.salt, *text[: position + 1]))
                assert self.memory[self.slot(work.sequence, group, position)] == prefix

    def sample(self, work: Work) -> list[int]:
        accepted = self.random.randint(0, work.drafted)
        kept = work.tokens[len(work.tokens) - work.drafted :][:accepted]
        return [*kept, self.random.randrange(3)] if work.samples else []

    def take(self, work: Work, given: list[int]) -> None:
        answer = work.sequence
        if answer.ended is not None:
            return  # it ended while the step ran
        self.scheduler.advance(work, given)
        if len(answer.tokens) - answer.prompt >= answer.max_tokens:
            self.finish(answer, "length")
        elif work.samples and self.random.random() < 0.05:
            self.finish(answer, "stop")

    def drain(self) -> None:
        """Nobody comes any more: all that was asked ends, exactly once, and every block is free again."""
        for _ in range(20_000):
            if not (self.scheduler.running or self.scheduler.waiting):
                break
            batch = self.scheduler.schedule(self.now)
            assert batch.works or self.flights, "a step of nothing while sequences wait"
            self.run(batch, self.ahead if batch.works else 0)
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.ends == Counter(answer.id for answer in self.asked)
        self.scheduler.check()
        for pool in self.cache.pools:
            assert pool.available == pool.size


def simulate(seed: int, steps: int) -> World:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.drain()
    return world


if __name__ == "__main__":
    total, each, ended, preempted, reused = int(sys.argv[1]), 250, 0, 0, 0
    for seed in range(total // each):
        world = simulate(seed, each)
        ended += len(world.asked)
        preempted += world.scheduler.preemptions
        reused += world.scheduler.reused
    print(f"{total} steps: {ended} sequences ended once each, {preempted} preemptions, {reused} tokens reused")
