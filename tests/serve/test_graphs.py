"""Steps that are replayed: in buckets, captured the second time, with the tokens of steps that are not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from families import differences, engine_of, model

from tessera.serve.engine import Engine
from tessera.serve.graphs import Graphs
from tessera.serve.inputs import bucket, padded, short, wide


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
    programs.graphs = Graphs(programs._call, programs.groups, programs.device, cuda)  # type: ignore[arg-type]
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
    """They are of few sizes as well, and give the same bits."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], [12, 13, 14]]
    plain, cuda = (Engine(model("llama"), memory=2**22, compiled=False, deterministic=True, budget=8) for _ in range(2))
    graphs = replaying(cuda, played := Replayed())._programs.graphs
    cuda.warm(20)
    assert played.captures == len({padded(bucket(n)) for n in range(1, 21)}) == 2
    told = [engine.generate(prompts, max_tokens=9, temperature=0.8, seed=3, logprobs=0) for engine in (plain, cuda)]
    assert [a.logprobs for a in told[0]] == [a.logprobs for a in told[1]]
    assert graphs is not None and played.captures == len(graphs.captured) == 3  # and prompts, the second time


def test_warming_captures_every_size() -> None:
    engine = replaying(Engine(model("llama"), memory=2**22, compiled=False, most_running=20), cuda := Replayed())
    engine.longest = 2**17  # positions that nobody asks for are no reason to get ready for others
    engine.warm()
    assert cuda.captures == 1  # what the first request needs
    engine.generate([1, 2, 3], max_tokens=6)
    assert cuda.captures == 2  # its prompt, of a size that was got ready
    engine = replaying(Engine(model("llama"), memory=2**22, compiled=False, most_running=20), cuda := Replayed())
    engine.warm(20)
    assert cuda.captures == len({bucket(n) for n in range(2, 21)}) == 5
    engine.generate([[1, 2, 3]] * 5, max_tokens=6)
    assert cuda.captures == 6


@pytest.mark.parametrize("step_seconds", [None, 1.0])
def test_prompts_are_replayed_and_captured_where_nobody_waits(step_seconds: float | None) -> None:
    engine = Engine(model("llama"), memory=2**22, compiled=False, step_seconds=step_seconds, reuse=False, budget=512)
    graphs = replaying(engine, cuda := Replayed())._programs.graphs
    assert graphs is not None

    def prompts() -> int:
        return sum(name == "mixed" for name, _ in graphs.captured)

    reading = engine.submit([9, 8, 7], max_tokens=40, ignore_eos=True)
    while reading.request.first_token is None:
        engine.step()
    told = [engine.generate([3] * 20, max_tokens=1, temperature=0, logprobs=0) for _ in range(3)]
    assert prompts() == (step_seconds is None)  # beside one who reads it would be a pause
    reading.close()
    told += [engine.generate([3] * 20, max_tokens=1, temperature=0, logprobs=0) for _ in range(3)]
    assert prompts() == 1 and cuda.captures == len(graphs.captured)
    values = torch.tensor([a.logprobs[0].value for (a,) in told])
    torch.testing.assert_close(values, values[:1].expand(6), atol=1e-5, rtol=0)


def test_sizes_of_prompts_that_are_replayed() -> None:
    for tokens, sequences, rows in ((5, 1, 1), (16, 3, 16), (64, 63, 40), (512, 1, 1), (513, 9, 9), (1000, 47, 48)):
        sizes = short(tokens, sequences, 20, rows)
        assert sizes is not None and sizes.tokens != sizes.sequences > sequences and sizes.columns == 128
        assert tokens <= sizes.tokens <= max(2 * tokens, 16, tokens + 63) and sizes.rows >= rows
        assert sizes.tokens % 16 == sizes.sequences % 16 == 0
    assert short(1025, 1, 20, 1) is None and short(512, 112, 20, 1) is None and short(512, 1, 20, 300) is None


def test_mixed_steps_come_in_sizes_of_one_kind() -> None:
    """Multiples of 16, for which kernels are compiled once; answers are as without the padding."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], [12] * 30, [4, 2] * 9]
    plain, cuda = (Engine(model("llama"), memory=2**22, compiled=False, budget=33) for _ in range(2))
    programs, seen = replaying(cuda, Replayed())._programs, []
    run = programs.run
    programs.run = lambda name, given, *more: (seen.append((name, given.sizes)), run(name, given, *more))[1]  # type: ignore[method-assign]
    told = [engine.generate(prompts, max_tokens=9, temperature=0.8, seed=3) for engine in (plain, cuda)]
    assert [a.tokens for a in told[0]] == [a.tokens for a in told[1]]
    mixed = [sizes for name, sizes in seen if name == "mixed"]
    assert mixed and all(size % 16 == 0 for sizes in mixed for size in sizes)


def test_sizes_hold_what_they_are_asked_for() -> None:
    assert all(bucket(n) >= n and bucket(n) <= max(2 * n, n + 15) for n in range(2, 300))
    assert [wide(n) for n in (2, 128, 129, 512, 513, 5000)] == [128, 128, 512, 512, 2048, 8192]
