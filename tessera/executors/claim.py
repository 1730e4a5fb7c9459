"""Hands out the equations of a trace to executors.

In: a trace and executors in priority order. Out: a trace of calls and a report of who runs what. An operator
executor's claim replaces an equation's operator by its own callable; a fusion executor's replaces a region by
one equation whose `op.body` still shows it. Names, order of effects and types stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tessera.executors.base import Executor, FusionExecutor, OperatorExecutor, Region, in_order
from tessera.executors.regions import body_of, contract
from tessera.ir.equation import Equation, Special
from tessera.ir.printer import identifier
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace


@dataclass(frozen=True)
class Claim:
    """What one executor took: the results it computes, and a word on why or how."""

    executor: str
    results: tuple[str, ...]  # names of the values computed
    operators: tuple[str, ...]
    why: str = ""

    def __str__(self) -> str:
        shown = ", ".join(dict.fromkeys(self.operators))
        return f"{self.executor:<10} {len(self.operators):>4}  {shown}" + (f"  ({self.why})" if self.why else "")


def claim(trace: Trace, executors: Iterable[str | Executor] = ("aten",)) -> tuple[Trace, list[Claim]]:
    """Every equation goes to the first executor that claims it; the rest is left to ATen."""
    report: list[Claim] = []
    for executor in in_order(executors):
        if isinstance(executor, FusionExecutor):
            trace = _claim_regions(trace, executor, report)
        else:
            trace = _claim_operators(trace, executor, report)
    rest = [eqn for eqn in trace.equations if not isinstance(eqn.op, Special) or eqn.op.namespace == "tessera"]
    if rest:
        report.append(_entry("aten", rest))
    return trace, report


def _claim_operators(trace: Trace, executor: OperatorExecutor, report: list[Claim]) -> Trace:
    specials: dict[tuple, Special] = {}
    equations = list(trace.equations)
    taken: dict[str, list[Equation]] = {}
    for index, eqn in enumerate(equations):
        if isinstance(eqn.op, Special):
            continue
        fn = executor.claims(eqn)
        if fn is None:
            continue
        key = (eqn.op, fn)
        if key not in specials:
            specials[key] = Special(eqn.op._opname, fn, executor.name, not has_effect(eqn), of=eqn.op)
        equations[index] = eqn.with_(op=specials[key])
        taken.setdefault(executor.why(eqn) if executor.why else "", []).append(eqn)
    report += [_entry(executor.name, eqns, why) for why, eqns in taken.items()]
    return trace.with_(equations=tuple(equations)) if taken else trace


def _claim_regions(trace: Trace, executor: FusionExecutor, report: list[Claim]) -> Trace:
    regions = executor.regions(trace)
    bodies = [body_of(trace, region, f"{executor.name}_{number}") for number, region in enumerate(regions)]
    made, done = _claim_together(trace, executor, regions, bodies, report)
    for number, (region, body) in enumerate(zip(regions, bodies, strict=True)):
        fn: Callable | None = None if number in done else executor.compile(body)
        if fn is None:
            continue
        made.append((region, Special(identifier(f"region_{number}"), fn, executor.name, body=body)))
        report.append(_entry(executor.name, [trace.equations[i] for i in region]))
    return contract(trace, made) if made else trace


def _claim_together(
    trace: Trace, executor: FusionExecutor, regions: list[Region], bodies: list[Trace], report: list[Claim]
) -> tuple[list[tuple[Region, Special]], set[int]]:
    """Regions that one callable runs at once, and the numbers of those it takes."""
    made: list[tuple[Region, Special]] = []
    done: set[int] = set()
    if executor.together is None or executor.compile_together is None:
        return made, done
    for chosen in executor.together(trace, regions, bodies):
        region = sorted(i for number in chosen for i in regions[number])
        body = body_of(trace, region, f"{executor.name}_{chosen[0]}")
        fn = executor.compile_together(body, [bodies[number] for number in chosen])
        if fn is None:
            continue
        made.append((region, Special(identifier(f"regions_{chosen[0]}"), fn, executor.name, body=body)))
        why = f"{len(chosen)} regions in one launch"
        report.append(_entry(executor.name, [trace.equations[i] for i in region], why))
        done.update(chosen)
    return made, done


def _entry(name: str, equations: list[Equation], why: str = "") -> Claim:
    results = tuple(v.name for eqn in equations for v in eqn.results())
    return Claim(name, results, tuple(_operator(eqn) for eqn in equations), why)


def _operator(eqn: Equation) -> str:
    return repr(eqn.op) if isinstance(eqn.op, Special) else f"{eqn.op.namespace}.{eqn.op._opname}"
