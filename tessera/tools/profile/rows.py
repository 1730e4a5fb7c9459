"""From measured steps to rows: every equation's time beside what it must move and compute."""

from __future__ import annotations

from collections import Counter
from statistics import median

from tessera.inspection.work import unaligned, work
from tessera.ir.equation import Equation, Special
from tessera.ir.types import TensorType
from tessera.machines import Machine
from tessera.pipeline.account import Program
from tessera.tools.profile.instrument import WHOLE
from tessera.tools.profile.measured import Row, Span
from tessera.tools.profile.sample import Ran, Step
from tessera.torch_internals.operators import op_name

Programs = list[tuple[str, Program]]


def rows_of(programs: Programs, steps: list[Step], machine: Machine) -> list[Row]:
    """A row for every equation that ran, longest first."""
    host, device = _by_equation(steps, "host"), _by_equation(steps, "kernels")
    rows = []
    for number, (graph, program) in enumerate(programs):
        for index, eqn in enumerate(program.trace.equations):
            ran = host.get((number, index), [])
            if ran:
                kernels = device.get((number, index), [])
                rows.append(_row(graph, program.name, index, eqn, ran, kernels, machine))
    return sorted(rows, key=lambda row: -row.seconds)


def _by_equation(steps: list[Step], kind: str) -> dict[tuple[int, int], list[list[Ran]]]:
    """What ran for each equation, step by step."""
    by_equation: dict[tuple[int, int], list[list[Ran]]] = {}
    for number, step in enumerate(steps):
        for ran in getattr(step, kind):
            if ran.equation is not None and ran.equation[1] != WHOLE:
                by_equation.setdefault(ran.equation, [[] for _ in steps])[number].append(ran)
    return by_equation


def _typical(steps: list[list[Ran]]) -> float:
    return median(sum(ran.seconds for ran in step) for step in steps)


def _row(
    graph: str,
    program: str,
    index: int,
    eqn: Equation,
    ran: list[list[Ran]],
    kernels: list[list[Ran]],
    machine: Machine,
) -> Row:
    host = _typical(ran)
    named = {kernel.name: [] for step in kernels for kernel in step}
    for name, steps in named.items():
        steps += [[kernel for kernel in step if kernel.name == name] for step in kernels]
    names = {name: _typical(steps) for name, steps in named.items()}
    seconds = sum(names.values()) if kernels or on_gpu(eqn) else host
    needs, calls = work(eqn), round(median(map(len, ran)))
    moving, computing = (calls * s for s in needs.seconds(machine))
    best = max(moving, computing)
    return Row(
        graph, program, index, tuple(v.name for v in eqn.results()), executor_of(eqn), operator_of(eqn),
        lines_of(eqn), eqn.source.module, eqn.source.note, calls, seconds, host, tuple(names.items()),
        calls * needs.bytes, calls * (needs.flops + needs.matrix_flops), best,
        "" if not best else "memory" if moving >= computing else "compute",
        best / seconds if best and seconds else None, unaligned(eqn),
    )  # fmt: skip


def on_gpu(eqn: Equation) -> bool:
    values = (*eqn.inputs(), *eqn.results())
    return any(isinstance(v.type, TensorType) and v.type.device.type == "cuda" for v in values)


def executor_of(eqn: Equation) -> str:
    """Who runs it: an executor's name."""
    return eqn.op.namespace if isinstance(eqn.op, Special) and eqn.op.namespace != "tessera" else "aten"


def operator_of(eqn: Equation) -> str:
    """Of a region, its operators, each once."""
    op = eqn.op
    if not isinstance(op, Special):
        return f"{op.namespace}.{op_name(op)}"
    if op.body is not None:
        inner = (operator_of(e).removeprefix("aten.") for e in op.body.equations)
        return " + ".join(dict.fromkeys(inner))
    return f"{op.of.namespace}.{op_name(op.of)}" if op.of is not None else repr(op)


def lines_of(eqn: Equation) -> tuple[tuple[str, int], ...]:
    """The user's lines behind an equation, the most mentioned first."""
    inner = eqn.op.body.equations if isinstance(eqn.op, Special) and eqn.op.body is not None else (eqn,)
    count = Counter((e.source.file, e.source.line) for e in inner if e.source.file)
    return tuple(place for place, _ in count.most_common())


def spans_of(programs: Programs, step: Step, rows: list[Row]) -> list[Span]:
    """One step as spans on tracks."""
    numbers = {(row.graph, row.program, row.index): i for i, row in enumerate(rows)}
    spans = [Span("step", "step", 0.0, step.seconds)]
    for ran in sorted(step.host, key=lambda r: r.start):
        assert ran.equation is not None
        graph, program = programs[ran.equation[0]]
        if ran.equation[1] == WHOLE:
            spans.append(Span(f"{graph} {program.name}", "program", ran.start, ran.seconds))
            continue
        row = numbers[graph, program.name, ran.equation[1]]
        spans.append(Span(rows[row].operator, "host", ran.start, ran.seconds, row))
    for ran in sorted(step.kernels, key=lambda r: (r.stream, r.start)):
        row = None
        if ran.equation is not None:
            graph, program = programs[ran.equation[0]]
            row = numbers.get((graph, program.name, ran.equation[1]))
        spans.append(Span(ran.name, ran.stream, ran.start, ran.seconds, row))
    return spans
