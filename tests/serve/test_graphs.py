"""Decode steps that are replayed: in buckets, captured the second time, with the tokens of steps that are not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from families import differences, engine_of, model

from tessera.serve.engine import Engine
from tessera.serve.graphs import Graphs
from tessera.serve.inputs import bucket, wide


class Replayed:
    """In place of CUDA: what was captured runs again, and leaves its results where they were."""

    captures = 0
    broken = False

    def pool(self) -> object:
        return self

    def capture(self, run: Callable[[], tuple], pool: object, device: torch.device) -> tuple[Callable[[], None], tuple]:
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        results = run()

        def replay() -> None:
            for old, new in zip(results, run(), strict=True):
                old.copy_(new)

        return replay, results


def replaying(engine: Engine, cuda: Replayed) -> Engine:
    programs = engine._programs
    programs.graphs = Graphs(
        lambda given: programs._call(programs.replayed, given), programs.groups, programs.device, cuda
    )  # type: ignore[arg-type]
    return engine


@pytest.mark.parametrize("broken", [False, True])
def test_replayed_steps_give_the_same_tokens(broken: bool) -> None:
    cuda = Replayed()
    cuda.broken = broken
    draw = Random(2)
    engine = replaying(engine_of("llama", draw), cuda)
    graphs = engine._programs.graphs
    assert graphs is not None and differences("llama", engine, draw, 12) == 0
    assert (graphs.reason is not None) == broken and len(graphs.captured) == cuda.captures
    assert broken or cuda.captures > 0


def test_deterministic_steps_are_replayed_too() -> None:
    """They are all of one size, whatever runs."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], [12, 13, 14]]
    plain, cuda = (Engine(model("llama"), memory=2**22, compiled=False, deterministic=True, budget=8) for _ in range(2))
    graphs = replaying(cuda, played := Replayed())._programs.graphs
    cuda.warm()
    told = [engine.generate(prompts, max_tokens=9, temperature=0.8, seed=3, logprobs=0) for engine in (plain, cuda)]
    assert [a.logprobs for a in told[0]] == [a.logprobs for a in told[1]]
    assert graphs is not None and played.captures == len(graphs.captured) == 1


def test_warming_captures_every_size() -> None:
    engine = replaying(Engine(model("llama"), memory=2**22, compiled=False, most_running=20), cuda := Replayed())
    engine.longest = 2**17  # positions that nobody asks for are no reason to get ready for others
    engine.warm()
    assert cuda.captures == 1  # what the first request needs
    engine.generate([1, 2, 3], max_tokens=6)
    assert cuda.captures == 1
    engine.warm(20)
    assert cuda.captures == len({bucket(n) for n in range(2, 21)}) == 5
    engine.generate([[1, 2, 3]] * 5, max_tokens=6)
    assert cuda.captures == 5


def test_mixed_steps_come_in_sizes_of_one_kind() -> None:
    """Multiples of 16, for which kernels are compiled once; answers are as without the padding."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], [12] * 30, [4, 2] * 9]
    plain, cuda = (Engine(model("llama"), memory=2**22, compiled=False, budget=33) for _ in range(2))
    programs, seen = replaying(cuda, Replayed())._programs, []
    run = programs.run
    programs.run = lambda name, given: (seen.append((name, given.sizes)), run(name, given))[1]  # type: ignore[method-assign]
    told = [engine.generate(prompts, max_tokens=9, temperature=0.8, seed=3) for engine in (plain, cuda)]
    assert [a.tokens for a in told[0]] == [a.tokens for a in told[1]]
    mixed = [sizes for name, sizes in seen if name == "mixed"]
    assert mixed and all(size % 16 == 0 for sizes in mixed for size in sizes)


def test_sizes_hold_what_they_are_asked_for() -> None:
    assert all(bucket(n) >= n and bucket(n) <= max(2 * n, n + 15) for n in range(2, 300))
    assert [wide(n) for n in (2, 128, 129, 512, 513, 5000)] == [128, 128, 512, 512, 2048, 8192]
