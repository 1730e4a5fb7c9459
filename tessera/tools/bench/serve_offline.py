"""Jobs of `tessera bench serve --table` that ask the engine itself, on models with random weights.

    qwen, llama    256 requests of 100 to 1024 tokens in and out, all there from the start
    fp8            1000 tokens in and out, weights and cache in 8 bits, as many as run at once
    one, int4      one request: its first token, then the time between tokens
    long           a long prompt arrives among running streams: the longest time between two tokens of theirs
    prefix         64 requests that begin alike, with and without reuse
    deterministic  `qwen` with the same bits every time: what that costs
    huggingface    the requests of `qwen` through transformers' own continuous batching

Each job builds its engine, warms it up, and runs once. `--tiny` takes sizes for a CPU, in float32, which say nothing of
speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from tessera.serve.engine import Engine
from tessera.serve.sampling import Sampling
from tessera.tools.bench.serve_place import (
    LLAMA,
    QWEN,
    Measured,
    Place,
    built,
    finish,
    free,
    graphs,
    least,
    network,
    random_prompts,
    usual,
    watched,
)  # fmt: skip

MOST_SECONDS = 60.0  # of the job `huggingface`


def throughput(
    job: str, engine: Engine, prompts: list[list[int]], outs: list[int], bound: float | None, limit: float | None,
    place: Place,
) -> Measured:  # fmt: skip
    place.say(f"{job}: {len(prompts)} requests")
    before, start = engine.metrics(), finish(place.device)
    settings = [Sampling(temperature=0.6, ignore_eos=True, max_tokens=out, seed=i) for i, out in enumerate(outs)]
    answers = engine.generate(prompts, settings)
    took = finish(place.device) - start
    if wrong := [a for a, out in zip(answers, outs, strict=True) if len(a.tokens) != out]:
        raise AssertionError(f"{job}: an answer ended with {wrong[0].finish}: {wrong[0].error}")
    steps = engine.metrics().steps - before.steps
    note = f"{took:.1f} s, {steps} steps, {1e3 * took / steps:.2f} ms each; {graphs(engine)}"
    return Measured(job, "throughput", sum(outs) / took, "tok/s", bound, True, limit, note)


def crowd(job: str, name: str, bound: float, place: Place, **options: object) -> Iterator[Measured]:
    prompts, outs = usual(place)
    model = network(name, place)
    limit = sum(outs) / least(model, [(len(p), o) for p, o in zip(prompts, outs, strict=True)], place)
    engine = built(model, place, 2048, **{"budget": 8192, **options})
    yield throughput(job, engine, prompts, outs, bound, limit, place)


def qwen(place: Place) -> Iterator[Measured]:
    yield from crowd("qwen", QWEN, 20_000, place)


def llama(place: Place) -> Iterator[Measured]:
    yield from crowd("llama", LLAMA, 7_700, place)


def deterministic(place: Place) -> Iterator[Measured]:
    yield from crowd("deterministic", QWEN, 17_000, place, deterministic=True)


def fp8(place: Place) -> Iterator[Measured]:
    count, each = place.count(512), place.count(1000)
    lengths = [(each, each)] * count
    model = network(LLAMA, place)
    limit = each * count / least(model, lengths, place, 1, 1, "float8")
    engine = built(model, place, 2048, quantize="fp8", cache_dtype="fp8", budget=8192, most_running=512)
    yield throughput("fp8", engine, random_prompts(lengths), [each] * count, 10_600, limit, place)


def alone(
    job: str, bounds: tuple[float | None, float], place: Place, weight: float, **options: object
) -> Iterator[Measured]:
    """The median over five requests, one after another."""
    given, out = place.count(512), place.count(256)
    model = network(LLAMA, place)
    limits = 1e3 * least(model, [(given, 1)], place, weight), 1e3 * least(model, [(0, out)], place, weight) / out
    engine = built(model, place, 2048, **options)
    firsts, betweens = [], []
    for prompt in random_prompts([(given, out)] * 6, seed=1):
        start, times = finish(place.device), []
        for piece in engine.stream(prompt, max_tokens=out, ignore_eos=True, temperature=0):
            times += [time.perf_counter()] * bool(piece.tokens)
        firsts.append(1e3 * (times[0] - start))
        betweens.append(1e3 * (times[-1] - times[0]) / (len(times) - 1))
    yield Measured(job, "first token", median(firsts[1:]), "ms", bounds[0], False, limits[0])
    yield Measured(job, "between tokens", median(betweens[1:]), "ms", bounds[1], False, limits[1], graphs(engine))


def one(place: Place) -> Iterator[Measured]:
    yield from alone("one", (30.0, 5.2), place, 2)


def int4(place: Place) -> Iterator[Measured]:
    yield from alone("int4", (None, 2.7), place, 0.53, quantize="int4")


def long(place: Place) -> Iterator[Measured]:
    """Streams run; a long prompt comes. How long does anybody wait for a token, and how long does the newcomer?"""
    length, running = place.count(32768), place.count(32)
    model = network(LLAMA, place)
    engine = built(model, place, 2 * length + 1024, step_seconds=0.05, budget=4096, most_running=64)
    (prompt,) = random_prompts([(length, 1)])
    alone = []
    for _ in range(2):  # the first one gets kernels ready
        start = finish(place.device)
        list(engine.stream(prompt, max_tokens=1))
        alone.append(finish(place.device) - start)
    others, out = random_prompts([(64, 0)] * running, seed=2), place.count(4000)
    streams = [engine.submit(other, max_tokens=out, ignore_eos=True) for other in others]
    for _ in range(20):
        engine.step()
    start, late = time.perf_counter(), engine.submit([*prompt[1:], 7], max_tokens=1)
    times = watched(engine, streams, lambda: not late.request.left)
    took = time.perf_counter() - start
    for stream in streams:
        stream.close()
    worst = 1e3 * max(after - before for mine in times for before, after in zip([start, *mine], mine, strict=False))
    one_step = 1e3 * least(model, [(0, 1)] * running, place)
    yield Measured("long", "longest gap", worst, "ms", 60.0, False, one_step, f"{len(times[0])} steps meanwhile")
    note = f"{took:.2f} s, {alone[1]:.2f} s alone"
    yield Measured("long", "first token, times alone", took / alone[1], "x", 1.5, False, 1.0, note)


def prefix(place: Place) -> Iterator[Measured]:
    """Requests that begin alike come all at once, with and without reuse."""
    count, shared, own, out = place.count(64), place.count(2048), place.count(64), 32
    model = network(LLAMA, place)
    (common,) = random_prompts([(shared, 0)])
    prompts = [[*common, *each] for each in random_prompts([(own, 0)] * count, seed=3)]
    firsts, seconds = [], []
    for reuse in (False, True):
        engine = built(model, place, 4096, reuse=reuse)
        engine.generate([common], max_tokens=1)
        start = finish(place.device)
        streams = [engine.submit(prompt, max_tokens=out, ignore_eos=True) for prompt in prompts]
        times = watched(engine, streams, lambda streams=streams: not any(s.request.left for s in streams))
        seconds.append(finish(place.device) - start)
        firsts.append(median(mine[0] for mine in times) - start)
        del engine, streams
        free()
    whole, short = (least(model, [(given, out)] * count, place) for given in (shared + own, own))
    first, again = (least(model, [(given, 1)] * count, place) for given in (shared + own, own))
    told = [f"{1e3 * a:.0f} ms, {1e3 * b:.0f} ms without" for b, a in (firsts, seconds)]
    shares = firsts[1] / firsts[0], seconds[0] / seconds[1]
    yield Measured(
        "prefix", "first token p50, times without reuse", shares[0], "x", 0.25, False, again / first, told[0]
    )
    yield Measured("prefix", "throughput, times", shares[1], "x", 2.0, True, whole / short, told[1])


def huggingface(place: Place) -> Iterator[Measured]:
    """What transformers generates of the same requests, in its first minute if it takes longer."""
    from transformers import GenerationConfig

    prompts, outs = usual(place)
    model, nobody = network(QWEN, place), -1
    config = GenerationConfig(do_sample=False, max_new_tokens=max(outs), eos_token_id=nobody, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config, timeout=5) as manager:  # type: ignore[operator]
        for requests in ([(prompts[0], 16)], list(zip(prompts, outs, strict=True))):  # the first one warms up
            place.say(f"huggingface: {len(requests)} requests")
            start, counts = finish(place.device), dict[str, int]()
            left = {
                manager.add_request(prompt, max_new_tokens=out, eos_token_id=nobody, streaming=True)
                for prompt, out in requests
            }
            while left and time.perf_counter() - start < MOST_SECONDS:
                answer = manager.get_result(timeout=1)
                if answer is None:
                    continue
                if answer.error:
                    raise AssertionError(f"huggingface: {answer.error}")
                counts[answer.request_id] = len(answer.generated_tokens)
                left -= {answer.request_id} if answer.is_finished() else set()
            took, count = finish(place.device) - start, sum(counts.values())
    note = f"{count} of {sum(outs)} tokens in {took:.1f} s"
    yield Measured("huggingface", "throughput", count / took, "tok/s", note=note)
