"""What `tessera bench formats` measures with everything imported: building files, and calls one after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

import tessera
from tessera.tools.bench.measure import cpu_seconds, interleave
from tessera.tools.format_probe import SIZES, example, model, opened
from tessera.torch_internals.aoti import aoti_compile_and_package


def build(who: str, path: str) -> float:
    """CPU seconds to make a file of the model, children's included."""
    net, x = model(), example()
    start = cpu_seconds()
    with torch.no_grad():
        if who == "AOTInductor":
            dims = {d: torch.export.Dim(name, min=low, max=high) for d, (name, low, high) in SIZES["idx"].items()}
            program = torch.export.export(net, (x,), dynamic_shapes={"idx": dims}, strict=False)
            aoti_compile_and_package(program, package_path=path)
        else:
            tessera.export(net, (x,), path, dynamic=SIZES)
    return cpu_seconds() - start


def steady(files: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call, by everyone in turn."""
    x = example()
    with torch.no_grad():
        calls = {who: opened(who, path) for who, path in files.items()}
        for call in calls.values():
            torch.testing.assert_close(call(x), calls["eager"](x), atol=1e-4, rtol=1e-4)
        return interleave({who: lambda call=call: call(x) for who, call in calls.items()}, rounds=rounds, repeat=2)


TASKS: dict[str, Callable[..., object]] = {task.__name__: task for task in (build, steady)}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))
