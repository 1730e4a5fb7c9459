"""First results of `tessera bench formats`, in processes of their own: `python -m tessera.tools.format_probe first …`.

Nothing but PyTorch is imported before the clock starts; so this file stands outside of the benchmarks' folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from operator import sub

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


@torch.no_grad()
def answer(path: str, asked: str, device: str) -> dict[str, float]:
    """Seconds of a language model's artifact, from `import torch` to its first result, and of a call after that."""
    prompt, expected = torch.load(asked)
    times = [time.perf_counter()]
    if device == "cuda":
        torch.ones(1, device=device).item()  # nothing ran on the device in this process
    times.append(time.perf_counter())
    call: Callable[..., torch.Tensor] = tessera.load(path, device=device, trust=True)  # type: ignore[assignment]
    times.append(time.perf_counter())
    for _ in range(2):
        result = call(prompt.to(device)).cpu()
        times.append(time.perf_counter())
    torch.testing.assert_close(result, expected, atol=0.03 * expected.abs().max().item(), rtol=0.0)
    parts = dict(zip(("device", "load", "first call", "a call after that"), map(sub, times[1:], times), strict=True))
    return {"first result": times[3] - times[0], **parts}


TASKS: dict[str, Callable[..., object]] = {task.__name__: task for task in (first, answer)}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))
