"""What `tessera bench formats` measures of ONNX and JAX, in processes of their own: files in, files out, kernels."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import onnx
import torch

import tessera
from tessera.exporters.onnx import runtimes
from tessera.ir.schema import is_view
from tessera.tools.bench import format_networks
from tessera.tools.bench.format_names import JAX, ONNX, ORT, TORCH
from tessera.tools.bench.measure import cpu_seconds, interleave
from tessera.tools.format_probe import CONFIG, SIZES, example, model
from tessera.tools.models import Block

EAGER = "eager"


def write(name: str, path: str) -> None:
    format_networks.write(name, path)


def first(name: str, who: str, path: str) -> float:
    """CPU seconds from the file, or from the PyTorch module, to the first result of a network."""
    args, net = format_networks.inputs(name), format_networks.module(name)
    start = cpu_seconds()
    with torch.no_grad():
        (tessera.onnx.load(path) if who == ONNX else tessera.jit(net))(*args)
    return cpu_seconds() - start


def steady(name: str, path: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call. Eager is the file's graph, operator by operator."""
    args = format_networks.inputs(name)
    ours, eager = tessera.onnx.load(path).eval(), tessera.onnx.load(path, compile=False).eval()
    calls: dict[str, Callable[[], object]] = {EAGER: lambda: eager(*args), ONNX: lambda: ours(*args)}
    if importlib.util.find_spec("onnxruntime") is not None:
        feeds = dict(zip(ours.input_names, (x.numpy() for x in args), strict=True))
        run = runtimes.runtime(runtimes.ORT, path, threads=torch.get_num_threads())
        calls[ORT] = lambda: run(feeds)
    with torch.no_grad():
        results = {who: torch.as_tensor(np.asarray(_only(call()))) for who, call in calls.items()}
        for result in results.values():
            torch.testing.assert_close(result, results[EAGER], atol=2e-3, rtol=2e-3)
        return interleave(calls, rounds=rounds, repeat=1)


def _only(results: object) -> object:
    return results[0] if isinstance(results, (list, tuple)) else results


def export(who: str, times: int) -> tuple[list[float], int]:
    """CPU seconds to write the GPT, at the first time and later, and how many nodes the file has."""
    net, x, seconds = model(), example(), []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/gpt.onnx"
        for _ in range(times):
            start = cpu_seconds()
            if who == ONNX:
                tessera.onnx.export(net, (x,), path, dynamic=SIZES, check=False)
            else:
                format_networks.write("gpt", path)
            seconds.append(cpu_seconds() - start)
        written = onnx.load(path)
    return seconds, len(written.graph.node) + sum(len(function.node) for function in written.functions)


def kernels() -> dict[str, int]:
    """Launches of a GPT's block that JAX wrote, and of the same block in PyTorch."""
    block = Block(CONFIG).eval()
    x = torch.randn(2, 64, CONFIG.width)
    from_jax = tessera.from_jax(_jax_block, _parameters(block), x)
    compiled = tessera.jit(block)
    with torch.no_grad():
        torch.testing.assert_close(from_jax(_parameters(block), x), compiled(x), atol=1e-4, rtol=1e-4)
    return {JAX: _launches(from_jax), TORCH: _launches(compiled)}


def _launches(fn: Callable) -> int:
    final = tessera.stages(fn)[-1].trace
    return sum(not is_view(eqn.op) and str(eqn.op) != "tessera.laid_out" for eqn in final.equations)


def _parameters(block: Block) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in block.named_parameters()}


def _jax_block(p: dict, x):  # noqa: ANN001, ANN202
    import jax
    import jax.numpy as jnp

    def norm(x, name: str):  # noqa: ANN001, ANN202
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x, name: str):  # noqa: ANN001, ANN202
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    b, t, d = x.shape
    q, k, v = jnp.split(linear(norm(x, "norm1"), "attention.qkv"), 3, -1)
    q, k, v = (y.reshape(b, t, CONFIG.heads, -1).transpose(0, 2, 1, 3) for y in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / (d // CONFIG.heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    mixed = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(b, t, d)
    x = x + linear(mixed, "attention.out")
    return x + linear(jax.nn.gelu(linear(norm(x, "norm2"), "mlp.up"), approximate=False), "mlp.down")


TASKS: dict[str, Callable[..., object]] = {task.__name__: task for task in (write, first, steady, export, kernels)}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](**json.loads(sys.argv[2]))))
