"""A model on its way out: captured, with the names that its file will have.

In: a module, function or exported program, its arguments, and the sizes that may change. Out: a `Program` for the
exporter, and the caller's tensors by the names of the inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from tessera.exporters.onnx.graph import as_real
from tessera.exporters.onnx.program import Program, cleaned
from tessera.frontends.captured import Captured
from tessera.frontends.export import capture_export
from tessera.frontends.export_model import exported_program, recorded_program
from tessera.ir.equation import Value
from tessera.ir.types import ScalarType, TensorType, symbol_of
from tessera.torch_internals import pytree
from tessera.util.errors import InputError


@dataclass(frozen=True)
class Leaving:
    program: Program
    feeds: dict[str, torch.Tensor]  # the example arguments, by the names of the inputs


@dataclass(frozen=True)
class _Found:
    captured: Captured
    held: list[tuple[str, torch.Tensor]]  # parameters, buffers and constants by name: the first inputs
    names: tuple[str, ...]  # of the positional arguments
    spec: pytree.TreeSpec  # of the results
    example: tuple[tuple, dict] = ((), {})
    sizes: Mapping[str, str] = field(default_factory=dict)  # what an exported program calls its symbols


def captured_model(
    model: Callable | ExportedProgram, args: tuple, kwargs: dict, dynamic: Mapping | None, name: str
) -> Leaving:
    if hasattr(model, "__tessera_onnx__"):
        return _imported(model, args, kwargs, dynamic)
    found = _recorded(model, args, kwargs, dynamic, name) or _exported(model, args, kwargs, dynamic, name)
    if not args and not kwargs:
        args, kwargs = found.example
    held, trace = found.held, found.captured.trace
    trace = cleaned(trace.with_(outputs=trace.outputs[: found.captured.outputs]))
    weights = dict(zip(trace.inputs, held, strict=False))
    users = trace.inputs[len(held) :]
    leaves = pytree.tree_leaves((args, kwargs))
    bound = {v for symbol, (v, _) in trace.symbols.items() if symbol != v.name}
    inputs = {v: v.name for v in users if _comes_in(v, bound)}
    feeds = {v.name: _tensor(x) for v, x in zip(users, leaves, strict=True) if v in inputs}
    sizes = {**found.sizes, **_size_names(users, found.names, args, kwargs, dynamic or {})}
    paths = _paths(found.spec, len(trace.outputs))
    outputs = [(path, o) for path, o in zip(paths, trace.outputs, strict=True) if o is not None]
    outputs = [(path, o) for path, o in outputs if not isinstance(o, str)]
    kept = trace.with_(outputs=tuple(o for _, o in outputs))
    return Leaving(Program(kept, found.captured.mode, weights, inputs, outputs, sizes), feeds)


def _recorded(model: Callable, args: tuple, kwargs: dict, dynamic: Mapping | None, name: str) -> _Found | None:
    """A plain model is run once; its file is the one that torch.export would lead to, in less time."""
    found = recorded_program(model, args, kwargs, dynamic, name)
    if found is None:
        return None
    recorded, names = found
    return _Found(recorded.captured, list(recorded.held.items()), names, recorded.captured.spec)


def _exported(model: Callable, args: tuple, kwargs: dict, dynamic: Mapping | None, name: str) -> _Found:
    exported, names = exported_program(model, args, kwargs, dynamic)
    with torch.no_grad():
        captured = capture_export(exported, name, whole_layers=True)
    specs = exported.graph_signature.input_specs
    held = [spec.target or spec.arg.name for spec in specs if spec.kind.name != "USER_INPUT"]
    pairs = list(zip(held, captured.held, strict=True))
    return _Found(
        captured.captured, pairs, names, captured.out_spec, exported.example_inputs or ((), {}), captured.size_names
    )


def _imported(net: Any, args: tuple, kwargs: dict, dynamic: Mapping | None) -> Leaving:
    """A file that was read has names of its own, and sizes that it names or leaves open."""
    recorded = importlib.import_module("tessera.onnx.recorded")  # with the compiler, which others leave without
    graph = recorded.whole_graph(net, args, kwargs, dynamic)
    trace = graph.trace.with_(outputs=tuple(v for _, v in graph.outputs))
    trace = cleaned(trace)
    outputs = [(name, v) for (name, _), v in zip(graph.outputs, trace.outputs, strict=True)]
    program = Program(trace, graph.recorded.mode, graph.weights, graph.inputs, outputs, graph.sizes)
    return Leaving(program, graph.values)


def _comes_in(v: Value, bound: set[Value]) -> bool:
    """Tensors, and numbers that are symbols; other numbers are constants of the program."""
    return isinstance(v.type, TensorType) or (isinstance(v.type, ScalarType) and v in bound)


def _tensor(x: object) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return as_real(x.detach())
    if isinstance(x, (bool, int, float)):
        return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
    raise InputError(f"expected tensors and numbers as arguments, got {type(x).__name__}")


def _size_names(
    users: tuple[Value, ...], names: tuple[str, ...], args: tuple, kwargs: dict, dynamic: Mapping
) -> dict[str, str]:
    """What the user calls each symbol."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    specs = [spec for name, x in given.items() for spec in _leaf_specs(dynamic.get(name), x)]
    called: dict[str, str] = {}
    for v, spec in zip(users, specs, strict=False):
        if not isinstance(v.type, TensorType) or not isinstance(spec, Mapping):
            continue
        for dim, size in spec.items():
            name = (
                size if isinstance(size, str) else size[0] if isinstance(size, tuple) else getattr(size, "__name__", "")
            )
            here = v.type.shape[dim]
            if name and not isinstance(here, int) and (symbol := symbol_of(here)):
                called.setdefault(symbol, name)
    return called


def _leaf_specs(spec: object, x: object) -> Iterator[object]:
    if isinstance(x, torch.Tensor):
        yield spec
    elif isinstance(x, (list, tuple)):
        listed = spec if isinstance(spec, (list, tuple)) else [None] * len(x)
        for s, item in zip(listed, x, strict=True):
            yield from _leaf_specs(s, item)
    elif isinstance(x, dict):
        for key, item in x.items():
            yield from _leaf_specs(spec.get(key) if isinstance(spec, Mapping) else None, item)
    else:
        yield from [None] * len(pytree.tree_leaves(x))


def _paths(spec: pytree.TreeSpec, count: int) -> list[str]:
    """Names of outputs by where they stand: `logits`, `past.0.1`; `output` where there is one alone."""
    numbered = pytree.tree_unflatten(list(range(count)), spec)
    paths = {leaf: path for path, leaf in pytree.tree_flatten_with_path(numbered)[0]}
    if count == 1 and not paths[0]:
        return ["output"]
    texts = [".".join(_key(k) for k in paths[i]) for i in range(count)]
    return [f"output.{t}" if t[:1].isdigit() else t for t in texts]


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
