"""The Python around a kernel: what a region's callable does at every call.

In: what stands around a kernel and something that runs it. Out: a Kernel, a function of the region's inputs, in order,
that gives the tuple of its outputs. It is generated once as straight-line Python: sizes read off the inputs, results
allocated, one call of the kernel, views of the results. An input whose strides are not those the kernel was made for is
copied. Inputs may be handed over as parts of other tensors (`Kernel.reading`): to a kernel both are an address.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from tessera.ir.equation import Equation, Value
from tessera.ir.kernel import Kernel, Operand
from tessera.ir.printer import compile_trace
from tessera.ir.starts import starts
from tessera.ir.strides import with_strides
from tessera.ir.trace import Trace
from tessera.ir.types import Size, TensorType
from tessera.tile.from_trace.around import Around
from tessera.tile.from_trace.index import Unlowerable, sizes_of, strides_of
from tessera.tile.targets.base import AtAddresses, ByAddress, CompiledKernel
from tessera.torch_internals.cuda import current_device
from tessera.torch_internals.memory import empty_cpu, empty_cuda

_numbers = itertools.count()


def launcher(
    body: Trace,
    lowered: Around,
    kernel: CompiledKernel,
    over: dict[int, int] | None = None,
    operands: tuple[Operand, ...] | None = None,
    shapes: dict[int, TensorType] | None = None,
) -> Kernel:
    """`over[k] = j`: output k is written over input j, and not given back. `operands` say where inputs lie, `shapes`
    which results have another shape than the region's."""
    over, shapes = over or {}, shapes or {}
    into = {body.outputs[k]: body.inputs[j] for k, j in over.items()}
    alone = tuple(Operand(i, v.type) for i, v in enumerate(body.inputs))
    where = dict(zip(body.inputs, operands or alone, strict=True))
    types = {o.argument: o.type for o in where.values()}
    names = {v: f"x{o.argument}" for v, o in where.items()}
    names |= {v: f"y{i}" for i, v in enumerate(lowered.stored)}
    scope: dict[str, object] = {"empty": torch.empty_strided, "empty_cpu": empty_cpu}
    scope |= {"kernel": kernel, "with_strides": with_strides, "part": torch.as_strided}
    arguments = ", ".join(f"x{number}" for number in sorted(types))
    lines = [f"def launch({arguments}):"]
    device = lowered.stored[0].tensor.device if lowered.stored else None
    quick = device is not None and device.type == "cuda" and device.index is not None and current_device is not None
    if quick and device is not None:
        scope |= {"empty_cuda": empty_cuda, "current": current_device, "on": torch.cuda.device}
        lines.append(f"if current() != {device.index}:\n        with on({device.index}): return launch({arguments})")
    lines += [f"{text} = {source}" for text, source in _sizes(body, lowered).items()]
    lines += [f"t{names[v]} = {names[v]}" for v in into.values()]
    for number in dict.fromkeys(where[v].argument for v in lowered.inputs):
        name, t = f"x{number}", types[number]
        assert isinstance(t, TensorType)
        lines.append(f"if {_differs(t, name)}: {name} = with_strides({name}.detach(), {_strides(t)})")
    shown, tail = _as_read(body, lowered)
    viewed = {v for eqn in tail for v in eqn.inputs()}  # they get another shape once their views are made
    number = {v: k for k, v in enumerate(body.outputs) if v not in viewed}
    for i, v in enumerate(lowered.stored):
        if v in into:
            lines.append(f"{names[v]} = {names[into[v]]}")
            continue
        result = shown.get(v, v)
        names[result] = names[v]
        t = shapes.get(number.get(result, -1), result.tensor)
        scope[f"dtype{i}"], scope[f"device{i}"] = v.dtype, v.tensor.device
        shape, stride = _tuple(t.shape), _strides(t)
        if v.tensor.device.type == "cpu":
            lines.append(f"{names[v]} = empty_cpu({shape}, {stride}, dtype{i})")
        elif quick and v.tensor.device == device:
            lines.append(f"{names[v]} = empty_cuda({shape}, {stride}, dtype{i})")
        else:
            lines.append(f"{names[v]} = empty({shape}, {stride}, dtype=dtype{i}, device=device{i})")
    parts = {v: o for v, o in where.items() if o.start or o.type != v.type}
    parts |= {v: parts[x] for v, x in into.items() if x in parts}
    lines += _call(lowered, [names[v] for v in lowered.buffers], parts, kernel, device.index if quick else None, scope)
    # An argument of another layout was copied to be written: what it stands for is written from the copy.
    lines += [f"if t{names[v]} is not {names[v]}: t{names[v]}.copy_({names[v]})" for v in into.values()]
    if tail:
        views = _views(body, tail)
        scope["views"] = compile_trace(views)
        names |= {v: f"z{i}" for i, v in enumerate(views.outputs)}  # type: ignore[misc]
        results, given = (", ".join(names[v] for v in values) for values in (views.outputs, views.inputs))  # type: ignore[index]
        lines.append(f"{results}, = views({given})")
        after = {*views.outputs, *viewed}
        later = {k: names[v] for k, v in enumerate(body.outputs) if k in shapes and v in after}  # type: ignore[index]
        lines += [f"{name} = {name}.view({_tuple(shapes[k].shape)})" for k, name in later.items()]
    returned = [v for k, v in enumerate(body.outputs) if k not in over]
    lines.append(f"return ({''.join(f'{names[v]}, ' for v in returned)})")  # type: ignore[index]

    def reading(operands: tuple[Operand, ...], shapes: dict[int, TensorType]) -> Kernel:
        return launcher(body, lowered, kernel, over, operands, shapes)

    whole = any(v in where for eqn in tail for v in eqn.inputs())
    by_address = isinstance(kernel, (ByAddress, AtAddresses)) and not whole and not lowered.symbols
    return _compile(lines, scope, reading if by_address else None)


def _call(
    lowered: Around,
    names: Sequence[str],
    parts: Mapping[Value, Operand],
    kernel: CompiledKernel,
    device: int | None,
    scope: dict[str, object],
) -> list[str]:
    """The kernel on the tensors of these names; one that takes addresses is handed them without a step between."""
    addresses, tensors = [], []
    for v, name in zip(lowered.buffers, names, strict=True):
        if (part := parts.get(v)) is None:
            addresses.append(f"{name}.data_ptr()")
            tensors.append(name)
        else:
            start = f" + {part.start * v.dtype.itemsize}" if part.start else ""
            addresses.append(f"{name}.data_ptr(){start}")
            place = f"{name}.storage_offset() + {part.start}"
            tensors.append(f"part({name}, {_tuple(v.shape)}, {_strides(v.tensor)}, {place})")
    sizes = f"({''.join(f'{s}, ' for s in lowered.symbols)})"
    if isinstance(kernel, ByAddress):
        scope["by_address"] = kernel.by_address
        return [f"by_address({', '.join([*addresses, *lowered.symbols])})"]
    call = f"kernel(({', '.join(tensors)},), {sizes})"
    if device is None or not isinstance(kernel, AtAddresses):
        return [call]
    scope["at"] = kernel.at
    return [f"if not at({device}, ({', '.join(addresses)},), {sizes}):\n        {call}"]


def _as_read(body: Trace, lowered: Around) -> tuple[dict[Value, Value], tuple[Equation, ...]]:
    """What is stored, by the one shape in which it leaves the region where that is another; and the views that are left
    to make."""
    shown: dict[Value, Value] = {}
    tail = list(lowered.tail)
    for v in lowered.stored:
        result = v
        while result not in body.outputs and len(readers := [eqn for eqn in tail if result in eqn.inputs()]) == 1:
            (view,) = readers
            if starts(view) != [0] or not (result.tensor.is_row_major and view.out.tensor.is_row_major):
                break
            if view.out.numel() != result.numel():
                break
            result = shown[v] = view.out
            tail.remove(view)
    return shown, tuple(tail)


def _views(body: Trace, tail: tuple[Equation, ...]) -> Trace:
    """The outputs that are views, made from what is stored or came in, with the inputs that bring their sizes."""
    outputs = tuple(v for eqn in tail for v in eqn.results() if v in body.outputs)
    inner = {v for eqn in tail for v in eqn.results()}
    needed = [v for eqn in tail for v in eqn.inputs() if v not in inner]
    symbols = {s: where for s, where in body.symbols.items() if where[0] in body.inputs}
    inputs = dict.fromkeys([*needed, *(v for v, _ in symbols.values())])
    return Trace("views", tuple(inputs), tail, outputs, {}, {}, symbols)


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


def _differs(t: TensorType, name: str) -> str:
    """Whether a tensor's strides may be others than the kernel's; asking for a flag costs less than for a tuple."""
    step = 1
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


def _compile(lines: list[str], scope: dict[str, object], reading: Callable | None) -> Kernel:
    source = "\n    ".join(lines) + "\n"
    file = f"<tessera launch {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # for tracebacks
    exec(compile(source, file, "exec"), scope)  # noqa: S102
    launch: Callable[..., tuple] = scope["launch"]  # type: ignore[assignment]
    weakref.finalize(launch, linecache.cache.pop, file, None).atexit = False
    return Kernel(run=launch, source=source, reading=reading)
