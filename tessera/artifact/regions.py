"""Operators that executors made, again: a region by its kernel from the file, or by PyTorch's operators without one.

In: what `keep.py` wrote of a region, its body, and the kernels that this machine can run. Out: a `Special` that a
program calls. Everything that a kernel is launched by comes from the file and is checked against the body first: where
buffers stand, which symbols there are, how much scratch memory. Nothing here needs the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tessera.ir.binding import quick
from tessera.ir.equation import Equation, Recipe, Special
from tessera.ir.formula import SYMBOL, Formula, Formulas
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.ir.serial import Reader
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.tile.from_trace.around import read_around
from tessera.tile.from_trace.launch import launcher
from tessera.tile.from_trace.segments import OneByOne, Segment
from tessera.tile.from_trace.segments import launcher as segment_launcher
from tessera.tile.targets.base import CompiledKernel
from tessera.util.errors import Unserial

NONE = -1
REMEMBERED = 256  # symbols whose scratch sizes are kept


class Kernels(Protocol):
    """Kernels of a file, made ready for one device."""

    def kernel(self, data: object) -> CompiledKernel | None: ...


@dataclass
class Regions:
    """Reads claimed operators; `counts` tells how many regions run by a kernel, and how many by PyTorch's operators."""

    data: list
    kernels: Kernels | None
    bind: Callable[[object], Callable]
    counts: dict[str, int] = field(default_factory=lambda: {"kernel": 0, "aten": 0})
    _made: dict[int, CompiledKernel | None] = field(default_factory=dict)

    def __call__(self, data: list, eqn: Equation, reader: Reader) -> Special:
        if data[0] == "of":
            _, namespace, name, pure, of = data
            op = reader.arg(of)
            return Special(name, quick(op), namespace, pure, of=op)  # type: ignore[arg-type]
        _, namespace, name, pure, body, parts, over, number = data
        whole = reader.trace(body)
        pairs = {k: j for k, j in over}
        _check_over(whole, pairs)
        run = self._launched(whole, pairs, number)
        self.counts["aten" if run is None else "kernel"] += 1
        recipe = Recipe(whole, tuple(map(reader.trace, parts)), tuple(pairs.items()))
        left = whole.with_(outputs=tuple(v for k, v in enumerate(whole.outputs) if k not in pairs))
        return Special(name, run or self._plain(whole, pairs), namespace, pure, body=left, recipe=recipe)

    def _launched(self, body: Trace, over: dict[int, int], number: int) -> Callable | None:
        if number == NONE or self.kernels is None:
            return None
        if not 0 <= number < len(self.data):
            raise Unserial(f"a region of kernel {number}; there are {len(self.data)}")
        data = self.data[number]
        if not isinstance(data, dict) or not isinstance(data.get("kernel"), dict):
            raise Unserial(f"kernels[{number}]: expected how a kernel is launched")
        if number not in self._made:
            self._made[number] = self.kernels.kernel(data["kernel"])
        kernel = self._made[number]
        if kernel is None:
            return None
        if "segments" in data:
            return segment_launcher(body, _segments(data["segments"], body), OneByOne(kernel), over)
        _check_around(data, body, f"kernels[{number}]")
        return launcher(body, read_around(body, data), kernel, over).run

    def _plain(self, body: Trace, over: dict[int, int]) -> Callable:
        """The region by PyTorch's operators."""
        run = compile_trace(body, bind=self.bind, dead=lifetimes(body))  # type: ignore[arg-type]
        if not over:
            return run
        kept = [k for k in range(len(body.outputs)) if k not in over]

        def writing(*args: torch.Tensor) -> tuple:
            out = run(*args)
            for k, j in over.items():
                args[j].view_as(out[k]).copy_(out[k])
            return tuple(out[k] for k in kept)

        return writing


def _check_over(body: Trace, over: dict[int, int]) -> None:
    if not all(0 <= k < len(body.outputs) and 0 <= j < len(body.inputs) for k, j in over.items()):
        raise Unserial(f"{body.name}: expected results that are written over arguments, got {over}")


def _check_around(data: dict, body: Trace, where: str) -> None:
    values = len(body.inputs) + sum(len(eqn.results()) for eqn in body.equations)
    for key, most in (("inputs", values), ("stored", values), ("tail", len(body.equations))):
        if not _numbers(data.get(key), most):
            raise Unserial(f"{where}.{key}: expected numbers below {most}, got {str(data.get(key))[:80]}")
    symbols = data.get("symbols")
    if not isinstance(symbols, list) or not all(isinstance(s, str) and SYMBOL.fullmatch(s) for s in symbols):
        raise Unserial(f"{where}.symbols: expected names of sizes, got {str(symbols)[:80]}")
    if not data["stored"]:
        raise Unserial(f"{where}.stored: expected what the kernel writes")
    around = read_around(body, data)
    if not all(isinstance(v.type, TensorType) for v in around.buffers):
        raise Unserial(f"{where}: expected tensors as buffers")


def _numbers(data: object, most: int) -> bool:
    return isinstance(data, list) and all(type(n) is int and 0 <= n < most for n in data)


def _segments(data: object, body: Trace) -> list[Segment]:
    inputs, outputs = len(body.inputs), len(body.outputs)
    segments = []
    for row in data if isinstance(data, list) else [None]:
        match row:
            case [list(ins), list(outs), int(length)] if _numbers(ins, inputs) and _numbers(outs, outputs):
                segments.append(Segment(tuple(ins), tuple(outs), length))
            case _:
                raise Unserial(f"{body.name}: expected a segment, got {str(row)[:80]}")
    return segments


class Halves:
    """Two kernels one after the other, with scratch memory between."""

    def __init__(self, first: CompiledKernel, second: CompiledKernel, scratch: object, symbols: object) -> None:
        if not isinstance(symbols, list) or not all(isinstance(s, str) for s in symbols):
            raise Unserial(f"expected the symbols of a kernel, got {str(symbols)[:80]}")
        self.first, self.second, self.symbols = first, second, symbols
        self.scratch = [_scratch(row, symbols) for row in scratch] if isinstance(scratch, list) else []
        self.source = ""
        self._sizes: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor], symbols: Sequence[int] = ()) -> None:
        device = tensors[0].device
        sizes = self._sizes.get(tuple(symbols))
        if sizes is None:
            if len(self._sizes) >= REMEMBERED:
                self._sizes.clear()
            values = dict(zip(self.symbols, symbols, strict=True))
            sizes = [s.value(values) if isinstance(s, Formula) else s for s, _ in self.scratch]
            self._sizes[tuple(symbols)] = sizes
        more = [torch.empty(n, dtype=t, device=device) for n, (_, t) in zip(sizes, self.scratch, strict=True)]
        every = [*tensors, *more]
        self.first(every, symbols)
        self.second(every, symbols)


def _scratch(row: object, symbols: list[str]) -> tuple[int | Formula, torch.dtype]:
    match row:
        case [size, str(name)] if isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return Formulas(symbols).read(size), dtype
    raise Unserial(f"expected scratch memory, got {str(row)[:80]}")
