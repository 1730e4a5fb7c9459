"""The engine beside `model.generate`, under settings drawn at random. Also a script:

    PYTHONPATH=. python tests/serve/families.py 500            prompts a family, the models run as they are
    PYTHONPATH=. python tests/serve/families.py 100 compiled   the same through compiled programs

Tiny random models of every family, in float32. Engines differ in block size, budget, memory (little of it forces
preemption), reuse, speculation and whether they launch steps ahead; prompts share beginnings, and neighbours are
cancelled halfway.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from generation import BASE, CONFIGS, SLIDING, model_of

from tessera.serve.engine import Engine
from tessera.serve.huggingface import HuggingFace
from tessera.serve.sampling import Sampling

FAMILIES = ("llama", "mistral", "mistral_window", "qwen3", "gemma2", "gemma3", "gpt2", "neox", "phi", "mixtral")
NEW = 12  # tokens that are generated at most
MORE = {
    "mistral_window": lambda: transformers.MistralConfig(**BASE, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(**BASE, head_dim=32, **SLIDING, attn_implementation="eager"),
    "phi": lambda: transformers.PhiConfig(**{**BASE, "num_key_value_heads": 2}),
    "neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    ),
}  # fmt: skip


@cache
def model(name: str) -> transformers.PreTrainedModel:
    CONFIGS.setdefault(name, MORE.get(name))
    return model_of(name)


@cache
def expected(name: str, prompt: tuple[int, ...]) -> list[int]:
    """What `generate` gives, token by token the likeliest."""
    given = torch.tensor([prompt])
    out = model(name).generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False)
    return out[0].tolist()[len(prompt) :]


def prompts_of(draw: Random, count: int) -> list[tuple[int, ...]]:
    """Prompts of 1 to 45 tokens, of which many begin alike."""
    shared = [draw.randrange(2, 64) for _ in range(20)]
    listed = []
    for _ in range(count):
        own = [draw.randrange(2, 64) for _ in range(draw.randint(1, 25))]
        listed.append(tuple([*shared[: draw.randint(0, 20)], *own] if draw.random() < 0.5 else own))
    return listed


@cache
def token_bytes(name: str) -> int:
    """What the cache keeps of a token."""
    return 4 * sum(layer.heads * (layer.head + layer.value_head) for layer in HuggingFace(model(name)).layers())


def engine_of(name: str, draw: Random, compiled: bool = False) -> Engine:
    size = draw.choice([1, 2, 4, 8, 16])
    tight = (57 // size + 5) * size * token_bytes(name)  # little more than one sequence of the longest kind
    engine = Engine(
        model(name), block_size=size, budget=draw.choice([3, 8, 24, 200]), most_running=draw.choice([2, 8, 16]),
        memory=draw.choice([tight, tight, tight, 2**24]), reuse=draw.random() < 0.7,
        speculate=draw.choice([0, 0, 3]), compiled=compiled, check=True,
    )  # fmt: skip
    engine._ahead = draw.randint(0, 1)  # launch a step before the tokens of the last one are read, as on a GPU
    return engine


def differences(name: str, engine: Engine, draw: Random, count: int) -> int:
    """How many of these answers are not what `generate` gives."""
    prompts, wrong = prompts_of(draw, count), 0
    settings = [Sampling(max_tokens=draw.randint(1, NEW), temperature=0) for _ in prompts]
    streams = [
        engine.submit(prompt, s, priority=draw.randint(0, 2)) for prompt, s in zip(prompts, settings, strict=True)
    ]
    for stream in streams:
        if draw.random() < 0.2:  # a neighbour that goes, before it started or halfway
            for _ in range(draw.randint(0, 3)):
                engine.step()
            stream.close()
            continue
    for prompt, s, stream in zip(prompts, settings, streams, strict=True):
        answer = stream.whole()[0]
        wanted = expected(name, prompt)[: s.max_tokens]
        if answer.finish == "cancelled":
            wanted = wanted[: len(answer.tokens)]
        wrong += answer.tokens != wanted or answer.finish not in ("length", "cancelled")
    engine.step()
    assert engine.metrics().used_blocks == 0 and not engine.busy
    return wrong


if __name__ == "__main__":
    count, compiled = int(sys.argv[1]), "compiled" in sys.argv[2:]
    for family in [name for name in sys.argv[2:] if name != "compiled"] or FAMILIES:
        wrong, preempted, reused, accepted, done, seed = 0, 0, 0, 0, 0, 0
        draw = Random(family)
        engine = engine_of(family, draw, compiled)
        while done < count:
            engine = engine if compiled else engine_of(family, draw)
            wrong += differences(family, engine, draw, 10)
            done += 10
            facts = engine.metrics()
            preempted, reused = preempted + facts.preemptions, reused + facts.reused_tokens
            accepted += facts.accepted
        print(f"{family}: {done} prompts, {wrong} differences, {preempted} preemptions, {reused} tokens reused, "
              f"{accepted} guesses right", flush=True)  # fmt: skip
