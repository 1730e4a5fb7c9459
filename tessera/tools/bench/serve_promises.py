"""Jobs of `tessera bench serve --table` that hold the engine to its promises on this device.

idle      the share of its time for which the device waits between steps, while 64 sequences decode
repeats   `--deterministic`: how many different answers 200 repeats of one request get under random load
tokens    greedy tokens against `model.generate`: where they first differ, how far apart the two tokens' logits are
          in float32
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from random import Random

import torch

from tessera.serve.stream import Stream
from tessera.tools.bench.serve_place import (
    LLAMA,
    QWEN,
    Measured,
    Place,
    built,
    finish,
    free,
    graphs,
    network,
    random_prompts,
)  # fmt: skip


def idle(place: Place) -> Iterator[Measured]:
    for name in (QWEN, LLAMA):
        yield _idle_of(name, place)
        free()  # nothing of the first engine is left, whose cache had all the memory


def _idle_of(name: str, place: Place, steps: int = 100) -> Measured:
    engine = built(network(name, place), place, 2048, most_running=64)
    prompts = random_prompts([(place.count(512), 0)] * place.count(64))
    streams = [engine.submit(prompt, max_tokens=1000, ignore_eos=True) for prompt in prompts]
    while any(s.request.first_token is None for s in streams):
        engine.step()
    for _ in range(10):  # the size is captured
        engine.step()
    before, start = engine.metrics(), finish(place.device)
    for _ in range(steps):
        engine.step()
    took, after = finish(place.device) - start, engine.metrics()
    share = 100 * (after.device_idle - before.device_idle) / took
    waits = 100 * (after.host_idle - before.host_idle) / took
    note = f"{1e3 * took / steps:.2f} ms a step; the host waits {waits:.0f} %; {graphs(engine)}"
    for stream in streams:
        stream.close()
    return Measured("idle", name, share, "%", 3.0, False, 0.0, note)


def repeats(place: Place) -> Iterator[Measured]:
    """Others come at random moments, some leave, and memory is short, so that some give way."""
    draw, times = Random(5), 20 if place.tiny else 200
    memory = "300KB" if place.tiny else "2GB"
    engine = built(network(QWEN, place), place, 2048, deterministic=True, budget=256, reuse=True, memory=memory)
    (prompt,) = random_prompts([(place.count(200), 0)], seed=7)
    asked: list[Stream] = []
    others: list[Stream] = []
    while len(asked) < times or any(s.request.left for s in asked):
        if len(asked) < times and draw.random() < 0.4:
            asked.append(engine.submit(prompt, max_tokens=48, temperature=0.8, seed=11, ignore_eos=True, logprobs=1))
        if len(asked) < times and draw.random() < 0.5:
            length, out = (place.count(draw.randint(32, 600)) for _ in range(2))
            (other,) = random_prompts([(length, 0)], seed=draw.randrange(10**6))
            others.append(engine.submit(other, max_tokens=out, ignore_eos=True, priority=draw.randint(-1, 1)))
        if others and draw.random() < 0.1:
            others.pop(draw.randrange(len(others))).close()
        engine.step()
    answers = {(tuple(a.tokens), tuple(p.value for p in a.logprobs)) for s in asked for a in s.whole()}
    seen = engine.metrics()
    note = f"{times} repeats beside {seen.requests - times} others; {seen.preemptions} gave way"
    yield Measured("repeats", "different answers", len(answers), "", 1.0, False, 1.0, note)


@torch.no_grad()
def tokens(place: Place) -> Iterator[Measured]:
    draw = Random(3)
    model = network(QWEN, place)
    prompts = random_prompts([(draw.randint(2, place.count(600)), 0) for _ in range(4 if place.tiny else 24)], seed=4)
    out = 48
    engine = built(model, place, 2048)
    ours = [answer.tokens for answer in engine.generate(prompts, max_tokens=out, temperature=0, ignore_eos=True)]
    exact, distance, differ = deepcopy(model).float(), 0.0, 0
    for prompt, mine in zip(prompts, ours, strict=True):
        given = torch.tensor([prompt], device=place.device)
        mask = torch.ones_like(given)
        whole = model.generate(  # type: ignore[operator]
            given, attention_mask=mask, do_sample=False, max_new_tokens=out, min_new_tokens=out, pad_token_id=0
        )
        theirs = whole[0, len(prompt) :].tolist()
        at = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            differ += 1
            text = torch.tensor([[*prompt, *mine[:at]]], device=place.device)
            logits = exact(text).logits[0, -1]
            distance = max(distance, abs(float(logits[mine[at]] - logits[theirs[at]])))
    note = f"{differ} of {len(prompts)} answers of {out} tokens differ somewhere"
    yield Measured("tokens", "logits apart where tokens first differ", distance, "", 0.05, False, 0.0, note)
