"""Programs of a graph's parts, one for each set of types, for any size where the file names sizes.

In: a part and the values of its inputs. Out: those of its outputs. Values that decide a size are read here, and a
program is kept for each; past `limits.programs` the interpreter runs the part.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from tessera.frontends.onnx.capture import Recorded, record_part
from tessera.frontends.onnx.elements import Narrow
from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.importer import Importer, Stop
from tessera.frontends.onnx.interpreter import Interpreter, Scope
from tessera.frontends.onnx.limits import Limits
from tessera.frontends.onnx.segments import Part, Plan
from tessera.frontends.onnx.structure import Model, Node, ValueInfo
from tessera.frontends.onnx.symbols import holds
from tessera.just_in_time.backend import Backend
from tessera.onnx.state import State
from tessera.pipeline.compilation import compile_captured
from tessera.torch_internals import pytree
from tessera.torch_internals.dispatch import is_any_autocast_enabled
from tessera.torch_internals.dynamo import compile_lock
from tessera.util.config import config
from tessera.util.garbage import collection_paused

Values = Mapping[str, object]
Entry = Callable[[Sequence[object]], dict[str, object]]


class Compiler:
    def __init__(
        self, model: Model, state: State, limits: Limits, plan: Plan, backend: Backend, infos: Mapping[str, ValueInfo]
    ) -> None:
        self.model, self.state, self.limits, self.plan, self.backend = model, state, limits, plan, backend
        self.infos = infos
        self.foreseen: dict[tuple, Node] = {}  # what interpreters have found to fit
        self.told: set[int] = set()  # parts of which `explain` has heard that the interpreter runs them

    def call(self, part: Part, values: Values, device: torch.device) -> dict[str, object] | None:
        """The part's outputs; None where the part was split instead."""
        if part.reason:
            return self.interpret(part, values, device, part.reason)
        state = self.state
        inputs = {n: values[n] if n in values else state[n] for n in part.inputs}
        constants = {n for n in part.inputs if n in part.read or (n not in values and state.known(n))}
        leaves = pytree.tree_leaves([x for n, x in inputs.items() if n not in constants])
        key = (_key(leaves), tuple((n, _contents(inputs[n])) for n in sorted(part.read)))
        entry = part.entries.get(key)
        if entry is None:
            with compile_lock, collection_paused():
                entry = part.entries.get(key) or self.make(part, inputs, constants, leaves, key, device)
            if entry is None:
                return None
        try:
            return entry(leaves)
        except (IndexError, RuntimeError) as error:
            if type(error) in (IndexError, RuntimeError):  # and not that memory is short, for one
                self.name_fault(part, inputs, device, error)
            raise

    def make(
        self, part: Part, inputs: dict, constants: set[str], leaves: list, key: tuple, device: torch.device
    ) -> Entry | None:
        """A program that fits, or a new one; None where the part had to be split."""
        for fits, made_for, entry in part.programs:
            if made_for == _frame(key) and fits([x for x in leaves if isinstance(x, torch.Tensor)]):
                part.entries[key] = entry
                return entry
        if len(part.entries) >= self.limits.programs:
            why = f"more than {self.limits.programs} programs for one part of the graph"
            return lambda leaves: self.interpret(part, inputs, device, why)
        dynamic = self.dynamic(part, inputs, constants)
        for dims in [dynamic, None] if dynamic else [None]:
            try:
                recorded = self.record(part, inputs, constants, dims, device)
                break
            except Stop as stop:
                if dims is None:
                    self.split(part, stop, inputs)
                    return None
        entry = self.compile(part, recorded, inputs, device)
        part.entries[key] = entry
        if dims is not None:
            env = recorded.mode.shape_env
            assert env is not None
            part.programs.append((holds(env, recorded.fakes), _frame(key), entry))
        return entry

    def record(
        self, part: Part, inputs: dict, constants: set[str], dims: dict | None, device: torch.device
    ) -> Recorded:
        known = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in inputs.items() if n in constants}
        importer = Importer(self.model, self.limits, device)
        name = f"{self.backend.name}_{len(self.backend.graphs)}"
        return record_part(self.model, part, inputs, known, importer, dims, name)

    def split(self, part: Part, stop: Stop, inputs: Values) -> None:
        """What to do about a node that did not become equations."""
        needed = inputs.get(stop.needs)
        if _readable(needed, self.limits) and stop.needs not in part.read:
            part.read.add(stop.needs)
        elif stop.needs and stop.needs not in inputs and stop.node is not part.nodes[0]:
            self.plan.cut(part, stop.node)
        else:
            self.plan.interpret(part, stop.node, stop.reason)

    def dynamic(self, part: Part, inputs: Values, constants: set[str]) -> dict[str, frozenset[int]]:
        """Dimensions that are symbols: those the file names or leaves open, and those of values inside the graph."""
        dims = {}
        for name, x in inputs.items():
            if name in constants or not isinstance(x, torch.Tensor) or name in self.state:
                continue
            info = self.infos.get(name)
            declared = info.shape if info is not None else None if part.entries else ()
            if declared == ():
                continue
            open_ = {d for d in range(x.ndim) if declared is None or not isinstance(declared[d], int)}
            if chosen := frozenset(d for d in open_ if x.shape[d] > 1):
                if not x.is_contiguous():  # kernels are made for strides: no symbols then
                    return {}
                dims[name] = chosen
        return dims

    def compile(self, part: Part, recorded: Recorded, inputs: dict, device: torch.device) -> Entry:
        record = self.backend.next_record()
        record.nodes = len(part.nodes)
        self.backend.graphs.append(record)

        # Nothing of this call is kept but its constants and its structure.
        leaves, spec = pytree.tree_flatten({n: inputs[n] for n in recorded.given})
        leaves = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        constants = {n: x for n, x in inputs.items() if n not in recorded.given}

        def eager(*tensors: object) -> tuple:
            full = list(leaves)
            for place, x in zip(recorded.places, tensors, strict=False):
                full[place] = x
            values = {**constants, **pytree.tree_unflatten(full, spec)}
            return recorded.flat(self.interpret(part, values, device, "a call that no program takes"))

        try:
            call, record.compilation = compile_captured(recorded.captured, eager, record.name, self.backend.options)
        except Exception as error:
            record.failure = getattr(error, "tessera_failure", None)
            if config.strict:
                raise
            record.eager_reason = f"{type(error).__name__}: {error}".split("\n")[0]
            where = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(
                f"Tessera could not compile {record.name} and interprets it: {record.eager_reason} "
                f"(in {where.name}, {where.filename.rsplit('/', 1)[-1]}:{where.lineno})",
                stacklevel=2,
            )
            call = eager
        places, lifted, pack = recorded.places, recorded.lifted, recorded.pack
        return lambda leaves: pack(call(*[leaves[i] for i in places], *lifted))

    # --- the interpreter ---

    def name_fault(self, part: Part, inputs: Values, device: torch.device, error: Exception) -> None:
        """A kernel refused what it was given, an index out of bounds for one: the interpreter says at which node."""
        try:
            self.run(part, inputs, device)
        except OnnxError as named:
            raise named from error

    def interpret(self, part: Part, values: Values, device: torch.device, why: str) -> dict[str, object]:
        if id(part) not in self.told:
            self.told.add(id(part))
            nodes = ", ".join(map(str, part.nodes[:3])) + (", …" if len(part.nodes) > 3 else "")
            record = self.backend.next_record()
            record.nodes, record.eager_reason = len(part.nodes), f"{nodes}: the interpreter runs it: {why}"
            self.backend.graphs.append(record)
        return self.run(part, values, device)

    def run(self, part: Part, values: Values, device: torch.device) -> dict[str, object]:
        scope = Scope(self.model.opsets, graph=self.model.graph)
        scope.values.update({n: values[n] if n in values else self.state[n] for n in part.inputs})
        interpreter = Interpreter(self.model, self.limits, device, self.foreseen)
        for node in part.nodes:
            interpreter.run_node(node, scope)
        return {name: scope[name] for name in part.outputs}


def _key(leaves: Sequence[object]) -> tuple:
    key: list = [torch.is_grad_enabled(), is_any_autocast_enabled() and _casts()]
    for x in leaves:
        if isinstance(x, torch.Tensor):
            key += (x.shape, x.dtype, x.stride(), x.device, x.requires_grad)
        else:
            key.append(x if x is None or isinstance(x, (int, float, str)) else id(x))
    return tuple(key)


def _casts() -> frozenset:
    return frozenset((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def _frame(key: tuple) -> tuple:
    """A key without sizes and strides: what a program for any size fixes all the same."""
    types, values = key
    return tuple(k for k in types if not isinstance(k, (torch.Size, tuple))), values


def _contents(x: object) -> object:
    data = x.data if isinstance(x, Narrow) else x
    return (data.shape, tuple(data.reshape(-1).tolist())) if isinstance(data, torch.Tensor) else x


def _readable(x: object, limits: Limits) -> bool:
    data = x.data if isinstance(x, Narrow) else x
    return isinstance(data, torch.Tensor) and data.numel() <= limits.read_elements
