"""`tessera bench serve --offline`: the engine alone, on models with random weights, beside what the machine allows.

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

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import torch

from tessera.machines import machine, machine_of
from tessera.serve.engine import Engine
from tessera.serve.sampling import Sampling
from tessera.tools.bench import serve_limit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Say = Callable[[str], None]
Lengths = list[tuple[int, int]]
QWEN, LLAMA = "Qwen3-0.6B", "Llama-3.1-8B"


@dataclass
class Measured:
    """One figure. `limit` is the best that the machine allows; `bound` what is asked, at least or at most."""

    job: str
    what: str
    value: float
    unit: str
    bound: float | None = None
    at_least: bool = True
    limit: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass
class Place:
    """Where and how large: the device, and whether sizes are those of a CPU."""

    device: str
    tiny: bool = False
    say: Say = print
    options: dict[str, object] = field(default_factory=dict)

    def count(self, number: int) -> int:
        return max(2, number // 32) if self.tiny else number


def network(name: str, place: Place) -> PreTrainedModel:
    """A model with random weights; nothing is fetched."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    if name == QWEN:
        config = Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )  # fmt: skip
    else:
        config = LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        )  # fmt: skip
    if place.tiny:
        for key, value in (("vocab_size", 12000), ("hidden_size", 64), ("intermediate_size", 128), ("head_dim", 16)):
            setattr(config, key, value)
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 4, 2
    torch.manual_seed(0)
    with torch.device(place.device):
        # few CPUs multiply in 16 bits: elsewhere PyTorch does so number by number
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32 if place.tiny else torch.bfloat16).eval()


def built(model: PreTrainedModel, place: Place, longest: int, **options: object) -> Engine:
    place.say("building the engine")
    shared = {"longest": longest, "reuse": False, "device": place.device, **place.options}
    memory = {"memory": "64MB"} if place.tiny else {}
    engine = Engine(model, **{**shared, **memory, **options})  # type: ignore[arg-type]
    engine.warm(engine.scheduler.most_running)
    engine.generate([[1, 2, 3, 4, 5]] * 2, max_tokens=2)
    gc.freeze()  # as the server's process does
    return engine


def random_prompts(lengths: Lengths, seed: int = 0) -> list[list[int]]:
    draw = Random(seed)
    return [[draw.randint(0, 10000) for _ in range(given)] for given, _ in lengths]


def usual(place: Place, count: int = 256) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of new tokens as small engines are often measured: 142,827 in, 133,966 out for 256."""
    draw, count = Random(0), place.count(count)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(count)]
    outs = [draw.randint(100, 1024) for _ in range(count)]
    return [prompt[: place.count(len(prompt))] for prompt in prompts], list(map(place.count, outs))


def finish(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


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


def graphs(engine: Engine) -> str:
    """How many sizes are replayed, or why none is."""
    of_engine = engine._programs.graphs
    if of_engine is None:
        return "no CUDA graphs"
    return f"no CUDA graphs: {of_engine.reason}" if of_engine.reason else f"{len(of_engine.captured)} CUDA graphs"


def allowed(
    model: PreTrainedModel, lengths: Lengths, place: Place, weight: float = 2, cache: int = 2, matrix: str = "bfloat16"
) -> float:
    """Tokens in a second that the machine allows."""
    here = machine_of(torch.device("cuda")) if place.device == "cuda" else machine("h200")
    least = serve_limit.seconds(serve_limit.model_of(model, weight, cache), lengths, here, matrix)
    return sum(out for _, out in lengths) / least


def crowd(job: str, name: str, bound: float, place: Place, **options: object) -> Iterator[Measured]:
    prompts, outs = usual(place)
    model = network(name, place)
    limit = allowed(model, [(len(p), o) for p, o in zip(prompts, outs, strict=True)], place)
    engine = built(model, place, 2048, **{"budget": 8192, **options})
    yield throughput(job, engine, prompts, outs, bound, limit, place)


def qwen(place: Place) -> Iterator[Measured]:
    yield from crowd("qwen", QWEN, 20_000, place)


def llama(place: Place) -> Iterator[Measured]:
    yield from crowd("llama", LLAMA, 7_700, place)


def deterministic(place: Place) -> Iterator[Measured]:
    """Every step has as many rows as sequences run, so prompts pass in small pieces."""
    yield from crowd("deterministic", QWEN, 17_000, place, deterministic=True, budget=256)


def fp8(place: Place) -> Iterator[Measured]:
    count, each = place.count(1024), place.count(1000)
    lengths = [(each, each)] * count
    model = network(LLAMA, place)
    limit = allowed(model, lengths, place, 1, 1, "float8_e4m3fn")
    engine = built(model, place, 2048, quantize="fp8", cache_dtype="fp8", budget=8192, most_running=512)
    yield throughput("fp8", engine, random_prompts(lengths), [each] * count, 10_600, limit, place)


def alone(
    job: str, bounds: tuple[float | None, float], place: Place, weight: float, **options: object
) -> Iterator[Measured]:
    """The median over five requests, one after another."""
    given, out = place.count(512), place.count(256)
    model = network(LLAMA, place)
    limit = 1e3 / allowed(model, [(0, out)], place, weight)
    engine = built(model, place, 2048, **options)
    firsts, betweens = [], []
    for prompt in random_prompts([(given, out)] * 6, seed=1):
        start, times = finish(place.device), []
        for piece in engine.stream(prompt, max_tokens=out, ignore_eos=True, temperature=0):
            times += [time.perf_counter()] * bool(piece.tokens)
        firsts.append(1e3 * (times[0] - start))
        betweens.append(1e3 * (times[-1] - times[0]) / (len(times) - 1))
    yield Measured(job, "first token", sorted(firsts[1:])[2], "ms", bounds[0], False)
    yield Measured(job, "between tokens", sorted(betweens[1:])[2], "ms", bounds[1], False, limit, graphs(engine))


def one(place: Place) -> Iterator[Measured]:
    yield from alone("one", (30.0, 5.2), place, 2)


def int4(place: Place) -> Iterator[Measured]:
    yield from alone("int4", (None, 2.7), place, 0.53, quantize="int4")


def long(place: Place) -> Iterator[Measured]:
    """Thirty-two streams run; a long prompt comes. How long does anybody wait for a token, and how long does it?"""
    length, running = place.count(32768), place.count(32)
    engine = built(network(LLAMA, place), place, 2 * length + 1024, step_seconds=0.05, budget=4096, most_running=64)
    (prompt,) = random_prompts([(length, 1)])
    start = finish(place.device)
    list(engine.stream(prompt, max_tokens=1))
    by_itself = finish(place.device) - start
    streams = [engine.submit(p, max_tokens=4000, ignore_eos=True) for p in random_prompts([(64, 0)] * running, seed=2)]
    for _ in range(20):
        engine.step()
    late = engine.submit([*prompt[1:], 7], max_tokens=1)
    start = last = finish(place.device)
    worst = 0.0
    while late.request.left:
        engine.step()
        now = finish(place.device)
        worst, last = max(worst, now - last), now
    for stream in streams:
        stream.close()
    yield Measured("long", "longest gap", 1e3 * worst, "ms", 60.0, False)
    yield Measured("long", "first token, times alone", (last - start) / by_itself, "x", 1.5, False)


def prefix(place: Place) -> Iterator[Measured]:
    count, shared = place.count(64), place.count(2048)
    model = network(LLAMA, place)
    (common,) = random_prompts([(shared, 0)])
    prompts = [[*common, *own] for own in random_prompts([(place.count(64), 0)] * count, seed=3)]
    firsts, rates = [], []
    for reuse in (False, True):
        engine = built(model, place, 4096, reuse=reuse)
        engine.generate([common], max_tokens=1)
        start = finish(place.device)
        answers = engine.generate(prompts, max_tokens=32, ignore_eos=True)
        rates.append(sum(len(a.tokens) for a in answers) / (finish(place.device) - start))
        firsts.append(engine.metrics().first_token.mean)
        del engine
        gc.unfreeze()
        gc.collect()
    yield Measured("prefix", "first token, times without reuse", firsts[1] / firsts[0], "x", 0.25, False)
    yield Measured("prefix", "throughput, times without reuse", rates[1] / rates[0], "x", 2.0)


def huggingface(place: Place) -> Iterator[Measured]:
    from transformers import GenerationConfig

    prompts, outs = usual(place)
    model, nobody = network(QWEN, place), -1
    config = GenerationConfig(do_sample=False, max_new_tokens=max(outs), eos_token_id=nobody, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config) as manager:  # type: ignore[operator]
        took = 0.0
        for asked in (1, len(prompts)):  # the first one warms up
            place.say(f"huggingface: {asked} requests")
            start, left = finish(place.device), asked
            for prompt, out in zip(prompts[:asked], outs, strict=False):
                manager.add_request(prompt, max_new_tokens=out, eos_token_id=nobody)
            while left:
                answer = manager.get_result(timeout=60)
                if answer is None or answer.error:
                    raise AssertionError(f"huggingface: {'no answer' if answer is None else answer.error}")
                left -= 1
            took = finish(place.device) - start
    yield Measured("huggingface", "throughput", sum(outs) / took, "tok/s", note=f"{took:.1f} s")


JOBS: dict[str, Callable[[Place], Iterator[Measured]]] = {
    "qwen": qwen, "llama": llama, "one": one, "fp8": fp8, "int4": int4, "long": long, "prefix": prefix,
    "deterministic": deterministic, "huggingface": huggingface,
}  # fmt: skip


def measure(names: list[str], place: Place) -> Iterator[Measured]:
    for name in names or list(JOBS):
        yield from JOBS[name](place)
        gc.unfreeze()
        gc.collect()
        if place.device == "cuda":
            torch.cuda.empty_cache()
