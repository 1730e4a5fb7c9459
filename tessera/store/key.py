"""What a stored program is found by: the captured program in full, how it is compiled, and everything around it.

In: a `Captured` and what else `Compilation` is told. Out: a `Key`, or `Unserial` with the reason why nothing can be
stored. Two programs with one key are compiled to the same; so nothing may be left out that any pass looks at. Lines of
the user's files are left out: they only say where an equation came from, and whoever reads brings its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from tessera.executors.base import Executor, FusionExecutor, in_order
from tessera.frontends.captured import Captured
from tessera.ir.equation import Arg, Equation
from tessera.ir.serial import NAMESPACES, VERSION, Place, Writer, content
from tessera.ir.serial_size import Sizes
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, TensorType
from tessera.ops.op import registry
from tessera.store.environment import environment
from tessera.store.layout import write_aliased
from tessera.torch_internals.operators import aten_name
from tessera.torch_internals.shapes import symbol_values
from tessera.util.errors import Unserial

MOST_BYTES = 1 << 24  # of the tensors that a program closes over, which are compared by their contents


@dataclass(frozen=True)
class Key:
    text: str  # a digest of everything
    places: tuple[Place, ...]  # the lines that the captured program mentions, in order
    held: tuple[torch.Tensor, ...]  # the tensors it closes over, in order
    sizes: Sizes
    facts: str  # what was known of its symbolic sizes

    def with_more(self, data: dict[str, object]) -> Key:
        """The key of something that further data decide."""
        more = json.dumps(data, sort_keys=True)
        return replace(self, text=hashlib.sha256(f"{self.text}\n{more}".encode()).hexdigest())


def key_of(captured: Captured, executors: Sequence[str | Executor], more: dict[str, object]) -> Key:
    """`more` is whatever else decides what is compiled, as data."""
    check_executors(executors)
    held = tuple(_tensors(captured.trace))
    if sum(x.numel() * x.element_size() for x in held) > MOST_BYTES:
        raise Unserial("the program closes over large tensors")
    writer = Writer(held=held)
    top = writer.trace(captured.trace)
    _check_operators(captured.trace)
    sizes = Sizes(_sizes(captured.trace))
    facts = facts_of(sizes)
    about = {
        "version": VERSION,
        "trace": top,
        "outputs": captured.outputs,
        "aliased": [[i, write_aliased(a, writer)] for i, a in captured.aliased.items()],
        "placed": [[i, write_aliased(a, writer)] for i, a in captured.placed.items()],
        "grads": captured.requires_grad,
        "uncounted": captured.uncounted,
        "held": [_contents(x) for x in held],
        "sizes": facts,
        "more": more,
        "around": environment(_devices(captured.trace)),
    }
    tables = writer.tables()
    places = tuple((str(file), int(line)) for file, line in tables.pop("places"))  # type: ignore[attr-defined]
    digest = hashlib.sha256(json.dumps([about, tables], sort_keys=True).encode())
    return Key(digest.hexdigest(), places, held, sizes, facts)


def facts_of(sizes: Sizes) -> str:
    """All that is known of symbolic sizes: their values now, their ranges, what was guarded on, what is equal. Symbols
    that the program does not mention go by their number: Dynamo may name them after an object's id."""
    env = sizes.env
    if env is None:
        return ""
    values = symbol_values(env)
    others = {s.name: f"other{i}" for i, s in enumerate(values) if s.name not in sizes.symbols}

    def text(x: object) -> str:
        return re.sub(r"\w+", lambda word: others.get(word[0], word[0]), str(x))

    guards = [g.expr for g in env.guards]
    parts = (values, env.var_to_range, env.replacements, getattr(env, "divisible", ()), guards)
    return "; ".join(str(sorted(map(text, p.items() if isinstance(p, dict) else p))) for p in parts)


def own_function(fn: Callable) -> str:
    """A function of Tessera's by its name. A user's is Python that no key can hold: it is refused."""
    plain, bound = (fn.func, f"{fn.args}{sorted(fn.keywords.items())}") if isinstance(fn, partial) else (fn, "")
    module, name = getattr(plain, "__module__", ""), getattr(plain, "__qualname__", "")
    if not str(module).startswith("tessera."):
        raise Unserial(f"{module}.{name} is not Tessera's own")
    return f"{module}.{name}{bound}"


def check_executors(executors: Sequence[str | Executor]) -> None:
    """Executors of a user's are refused. One that looks at other operators than those that may stand in a stored
    program does no harm."""
    if not all(isinstance(name, str) for name in executors):
        raise Unserial("an executor is given as an object, not by its name")
    for executor in in_order(executors):
        operators = None if isinstance(executor, FusionExecutor) else executor.operators
        if operators is None:
            for part in (getattr(executor, f.name) for f in fields(executor)):
                if callable(part):
                    own_function(part)
        elif any(name.split(".")[0] in NAMESPACES for name in operators):
            raise Unserial(f"the executor {executor.name!r} is not Tessera's own")


def _check_operators(trace: Trace) -> None:
    for eqn in _equations(trace):
        name = f"{getattr(eqn.op, 'namespace', '')}.{aten_name(eqn.op)}"
        if name in registry() and registry()[name].family == "user":
            raise Unserial(f"the operator {name} is a user's")


def _equations(trace: Trace) -> Iterator[Equation]:
    for t in _traces(trace):
        yield from t.equations


def _traces(trace: Trace) -> Iterator[Trace]:
    """A program and everything that stands in its arguments, each as often as it is mentioned."""
    yield trace
    for eqn in trace.equations:
        for a in (*eqn.args, *eqn.kwargs.values()):
            if isinstance(a, Trace):
                yield from _traces(a)


def _tensors(trace: Trace) -> list[torch.Tensor]:
    tensors = {id(x): x for t in _traces(trace) for x in t.constants.values()}
    return list(tensors.values())


def _contents(x: torch.Tensor) -> list:
    """A tensor that passes may compute with."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or x.layout is not torch.strided:
        raise Unserial(f"the program closes over a {type(x).__name__}")
    if x.is_conj() or x.is_neg():
        raise Unserial("the program closes over a tensor whose numbers are conjugated or negated when they are read")
    digest = hashlib.sha256(content(x)).hexdigest()
    layout = [str(x.dtype), list(x.shape), list(x.stride()), x.storage_offset(), str(x.device)]
    return [type(x).__name__, *layout, x.requires_grad, digest]


def _devices(trace: Trace) -> set[torch.device]:
    return {v.type.device for t in _traces(trace) for v in t.values() if isinstance(v.type, TensorType)}


def _sizes(trace: Trace) -> Iterator[object]:
    """The symbolic sizes of a program."""
    if not trace.symbols:  # every symbol of a program is bound in that table
        return
    for t in _traces(trace):
        for v in t.values():
            if isinstance(v.type, TensorType):
                yield from (*v.type.shape, *v.type.stride)
        for eqn in t.equations:
            yield from _symbolic((eqn.args, eqn.kwargs))


def _symbolic(a: Arg) -> Iterator[object]:
    if isinstance(a, (list, tuple)):
        for item in a:
            yield from _symbolic(item)
    elif isinstance(a, dict):
        yield from _symbolic(tuple(a.values()))
    elif isinstance(a, SYMBOLIC):
        yield a
