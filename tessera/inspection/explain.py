"""What compiling did, told as data: graphs, breaks, recompiles, who runs what, what is not fused, memory.

In: what `tessera.jit` gave. Out: an `Explanation`, which prints as text, renders in a terminal and turns into JSON.
Everything is worked out when it is asked for, from what compilation keeps anyway; a call pays nothing for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tessera.distributed.elsewhere import elsewhere
from tessera.inspection import render
from tessera.inspection.advice import changed, for_break, for_recompile
from tessera.inspection.floor import Floor, predicted
from tessera.inspection.guards import guards, limits_hit, plain
from tessera.inspection.memory import memory
from tessera.inspection.mesh import sent
from tessera.inspection.programs import state_of
from tessera.inspection.reports import GraphReport, RegionReport, UnfusedReport
from tessera.ir.equation import Equation, Special, short_path
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.just_in_time.backend import Backend, GraphRecord
from tessera.just_in_time.compiled import Compiled
from tessera.pipeline.compilation import Compilation
from tessera.torch_internals.operators import op_name
from tessera.util.html import as_html


@dataclass(frozen=True, repr=False)
class Explanation:
    """What compiling did; `print` it, hand it to rich, or take `to_dict()`."""

    graphs: list[GraphReport] = field(default_factory=list)
    floor: Floor = field(default_factory=lambda: predicted(()))
    elsewhere: str = ""  # who else has laid the model out on ranks, and what tessera.shard would gain

    @property
    def breaks(self) -> list[GraphReport]:
        return [g for g in self.graphs if g.break_reason]

    @property
    def recompiles(self) -> list[GraphReport]:
        return [g for g in self.graphs if g.recompile_reason]

    @property
    def eager(self) -> list[GraphReport]:
        return [g for g in self.graphs if g.eager_reason]

    def to_dict(self) -> dict:
        """Plain lists, dicts, strings and numbers."""
        return {
            "graphs": [dataclasses.asdict(g) for g in self.graphs],
            "breaks": len(self.breaks),
            "recompiles": len(self.recompiles),
            "eager": len(self.eager),
            "seconds": sum(g.seconds for g in self.graphs),
            "floor": self.floor.to_dict(),
            "elsewhere": self.elsewhere,
        }

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (render.text(self.graphs), self.elsewhere, str(self.floor))))

    __repr__ = __str__  # what a prompt shows

    def _repr_html_(self) -> str:
        return as_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from render.rich_parts(self.graphs)
        if self.elsewhere:
            yield Text(f"\n{self.elsewhere}")
        yield Text(f"\n{self.floor}")


def explain(fast: Callable, measure: bool = False) -> Explanation:
    """Graphs, breaks and why, recompiles and why, who runs what, what is not fused, and memory over time.

    With `measure` every program is run once more, on made-up inputs of the same types, to measure its memory.
    At the end stands the floor, the least time that the machine needs; after `tessera.profile(fast, …)` also the time
    it takes and the largest losses, by line.
    """
    state = state_of(fast)
    return explain_states([state], measure, state.floor if isinstance(state.floor, Floor) else None)


def explain_states(states: Iterable[Compiled], measure: bool = False, floor: Floor | None = None) -> Explanation:
    """One account of several jitted functions, and where they stand as measured, if they were."""
    states = list(states)
    graphs = [_report(record, measure) for state in states for record in _records(state)]
    compilations = [c for state in states for c in state.compilations()]
    told = dict.fromkeys(str(theirs) for state in states if (theirs := elsewhere(_model_of(state))) is not None)
    return Explanation(graphs, floor or predicted(p for c in compilations for p in c.account.programs), "\n".join(told))


def _model_of(state: Compiled) -> object:
    """What was jitted, or trained by a step."""
    return getattr(getattr(state.fn, "__self__", None), "model", state.fn)


def _records(state: Compiled) -> list[GraphRecord]:
    if isinstance(state.backend, Backend):
        return [*state.backend.graphs, *_beyond_limit(state.backend)]
    return [GraphRecord(c.name, "", c) for c in state.backend.compilations]


def _beyond_limit(backend: Backend) -> Iterator[GraphRecord]:
    """A record for each frame that Dynamo did not compile once more, because it had done so too often."""
    for compile_id, (limit, reason) in limits_hit(backend).items():
        eager = (
            f"calls that fit no program above: PyTorch compiles one function at most {limit} times; see why it is "
            "compiled again, or raise torch._dynamo.config.recompile_limit before tessera.jit"
        )
        yield backend.next_record(compile_id, eager_reason=eager, recompile_reason=reason)


def _report(g: GraphRecord, measure: bool) -> GraphReport:
    c, recompiled = g.compilation, g.recompile_reason
    first = c.account.stages[0][1] if c else g.failure.captured.trace if g.failure else None
    guard, change = changed(recompiled)
    return GraphReport(
        name=g.name,
        compile_id=g.compile_id,
        operators=g.nodes or (len(first.equations) if first else 0),
        location=_location(first) if first else "",
        called_at=_short(g.called_at),
        inputs=tuple(f"{v.name}: {v.type}" for v in first.inputs) if first else (),
        guards=guards(g.compile_id) if g.compile_id else (),
        break_reason=g.break_reason,
        break_line=_short(g.break_line),
        break_advice=for_break(g.break_reason) if g.break_reason else "",
        recompile_reason=recompiled,
        recompile_guard=plain(guard),
        recompile_change=change,
        recompile_advice=for_recompile(recompiled) if recompiled else "",
        eager_reason=g.eager_reason,
        executors=tuple(map(str, c.account.claims)) if c else (),
        regions=_regions(c) if c else (),
        equations={name: len(t.equations) for name, t in c.account.stages} if c else {},
        saved_bytes=c.account.saved_bytes if c else 0,
        saved=c.account.saved if c else (),
        offloaded=c.account.offloaded if c else {},
        offload_note=c.account.offload_note if c else "",
        seconds=c.seconds if c else 0.0,
        from_cache=c is not None and c.from_cache,
        unfused=_unfused(c) if c else (),
        memory=memory(c, measure) if c else (),
        fp8=tuple(c.account.fp8.told()) if c else (),
        mesh=sent(c.account) if c else (),
        repeats=g.repeats,
        blocks=tuple(f"{path}: {why}" for path, why in g.blocks.items()),
        cuda_graph=str(c.executable.cuda_graph) if c else "",
    )


def _short(line: str) -> str:
    file, _, number = line.rpartition(":")
    return f"{short_path(file)}:{number}" if file else line


def _location(trace: Trace) -> str:
    return next((line for eqn in trace.equations if (line := line_of(eqn))), "")


def line_of(eqn: Equation) -> str:
    return f"{short_path(eqn.source.file)}:{eqn.source.line}" if eqn.source.file else ""


def _makers(compilation: Compilation) -> dict[str, Equation]:
    """The equation behind each name, in the programs that were handed out to executors."""
    return {v.name: eqn for trace in compilation.account.to_claim for eqn in trace.equations for v in eqn.results()}


def _lines(names: Iterable[str], makers: dict[str, Equation]) -> tuple[str, ...]:
    lines = dict.fromkeys(line_of(makers[name]) for name in names if name in makers)
    return tuple(filter(None, lines))


def _regions(compilation: Compilation) -> tuple[RegionReport, ...]:
    makers = _makers(compilation)
    fusers = {e.name for e in compilation.account.fusers()}
    return tuple(
        RegionReport(c.executor, c.executor in fusers, c.operators, c.results, _lines(c.results, makers), c.why)
        for c in compilation.account.claims
    )


def _unfused(compilation: Compilation) -> tuple[UnfusedReport, ...]:
    makers = _makers(compilation)
    if not compilation.account.fusers():
        return _no_fuser(makers)
    return tuple(
        UnfusedReport(reason, tuple(names), _operators(names, makers), _lines(names, makers))
        for reason, names in compilation.account.unfused().items()
    )


def _no_fuser(makers: dict[str, Equation]) -> tuple[UnfusedReport, ...]:
    """Without a fusion executor nothing could be fused; say so, and by what it would be."""
    names = [n for n, eqn in makers.items() if isinstance(eqn.results()[0].type, TensorType)]
    if not names:
        return ()
    reason = 'no executor that fuses takes part; jit(..., executors=["sdpa", "tile", "aten"]) has one'
    return (UnfusedReport(reason, tuple(names), _operators(names, makers), _lines(names, makers)),)


def _operators(names: Iterable[str], makers: dict[str, Equation]) -> tuple[str, ...]:
    ops = [makers[name].op for name in names if name in makers]
    return tuple(dict.fromkeys(repr(op) if isinstance(op, Special) else f"{op.namespace}.{op_name(op)}" for op in ops))
