"""`tessera bench depth`: what a first call of few equal blocks costs, and of many, cold and warm.

In: a model's name. Out: for each of them rows of CPU time: a first call, forward and backward, in a process of its own
with an empty cache (cold), and in another one after it with the cache that the first one left (warm). The models are
tiny, so that compiling is what is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import tessera
from tessera.tools.bench.measure import Samples, cpu_seconds, in_process
from tessera.tools.bench.report import Outcome, Row, Target, listed, rows, table
from tessera.tools.llama import Llama, LlamaConfig
from tessera.tools.models import GPT, GPTConfig
from tessera.tools.networks import EncoderConfig, ResNet50, ViT

Say = Callable[[str], None]
DEPTHS = (8, 64)  # blocks that a first call should cost about the same for
LIMIT = 1.5


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (1, 17))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt(depth: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT(GPTConfig(layers=depth, width=64)), _tokens()


def llama(depth: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Llama(LlamaConfig(layers=depth, width=64, heads=4, kv_heads=2, hidden=128, vocab=256)), _tokens()


def vit(depth: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = ViT(EncoderConfig(layers=depth, width=64, heads=4, hidden=128), image=32, patch=8, classes=10)
    return model, (torch.randn(1, 3, 32, 32), torch.randint(10, (1,)))


def resnet(depth: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Four stages of other sizes: of 8 blocks all are different."""
    return ResNet50((depth // 4,) * 4, width=8, classes=10), (torch.randn(2, 3, 32, 32), torch.randint(10, (2,)))


MODELS: dict[str, Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": gpt, "llama": llama, "vit": vit, "resnet": resnet,
}  # fmt: skip


def first_call(model: str, depth: int, executors: list[str] | None) -> float:
    """CPU seconds of a first training call, by a compiler that has already compiled one tiny function."""
    compile_ = tessera.jit if executors is None else partial(tessera.jit, executors=executors)
    compile_(lambda x: x.sin() * 2)(torch.ones(2, requires_grad=True)).sum().backward()
    module, inputs = MODELS[model](depth)
    start = cpu_seconds()
    compile_(module)(*inputs).backward()
    return cpu_seconds() - start


def measured(model: str, rounds: int, executors: list[str] | None, say: Say) -> list[Row]:
    samples: dict[str, Samples] = {"cold": {}, "warm": {}}
    for number in range(rounds):
        for depth in DEPTHS:
            with tempfile.TemporaryDirectory() as cache:  # empty for the first process, full for the second
                for state, taken in samples.items():
                    say(f"{model}, {depth} blocks, {state}, round {number + 1} of {rounds}")
                    environment = {"OMP_NUM_THREADS": "1", "TESSERA_CACHE": cache}
                    asked = {"model": model, "depth": depth, "executors": executors}
                    taken.setdefault(f"{depth} blocks", []).append(in_process(__name__, "", environment, **asked))
    few, many = (f"{depth} blocks" for depth in DEPTHS)
    limits = {many: Target(LIMIT, few)}
    return [row for state, taken in samples.items() for row in rows(f"{model}, {state}", "ms", taken, few, limits)]


SECTIONS = {name: partial(measured, name) for name in MODELS}


def outcome(args: Namespace, say: Say) -> Outcome:
    executors = ["aten"] if args.who == ["tessera[aten]"] else None
    taken = [row for name in args.only or SECTIONS for row in SECTIONS[name](args.rounds or 3, executors, say)]
    missed = any(row.passed is False for row in taken)
    return Outcome("one thread", table(taken, "tessera bench depth"), listed(taken), missed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(first_call(**json.loads(sys.argv[2]))))
