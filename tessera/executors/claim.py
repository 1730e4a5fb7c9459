"""Hands out the equations of a trace to executors.

In: a trace and executors in priority order. Out: a trace of calls and a report of who runs what. An operator
executor's claim replaces an equation's operator by its own callable; a fusion executor's replaces a region by
one equation whose `op.body` still shows it. Names, order of effects and types stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tessera.executors.base import Executor, FusionExecutor, OperatorExecutor, Region, in_order
from tessera.executors.regions import body_of, contract, small_views, with_views
from tessera.ir.alias import FUNCTIONAL
from tessera.ir.equation import Equation, Recipe, Special
from tessera.ir.kernel import bound
from tessera.ir.printer import identifier
from tessera.ir.schema import has_effect
from tessera.ir.trace import Trace
from tessera.passes.clean.dce import dce
from tessera.torch_internals.operators import op_name


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
            trace = claim_operators(trace, executor, report)
    reported = {name for entry in report for name in entry.results}
    rest = [
        eqn
        for eqn in trace.equations
        if not isinstance(eqn.op, Special) or (eqn.op.namespace == "tessera" and not _reported(eqn, reported))
    ]
    if rest:
        report.append(_entry("aten", rest))
    return trace, report


def _reported(eqn: Equation, names: set[str]) -> bool:
    return eqn.op is FUNCTIONAL and all(v.name in names for v in eqn.results())


def claim_operators(trace: Trace, executor: OperatorExecutor, report: list[Claim]) -> Trace:
    specials: dict[tuple, Special] = {}
    equations = list(trace.equations)
    taken: dict[str, list[Equation]] = {}
    for index, eqn in enumerate(equations):
        if eqn.op is FUNCTIONAL and executor.finish:  # it finds the operator once that writes in place
            inner = eqn.with_(op=eqn.args[0], args=eqn.args[1:])
            if executor.claims(inner) is not None:
                taken.setdefault(executor.why(inner) if executor.why else "", []).append(inner)
        if isinstance(eqn.op, Special):
            continue
        fn = executor.claims(eqn)
        if fn is None:
            continue
        key = (eqn.op, fn)
        if key not in specials:
            specials[key] = Special(op_name(eqn.op), fn, executor.name, not has_effect(eqn), of=eqn.op)
        equations[index] = eqn.with_(op=specials[key])
        taken.setdefault(executor.why(eqn) if executor.why else "", []).append(eqn)
    report += [_entry(executor.name, eqns, why) for why, eqns in taken.items()]
    return trace.with_(equations=tuple(equations)) if taken else trace


def _claim_regions(trace: Trace, executor: FusionExecutor, report: list[Claim]) -> Trace:
    regions = executor.regions(trace)
    claimed = _claim_together(trace, executor, regions, report)
    done = {i for region, _ in claimed for i in region}
    views = small_views(trace, [*regions, *(region for region, _ in claimed)])
    for number, region in enumerate(regions):
        if region[0] in done:
            continue
        body = body_of(trace, region, f"{executor.name}_{number}")
        whole = with_views(body, views)
        fn: Callable | None = executor.compile(whole)
        if fn is None and whole is not body:
            whole, fn = body, executor.compile(body)
        if fn is None:
            continue
        claimed.append((region, _region(f"region_{number}", fn, executor, Recipe(whole))))
        report.append(_entry(executor.name, [trace.equations[i] for i in region]))
    return dce(contract(trace, claimed)) if claimed else trace


def _region(name: str, fn: Callable, executor: FusionExecutor, recipe: Recipe) -> Special:
    run, kernel = bound(fn)
    return Special(identifier(name), run, executor.name, body=recipe.body, recipe=recipe, kernel=kernel)


def _claim_together(
    trace: Trace, executor: FusionExecutor, regions: list[Region], report: list[Claim]
) -> list[tuple[Region, Special]]:
    """Sets of regions that one callable runs at once."""
    claimed: list[tuple[Region, Special]] = []
    if executor.together is None or executor.compile_together is None:
        return claimed
    for number, chosen in enumerate(executor.together(trace, regions)):
        whole = sorted(i for region in chosen for i in region)
        bodies = [body_of(trace, region, f"{executor.name}_set_{number}") for region in chosen]
        body = body_of(trace, whole, f"{executor.name}_set_{number}")
        fn = executor.compile_together(body, bodies)
        if fn is None:
            continue
        claimed.append((whole, _region(f"regions_{number}", fn, executor, Recipe(body, tuple(bodies)))))
        why = f"{len(chosen)} regions in one launch"
        report.append(_entry(executor.name, [trace.equations[i] for i in whole], why))
    return claimed


def _entry(name: str, equations: list[Equation], why: str = "") -> Claim:
    results = tuple(v.name for eqn in equations for v in eqn.results())
    return Claim(name, results, tuple(_operator(eqn) for eqn in equations), why)


def _operator(eqn: Equation) -> str:
    return repr(eqn.op) if isinstance(eqn.op, Special) else f"{eqn.op.namespace}.{op_name(eqn.op)}"
