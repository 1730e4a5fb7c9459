"""The Python around a kernel: what a region's callable does at every call.

In: what stands around a kernel and something that runs it. Out: a Kernel, a function of the region's inputs, in order,
that gives the tuple of its outputs. It is generated once as straight-line Python: sizes read off the inputs, results
allocated, one call of the kernel, views of the results. An input whose strides are not those the kernel was made for is
copied.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Sequence

import torch

from tessera.ir.equation import Value
from tessera.ir.kernel import Kernel
from tessera.ir.printer import compile_trace
from tessera.ir.strides import with_strides
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType
from tessera.tile.from_trace.around import Around
from tessera.tile.from_trace.index import Unlowerable, sizes_of, strides_of
from tessera.tile.targets.base import ByAddress, CompiledKernel
from tessera.torch_internals.cuda import current_device
from tessera.torch_internals.memory import empty_cpu, empty_cuda

_numbers = itertools.count()


def launcher(body: Trace, lowered: Around, kernel: CompiledKernel, over: dict[int, int] | None = None) -> Kernel:
    """`over[k] = j`: output k is written over input j, and not given back."""
    over = over or {}
    into = {body.outputs[k]: body.inputs[j] for k, j in over.items()}
    names = {v: f"x{i}" for i, v in enumerate(body.inputs)}
    names |= {v: f"y{i}" for i, v in enumerate(lowered.stored)}
    scope: dict[str, object] = {"empty": torch.empty_strided, "empty_cpu": empty_cpu}
    scope |= {"kernel": kernel, "with_strides": with_strides}
    lines = [f"def launch({', '.join(names[v] for v in body.inputs)}):"]
    device = lowered.stored[0].tensor.device if lowered.stored else None
    quick = device is not None and device.type == "cuda" and device.index is not None and current_device is not None
    if quick and device is not None:
        scope |= {"empty_cuda": empty_cuda, "current": current_device, "on": torch.cuda.device}
        arguments = ", ".join(names[v] for v in body.inputs)
        lines.append(f"if current() != {device.index}:\n        with on({device.index}): return launch({arguments})")
    lines += [f"{text} = {where}" for text, where in _sizes(body, lowered).items()]
    lines += [f"t{names[v]} = {names[v]}" for v in into.values()]
    for v in lowered.inputs:
        expected = _strides(v.tensor)
        lines.append(f"if {_differs(v, names[v])}: {names[v]} = with_strides({names[v]}.detach(), {expected})")
    for i, v in enumerate(lowered.stored):
        if v in into:
            lines.append(f"{names[v]} = {names[into[v]]}")
            continue
        scope[f"dtype{i}"], scope[f"device{i}"] = v.dtype, v.tensor.device
        shape, stride = _tuple(v.shape), _strides(v.tensor)
        if v.tensor.device.type == "cpu":
            lines.append(f"{names[v]} = empty_cpu({shape}, {stride}, dtype{i})")
        elif quick and v.tensor.device == device:
            lines.append(f"{names[v]} = empty_cuda({shape}, {stride}, dtype{i})")
        else:
            lines.append(f"{names[v]} = empty({shape}, {stride}, dtype=dtype{i}, device=device{i})")
    lines.append(_call([names[v] for v in lowered.buffers], lowered.symbols, kernel, scope))
    # An argument of another layout was copied to be written: what it stands for is written from the copy.
    lines += [f"if t{names[v]} is not {names[v]}: t{names[v]}.copy_({names[v]})" for v in into.values()]
    if lowered.tail:
        views = _views(body, lowered)
        scope["views"] = compile_trace(views)
        names |= {v: f"z{i}" for i, v in enumerate(views.outputs)}  # type: ignore[misc]
        results, operands = (", ".join(names[v] for v in values) for values in (views.outputs, views.inputs))  # type: ignore[index]
        lines.append(f"{results}, = views({operands})")
    returned = [v for k, v in enumerate(body.outputs) if k not in over]
    lines.append(f"return ({''.join(f'{names[v]}, ' for v in returned)})")  # type: ignore[index]
    return _compile(lines, scope)


def _call(buffers: Sequence[str], symbols: Sequence[str], kernel: CompiledKernel, scope: dict[str, object]) -> str:
    """The kernel on these tensors and sizes; one that takes addresses is handed them without a step between."""
    if not isinstance(kernel, ByAddress):
        return f"kernel(({', '.join(buffers)},), ({''.join(f'{s}, ' for s in symbols)}))"
    scope["by_address"] = kernel.by_address
    return f"by_address({', '.join([*(f'{b}.data_ptr()' for b in buffers), *symbols])})"


def _views(body: Trace, lowered: Around) -> Trace:
    """The outputs that are views, made from what is stored or came in, with the inputs that bring their sizes."""
    outputs = tuple(v for eqn in lowered.tail for v in eqn.results() if v in body.outputs)
    inner = {v for eqn in lowered.tail for v in eqn.results()}
    needed = [v for eqn in lowered.tail for v in eqn.inputs() if v not in inner]
    symbols = {s: where for s, where in body.symbols.items() if where[0] in body.inputs}
    inputs = dict.fromkeys([*needed, *(v for v, _ in symbols.values())])
    return Trace("views", tuple(inputs), lowered.tail, outputs, {}, {}, symbols)


def _sizes(body: Trace, lowered: Around) -> dict[str, str]:
    """Where each size that the kernel or a result needs is read."""
    wanted = dict.fromkeys(lowered.symbols)
    for v in lowered.stored:
        for size in (*sizes_of(v.shape), *strides_of(v.tensor.stride)):
            wanted |= dict.fromkeys(sorted(size.names()))
    for v in lowered.inputs:
        for size in strides_of(v.tensor.stride):
            wanted |= dict.fromkeys(sorted(size.names()))
    sources: dict[str, str] = {}
    for i, v in enumerate(body.inputs):
        if not isinstance(v.type, TensorType):  # a size that the region is given as a number
            sources |= {s: f"x{i}" for s, where in body.symbols.items() if where[0] is v}
            continue
        for what, sizes in (("shape", v.shape), ("stride()", v.tensor.stride)):
            for d, size in enumerate(sizes):
                if not isinstance(size, int) and str(size) in wanted:
                    sources.setdefault(str(size), f"x{i}.{what}[{d}]")
    if lost := [s for s in wanted if s not in sources]:
        raise Unlowerable(f"no input of the region tells the size {lost[0]}")
    return sources


def _differs(v: Value, name: str) -> str:
    """Whether a tensor's strides may be others than the kernel's; asking for a flag costs less than for a tuple."""
    t, step = v.tensor, 1
    if t.is_symbolic:
        return f"{name}.stride() != {_strides(t)}"
    for size, stride in zip(reversed(t.shape), reversed(t.stride), strict=True):
        if size != 1 and stride != step:
            return f"{name}.stride() != {_strides(t)}"
        step *= size
    return f"not {name}.is_contiguous()"


def _tuple(sizes: Sequence[Size]) -> str:
    return f"({''.join(f'{s}, ' for s in sizes_of(sizes))})"


def _strides(t: TensorType) -> str:
    return f"({''.join(f'{s}, ' for s in strides_of(t.stride))})"


def _compile(lines: list[str], scope: dict[str, object]) -> Kernel:
    source = "\n    ".join(lines) + "\n"
    file = f"<tessera launch {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # for tracebacks
    exec(compile(source, file, "exec"), scope)  # noqa: S102
    launch: Callable[..., tuple] = scope["launch"]  # type: ignore[assignment]
    weakref.finalize(launch, linecache.cache.pop, file, None).atexit = False
    return Kernel(run=launch, source=source)
