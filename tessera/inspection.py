"""Looking into a compiled function: its stages, an edited program in place of one, an account of what happened.

`stages` gives every program a compilation went through; `edit` puts a user's own version of one back, checks
that it still fits, and compiles on from there; `explain` tells graphs, breaks, recompiles and who runs what.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from tessera.compiled import Backend, Compiled, GraphRecord, compiled_state
from tessera.frontends.functional import trace_function
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.printer import identifier
from tessera.ir.record import record
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.ops.op import keep_whole
from tessera.pipelines import EDITABLE, Compilation
from tessera.util.errors import EditError, InputError


def trace(fn: Callable, *args: object, **kwargs: object) -> Trace:
    """The program `fn(*args, **kwargs)` runs, as a Trace: print it, save it, run it.

    A module's parameters and buffers, and other tensors it closes over, are the trace's constants.
    """
    made = trace_function(fn, args, kwargs, name=getattr(fn, "__name__", type(fn).__name__)).trace
    return _named_constants(made, fn) if isinstance(fn, torch.nn.Module) else made


def _named_constants(made: Trace, module: torch.nn.Module) -> Trace:
    """Constants that are the module's own are called by their names in it."""
    own = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
    taken = {v.name for v in made.values()}
    rename = {}
    for v, tensor in made.constants.items():
        name = identifier(own.get(id(tensor), v.name).replace(".", "_"))
        rename[v] = Value(name, v.type) if name not in taken else v
    return made.with_(
        equations=tuple(e.substitute(rename) for e in made.equations),
        outputs=map_values(made.outputs, lambda v: rename.get(v, v)),
        constants={rename[v]: t for v, t in made.constants.items()},
    )


# --- stages ---


@dataclass(frozen=True)
class Stage:
    graph: str
    name: str
    trace: Trace

    def save(self, path: str) -> None:
        """Write this program as Python that runs by itself; `edit` can put it back."""
        self.trace.save(path, title=f"tessera stage {self.name!r} of graph {self.graph!r}")

    def __str__(self) -> str:
        return f"# {self.graph}: {self.name}\n{self.trace}"


class Stages(list[Stage]):
    """Every stage of every graph, in order."""

    def __getitem__(self, key):  # noqa: ANN001, ANN204
        """By position, by slice, or by name (of the last graph that has it)."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        for stage in reversed(self):
            if stage.name == key:
                return stage
        raise InputError(f"no stage {key!r}; the stages are {', '.join(self.names())}")

    def names(self) -> list[str]:
        return list(dict.fromkeys(stage.name for stage in self))

    def graphs(self) -> list[str]:
        return list(dict.fromkeys(stage.graph for stage in self))

    def diff(self, before: str | int, after: str | int) -> str:
        """What changed between two stages, as a unified diff."""
        a, b = self[before], self[after]
        lines = difflib.unified_diff(
            str(a.trace).splitlines(), str(b.trace).splitlines(), a.name, b.name, lineterm="", n=2
        )
        return "\n".join(lines)


def stages(fast: Callable) -> Stages:
    """Every stage of the compilations of a jitted function."""
    found = Stages()
    for compilation in _state(fast).compilations():
        found += [Stage(compilation.name, name, trace) for name, trace in compilation.stages]
    if not found:
        raise InputError("nothing is compiled yet; call the function first")
    return found


def _state(fast: object) -> Compiled:
    state = compiled_state(fast)
    if state is None:
        raise InputError(f"expected what tessera.jit gave, got {type(fast).__name__}")
    return state


# --- edit ---

_TITLE = re.compile(r"^# tessera stage '([^']+)' of graph '([^']+)'", re.M)


def edit(fast: Callable, path: str, stage: str | None = None, graph: str | None = None) -> None:
    """Run the user's edited program in place of a stage, from the next call on.

    The file names its stage and graph in its first line when it was saved from `stages(fast)`; otherwise say
    them. The program must take the same inputs and give outputs of the same types.
    """
    state = _state(fast)
    with open(path) as file:
        text = file.read()
    title = _TITLE.search(text)
    stage = stage or (title[1] if title else None)
    graph = graph or (title[2] if title else state.compilations()[-1].name)
    if stage is None:
        raise EditError(f"{path} does not say which stage it is; pass stage=…, one of {', '.join(EDITABLE)}")
    if stage not in EDITABLE:
        raise EditError(f"stage {stage!r} cannot be edited; these can: {', '.join(EDITABLE)}")
    compilation = _named(state, graph)
    known = dict(compilation.stages)
    if stage not in known:
        raise EditError(f"graph {graph!r} has no stage {stage!r}; it has {', '.join(known)}")
    compilation.edit(stage, load(path, text, known[stage]))


def _named(state: Compiled, graph: str) -> Compilation:
    for compilation in state.compilations():
        if compilation.name == graph:
            return compilation
    raise EditError(f"no graph {graph!r}; there are {', '.join(c.name for c in state.compilations())}")


def load(path: str, text: str, original: Trace) -> Trace:
    """The program in an edited file as a trace that fits where `original` stood."""
    scope: dict[str, object] = {"__name__": "tessera_edited", "__file__": path}
    exec(compile(text, path, "exec"), scope)
    fn = scope.get(original.name)
    if not callable(fn):
        raise EditError(f"{path}: expected a function {original.name!r}, found {_functions(scope)}")
    mode = mode_of(original)
    fakes = [_placeholder(v, original, mode) for v in original.inputs]
    names = [v.name for v in original.inputs]
    try:
        made, _ = record(fn, fakes, names, keep_whole, Builder(original.name, mode))
    except TypeError as error:
        raise EditError(f"{path}: expected a function of ({', '.join(names)}): {error}") from error
    _check(path, original, made)
    rename = dict(zip(made.inputs, original.inputs, strict=True))
    return made.with_(
        inputs=original.inputs,
        equations=tuple(e.substitute(rename) for e in made.equations),
        outputs=tuple(rename.get(o, o) if isinstance(o, Value) else o for o in made.outputs),
        mutations={rename[t]: rename.get(v, v) for t, v in made.mutations.items()},
        symbols={s: (rename.get(v, v), d) for s, (v, d) in made.symbols.items()},
    )


def _placeholder(v: Value, trace: Trace, mode: object) -> object:
    if isinstance(v.type, TensorType):
        return fake.fake_of(v.type, mode)  # type: ignore[arg-type]
    for number in _sizes(trace):
        if str(number) == v.name or trace.symbols.get(str(number), (None,))[0] is v:
            return number
    raise EditError(f"input {v.name} is a number that no size of the program shows; it cannot be edited here")


def _sizes(trace: Trace) -> Iterator[torch.SymInt]:
    for v in trace.values():
        if isinstance(v.type, TensorType):
            yield from (s for s in v.type.shape if isinstance(s, torch.SymInt))


def _functions(scope: dict[str, object]) -> str:
    names = [n for n, f in scope.items() if callable(f) and getattr(f, "__module__", "") == "tessera_edited"]
    return ", ".join(names) or "none"


def _check(path: str, original: Trace, made: Trace) -> None:
    wanted, given = [_kind(o) for o in original.outputs], [_kind(o) for o in made.outputs]
    if len(wanted) != len(given):
        raise EditError(f"{path}: expected {len(wanted)} outputs, got {len(given)}")
    for i, (a, b) in enumerate(zip(wanted, given, strict=True)):
        if a != b:
            raise EditError(f"{path}: expected output {i} to be {a}, got {b}")
    if [v.name for v in original.mutations] != [v.name for v in made.mutations]:
        names = ", ".join(v.name for v in original.mutations) or "nothing"
        got = ", ".join(v.name for v in made.mutations) or "nothing"
        raise EditError(f"{path}: expected the program to write {names}, it writes {got}")


def _kind(o: object) -> str:
    return str(o.type) if isinstance(o, Value) else repr(o)


# --- explain ---


@dataclass(frozen=True)
class GraphReport:
    name: str
    compile_id: str
    operators: int
    break_reason: str
    break_line: str
    recompile_reason: str
    eager_reason: str
    executors: tuple[str, ...]
    equations: dict[str, int]
    saved_bytes: int
    saved: tuple[str, ...]
    seconds: float
    unfused: dict[str, list[str]]  # why equations are in no fused region: reason -> names


@dataclass(frozen=True)
class Explanation:
    """What compiling did; `print` it."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def breaks(self) -> list[GraphReport]:
        return [g for g in self.graphs if g.break_reason]

    @property
    def recompiles(self) -> list[GraphReport]:
        return [g for g in self.graphs if g.recompile_reason]

    @property
    def eager(self) -> list[GraphReport]:
        return [g for g in self.graphs if g.eager_reason]

    def __str__(self) -> str:
        head = f"{len(self.graphs)} graphs, {len(self.breaks)} graph breaks, {len(self.recompiles)} recompiles"
        return "\n".join([head, *(text for g in self.graphs for text in _report_lines(g))])


def _report_lines(g: GraphReport) -> list[str]:
    lines = [f"\n{g.name} ({g.operators} operators, compiled in {g.seconds:.2f} s)"]
    if g.recompile_reason:
        lines.append(f"  recompiled because {g.recompile_reason}")
    if g.break_reason:
        lines.append(f"  ends in a graph break at {g.break_line}: {g.break_reason.splitlines()[0]}")
        lines += [f"    {hint.strip()}" for hint in g.break_reason.splitlines() if hint.strip().startswith("Hint")]
    if g.eager_reason:
        lines.append(f"  runs eagerly: {g.eager_reason}")
    lines += [f"  {executor}" for executor in g.executors]
    lines += [f"  not fused, {reason}: {', '.join(names)}" for reason, names in g.unfused.items()]
    if g.saved:
        lines.append(f"  saves {g.saved_bytes / 2**20:.2f} MiB for backward: {', '.join(g.saved)}")
    return lines


def explain(fast: Callable) -> Explanation:
    """Graphs, breaks and why, recompiles and why, and who runs what."""
    backend = _state(fast).backend
    if not isinstance(backend, Backend):
        return Explanation([_report(GraphRecord(c.name, "", c), "") for c in backend.compilations])
    reasons = _recompile_reasons()
    return Explanation([_report(g, reasons.get(g.compile_id, "")) for g in backend.graphs])


def _report(g: GraphRecord, recompiled: str) -> GraphReport:
    c = g.compilation
    return GraphReport(
        g.name,
        g.compile_id,
        g.nodes or (len(c.stages[0][1].equations) if c else 0),
        g.break_reason,
        g.break_line,
        recompiled,
        g.eager_reason,
        tuple(map(str, c.claims)) if c else (),
        {name: len(t.equations) for name, t in c.stages} if c else {},
        c.saved_bytes if c else 0,
        c.saved if c else (),
        c.seconds if c else 0.0,
        c.unfused() if c else {},
    )


def _recompile_reasons() -> dict[str, str]:
    """Dynamo's word on why it compiled again, by compile id."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    return {str(m.compile_id): m.recompile_reason for m in metrics if getattr(m, "recompile_reason", None)}
