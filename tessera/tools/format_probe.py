"""The first result of `tessera bench formats`, in a process of its own: `python -m tessera.tools.format_probe first …`.

Nothing but PyTorch is imported before the clock starts; so this file stands outside of the benchmarks' folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

import tessera
from tessera.tools.models import GPT, GPTConfig
from tessera.torch_internals.aoti import aoti_load_package

CONFIG = GPTConfig(context=128, vocab=1000)
SIZES = {"idx": {0: ("batch", 1, 64), 1: ("length", 2, 128)}}


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).eval()


def example() -> torch.Tensor:
    return torch.arange(128).view(2, 64) % CONFIG.vocab


def opened(who: str, path: str) -> Callable:
    """The model by one contestant, ready to be called."""
    if who == "tessera artifact":
        return tessera.load(path, trust=True)
    if who == "AOTInductor":
        return aoti_load_package(path)
    return tessera.jit(model()) if who == "tessera.jit" else model()


def first(who: str, path: str) -> float:
    """CPU seconds from `import torch` on to the first result."""
    x = example()
    start = time.process_time()
    with torch.no_grad():
        opened(who, path)(x)
    return time.process_time() - start


if __name__ == "__main__":
    assert sys.argv[1] == first.__name__
    print(json.dumps(first(**json.loads(sys.argv[2]))))
