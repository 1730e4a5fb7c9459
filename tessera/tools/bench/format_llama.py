"""The file of `tessera bench formats --only llama`: eight layers of a Llama-like model with their weights, for a GPU.

`build` writes the artifact, its prompt and what eager PyTorch answers; `tools/format_probe.py` loads them in a process
that imports nothing of the model. At its full size the weights take 1.2 GB in bfloat16.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import tessera
from tessera.tools.bench.measure import wait
from tessera.tools.llama import Llama, LlamaConfig

FULL = LlamaConfig()
TINY = LlamaConfig(layers=8, width=128, heads=4, kv_heads=2, hidden=256, vocab=500)
PROMPT = (1, 512)
OPEN = {"idx": {0: ("batch", 1, 16), 1: ("length", 2, 4096)}}


def build(path: str, asked: str, device: str, tiny: bool) -> float:
    """Seconds to make the file. `asked`: where prompt and answer go."""
    config = TINY if tiny else FULL
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = Llama(config).to(torch.bfloat16).eval()
        idx = torch.randint(config.vocab, PROMPT)
        torch.save((idx.cpu(), model(idx).cpu()), asked)
        wait(device)
        start = time.perf_counter()
        tessera.export(model, (idx,), path, dynamic=OPEN, targets=device)
    return time.perf_counter() - start


if __name__ == "__main__":
    assert sys.argv[1] == build.__name__
    print(json.dumps(build(**json.loads(sys.argv[2]))))
