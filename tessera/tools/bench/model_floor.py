"""What a job cannot be faster than, in seconds, measured in the same run.

Where products dominate: one eager run in which every matrix product, convolution and attention, forward and backward,
is timed by itself as the library runs it, back to back; the sum over all of them, and nothing else. Where memory
does (decoding one token): the weights and the cache, read once at the speed of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from tessera.ops.fp8 import refusal
from tessera.ops.quantized import dequantized
from tessera.tools.bench.measure import timed_block
from tessera.tools.llama import Cache
from tessera.torch_internals.dispatch import TorchDispatchMode
from tessera.torch_internals.operators import op_schema, scaled_mm
from tessera.torch_internals.pytree import tree_flatten

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm", "_scaled_mm"}
ATTENTION = "_scaled_dot_product_"
QUANTIZED = "tessera::quantized_linear"
SAMPLES, REPEAT = 3, 4


class Products(TorchDispatchMode):
    """While it is on, times every product it sees, each signature once, and adds up what all calls take."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.seconds, self.calls = device, 0.0, 0
        self._known: dict[tuple, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        kwargs = kwargs or {}
        name = op_schema(func).name.removeprefix("aten::")
        if name in PRODUCTS or name.startswith(ATTENTION) or name == QUANTIZED:
            key = _signature(func, args, kwargs)
            if key not in self._known:
                self._known[key] = self._time(_quantized(*args) if name == QUANTIZED else lambda: func(*args, **kwargs))
            self.seconds += self._known[key]
            self.calls += 1
        return func(*args, **kwargs)

    def _time(self, call: Callable[[], object]) -> float:
        call()
        block = timed_block(self.device)
        return median(block(call, REPEAT) for _ in range(SAMPLES))


def _quantized(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, kind: str) -> Callable[[], object]:
    """The product of a layer in fewer bits, on operands as the library takes them."""
    rows = x.reshape(-1, x.shape[-1])
    if kind != "fp8" or x.dtype is not torch.bfloat16 or refusal(x.device):
        full = dequantized(weight, scale, kind).to(x.dtype).t()
        return lambda: rows @ full
    q, own, theirs = rows.to(weight.dtype), scale.new_ones((rows.shape[0], 1)), scale[None]
    return lambda: scaled_mm(q, weight.t(), own, theirs, out_dtype=x.dtype, use_fast_accum=True)


def _signature(func: object, args: tuple, kwargs: dict) -> tuple:
    flat, spec = tree_flatten((args, kwargs))
    return (func, str(spec), *((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else str(x) for x in flat))


def products_floor(step: Callable[[], object], device: str) -> float:
    """Seconds of all products in one call of an eager step."""
    with Products(device) as seen:
        step()
    return seen.seconds


def bytes_read(model: nn.Module, inputs: tuple[object, ...]) -> int:
    """What one token must read: every weight but the embedding, of which it takes one row, and the cache."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    stored = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in embedded}
    caches = [t for x in inputs if isinstance(x, Cache) for t in (*x.keys, *x.values)]
    return sum(t.nbytes for t in (*stored.values(), *caches))
