"""Runs a graph, operator by operator: what every compiled program is compared with.

In: a Model and values for its inputs. Out: values of its outputs. Values are torch tensors, `Narrow` tensors, NumPy
arrays of strings, lists (sequences), None (an empty optional) and dicts (maps). `Importer` runs the same functions to
record them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tessera.frontends.onnx import bodies
from tessera.frontends.onnx.elements import FLOAT8_DTYPES, WIDE_UNSIGNED, Narrow, carrier
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.limits import LIMITS, Limits
from tessera.frontends.onnx.registry import IGNORED, Meaning, meaning_of
from tessera.frontends.onnx.structure import Function, Graph, Model, Node, Reference, subgraphs
from tessera.ir.record import recording
from tessera.ir.types import size_hint
from tessera.torch_internals.fake import FakeTensor, FakeTensorMode
from tessera.util.errors import TesseraError

WIDEST = 16  # bytes of an element
REMEMBERED = 4096  # nodes with types whose results fit
# Integers as wide as types that PyTorch hardly computes with, for operators that only move elements.
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOVED_AS = {t: _SAME_WIDTH[t.itemsize] for t in (*WIDE_UNSIGNED, *FLOAT8_DTYPES)}


class Scope:
    """Values by name, and what the graph that names them may use: opsets, and the attributes of the function around."""

    def __init__(
        self,
        opsets: Mapping[str, int],
        attributes: Mapping[str, object] | None = None,
        outer: Scope | None = None,
        graph: Graph | None = None,
    ) -> None:
        self.values: dict[str, object] = {}
        self.opsets, self.attributes, self.outer, self.graph = opsets, attributes or {}, outer, graph

    def __getitem__(self, name: str) -> object:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        raise OnnxError(f"the value {name!r} is not defined")

    def inner(self, graph: Graph) -> Scope:
        return Scope(self.opsets, self.attributes, self, graph)


@dataclass(frozen=True)
class Context:
    """What an operator may ask for besides its inputs and attributes."""

    interpreter: Interpreter
    node: Node
    scope: Scope
    version: int

    @property
    def outputs(self) -> int:
        """How many results are wanted: up to the last that has a name."""
        return max((i + 1 for i, name in enumerate(self.node.outputs) if name), default=0)

    def wants(self, place: int) -> bool:
        return place < len(self.node.outputs) and bool(self.node.outputs[place])

    @property
    def device(self) -> torch.device:
        return self.interpreter.device

    @property
    def limits(self) -> Limits:
        return self.interpreter.limits

    def run(self, graph: Graph, inputs: Sequence[object]) -> list[object]:
        """The results of a graph among the node's attributes."""
        return self.interpreter.run_graph(graph, inputs, self.scope.inner(graph))


class Interpreter:
    passed: tuple[type[Exception], ...] = ()  # errors that are no node's fault

    def __init__(
        self,
        model: Model,
        limits: Limits = LIMITS,
        device: torch.device | str = "cpu",
        foreseen: dict[tuple, Node] | None = None,
    ) -> None:
        """`foreseen`: nodes and types whose results fit, as earlier runs have found out."""
        self.model, self.limits, self.device = model, limits, torch.device(device)
        self.depth = 0
        self.turns = 0  # of loops
        self.foreseen = {} if foreseen is None else foreseen

    def run(self, inputs: Mapping[str, object]) -> list[object]:
        """The results of the model's graph; `inputs` may replace initializers too."""
        scope = Scope(self.model.opsets, graph=self.model.graph)
        scope.values.update(self.model.graph.initializers)
        scope.values.update(inputs)
        for node in self.model.graph.nodes:
            self.run_node(node, scope)
        return [scope[v.name] for v in self.model.graph.outputs]

    def run_graph(self, graph: Graph, inputs: Sequence[object], scope: Scope) -> list[object]:
        if len(inputs) != len(graph.inputs):
            raise OnnxError(f"graph {graph.name!r}: expected {len(graph.inputs)} inputs, got {len(inputs)}")
        scope.values.update({name: self.constant(x) for name, x in graph.initializers.items()})
        scope.values.update(zip((v.name for v in graph.inputs), inputs, strict=True))
        for node in graph.nodes:
            self.run_node(node, scope)
        return [scope[v.name] for v in graph.outputs]

    def constant(self, x: object) -> object:
        """An initializer or attribute where the program computes."""
        if isinstance(x, Narrow):
            return Narrow(x.data.to(self.device), x.code)
        return x.to(self.device) if isinstance(x, torch.Tensor) else x

    def dtype(self, code: int) -> torch.dtype:
        return carrier(code)

    def run_node(self, node: Node, scope: Scope) -> None:
        try:
            results = self.call(node, [scope[name] if name else None for name in node.inputs], scope)
        except (TesseraError, Warning, *self.passed):
            raise
        except Exception as error:  # whatever PyTorch says of these inputs, it is this node that gave them
            raise OnnxError(f"{self.model.path or 'the model'}: {node}: {type(error).__name__}: {error}") from error
        if len(results) < sum(map(bool, node.outputs)):
            raise OnnxError(f"{node}: expected {len(node.outputs)} results, its operator gives {len(results)}")
        for name, value in zip(node.outputs, results, strict=False):
            if name:
                scope.values[name] = value

    def call(self, node: Node, args: list[object], scope: Scope) -> Sequence[object]:
        """The results of one node: by the file's function, ours, or ONNX's."""
        function = self.model.functions.get(node.key)
        attributes = _resolved(node, scope)
        if function is not None:
            return self.run_function(function, args, attributes, node)
        version = scope.opsets.get(node.domain, 1)
        meaning = meaning_of(node.domain, node.op, version)
        context = Context(self, node, scope, version)
        if meaning is not None:
            return self.apply(meaning, context, args, _checked(meaning, node, args, attributes))
        function = bodies.function_of(node, version, args, attributes)
        if function is None:
            raise OnnxError(
                f"{node}: no operator {node.op!r} of {node.domain or 'ai.onnx'} is known for opset {version}; "
                "tessera.onnx.register declares one"
            )
        return self.run_function(function, args, attributes, node)

    def apply(self, meaning: Meaning, context: Context, args: list, attributes: dict) -> Sequence[object]:
        return self.evaluate(meaning, context, args, attributes)

    def evaluate(self, meaning: Meaning, context: Context, args: list, attributes: dict) -> Sequence[object]:
        """Call the operator's function on these inputs."""
        if meaning.wants_context:
            attributes = {**attributes, "context": context}
        foresee(meaning, context, args, attributes)
        out = called(meaning, args, attributes)
        if recording() is not None:
            refuse_large(out, context)
        return out if isinstance(out, tuple) else (out,)

    def run_function(self, function: Function, args: list, attributes: Mapping, node: Node) -> list[object]:
        if self.depth > self.limits.calls:
            raise OnnxError(f"{node}: functions call each other more than {self.limits.calls} deep")
        if len(args) > len(function.inputs):
            raise OnnxError(f"{node}: expected at most {len(function.inputs)} inputs, got {len(args)}")
        scope = Scope(function.opsets, {**function.defaults, **attributes})
        scope.values.update(zip(function.inputs, [*args, *[None] * len(function.inputs)], strict=False))
        self.depth += 1
        try:
            for inner in function.nodes:
                self.run_node(inner, scope)
        finally:
            self.depth -= 1
        return [scope[name] for name in function.outputs]


def _resolved(node: Node, scope: Scope) -> dict[str, object]:
    """Attributes, those that refer to the function's own looked up; one that the caller left out is left out."""
    attributes = {}
    for name, value in node.attributes.items():
        if not isinstance(value, Reference):
            attributes[name] = value
        elif value.name in scope.attributes:
            attributes[name] = scope.attributes[value.name]
    return attributes


def _checked(meaning: Meaning, node: Node, args: list, attributes: dict[str, object]) -> dict[str, object]:
    fewest, most = meaning.first_inputs
    while args and args[-1] is None and len(args) > fewest:  # an optional input left out at the end
        args.pop()
    if len(args) < fewest or (most is not None and len(args) > most):
        raise OnnxError(f"{node}: expected {fewest} to {most if most is not None else 'any'} inputs, got {len(args)}")
    given = {name: value for name, value in attributes.items() if name not in IGNORED}
    if unknown := given.keys() - meaning.attributes:
        raise OnnxError(f"{node}: unknown attribute {sorted(unknown)[0]!r}")
    if missing := meaning.required - given.keys():
        raise OnnxError(f"{node}: its attribute {sorted(missing)[0]!r} is missing")
    return given


def called(meaning: Meaning, args: list, attributes: dict) -> object:
    return _moved(meaning, args, attributes) if meaning.moves else meaning.function(*args, **attributes)


def foresee(meaning: Meaning, context: Context, args: list, attributes: dict) -> None:
    """Refuse a result that is larger than the limit, before it is made. Asked of nodes whose inputs together could give
    one; sizes that the inputs' values decide are looked at by the operators themselves (`operators/allocation.py`).
    What is recorded holds nothing: its results are looked at instead."""
    if recording() is not None:
        return
    tensors = [a.data if isinstance(a, Narrow) else a for a in args if isinstance(a, (torch.Tensor, Narrow))]
    limit, seen = context.limits.tensor_bytes, context.interpreter.foreseen
    sizes = [max(x.numel(), 1) for x in tensors] + [max(abs(n), 1) for n in _whole_numbers(attributes)]
    if meaning.interpreted or math.prod(sizes) * WIDEST <= limit:
        return
    key = (id(context.node), limit, *((x.shape, x.dtype) for x in tensors))
    if key in seen or subgraphs(context.node):
        return
    refuse_large(_foreseen(meaning, args, attributes), context)
    if len(seen) >= REMEMBERED:
        seen.clear()
    seen[key] = context.node  # as long as it stands here, no other node has its id


def _whole_numbers(attributes: dict) -> Iterator[int]:
    """Paddings, strides, repeats: what makes results larger."""
    for value in attributes.values():
        yield from (n for n in (value if isinstance(value, list) else [value]) if type(n) is int)


def refuse_large(results: object, context: Context) -> None:
    """Of results that hold nothing: whether they would be too large."""
    listed = results if isinstance(results, (tuple, list)) else [results]
    data = [x.data if isinstance(x, Narrow) else x for x in listed]
    for x in data:
        if isinstance(x, FakeTensor) and size_hint(x.numel()) * x.element_size() > context.limits.tensor_bytes:
            raise OnnxError(
                f"{context.node}: a result of {list(x.shape)} takes more than the limit of "
                f"{context.limits.tensor_bytes} bytes; tessera.onnx.load(..., limits=) takes another"
            )


def _foreseen(meaning: Meaning, args: list, attributes: dict) -> object:
    """The results without what they hold; None where only a run tells."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(a: object) -> object:
        if isinstance(a, Narrow):
            return Narrow(fake(a.data), a.code)  # type: ignore[arg-type]
        return mode.from_tensor(a.detach(), static_shapes=True) if isinstance(a, torch.Tensor) else a

    try:
        with mode, torch.no_grad():
            return called(meaning, [fake(a) for a in args], attributes)
    except Exception:  # noqa: BLE001 - the run itself says what is wrong
        return None


def _moved(meaning: Meaning, args: list, attributes: dict) -> object:
    """An operator that only moves elements, of a type that PyTorch does not compute with: as integers of that width."""
    if any(isinstance(a, np.ndarray) for a in args):
        return _moved_strings(meaning, args, attributes)
    codes = {a.code for a in args if isinstance(a, Narrow)}
    dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in _MOVED_AS}
    if not codes and not dtypes:
        return meaning.function(*args, **attributes)

    def plain(a: object) -> object:
        if isinstance(a, Narrow):
            return a.data
        return a.view(_MOVED_AS[a.dtype]) if isinstance(a, torch.Tensor) and a.dtype in _MOVED_AS else a

    def back(x: object) -> object:
        if isinstance(x, (tuple, list)):
            return type(x)(map(back, x))
        return Narrow(x, next(iter(codes))) if codes else x.view(next(iter(dtypes)))  # type: ignore[attr-defined]

    return back(meaning.function(*map(plain, args), **attributes))


def _moved_strings(meaning: Meaning, args: list, attributes: dict) -> object:
    """The same for strings: their numbers in one list of all of them move."""
    texts = np.concatenate([a.ravel() for a in args if isinstance(a, np.ndarray)])
    places, count = [], 0
    for a in args:
        if isinstance(a, np.ndarray):
            places.append(torch.arange(count, count + a.size).reshape(a.shape))
            count += a.size
        else:
            places.append(a)

    def back(x: object) -> object:
        if isinstance(x, (tuple, list)):
            return type(x)(map(back, x))
        picked = np.empty(x.shape, dtype=object)  # type: ignore[attr-defined]
        picked[...] = texts[x.numpy()]  # type: ignore[attr-defined]
        return picked

    return back(meaning.function(*places, **attributes))
