"""`reproduce`: a failure as a small script that shows it to anyone.

In: what `tessera.jit` gave, the error it raised, or a report of `tessera.check`. Out: a Python file with the failing
program as it was captured, made small, and its inputs as shapes, dtypes, strides and seeds: no data of the user's. It
exits with 1 while the failure is there, and with 0 once it is gone.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence

import torch

from tessera.executors.base import in_order
from tessera.executors.default import WITH_KERNELS
from tessera.inspection.case import Case, of_compilation, of_failure
from tessera.inspection.check import CheckReport, check
from tessera.inspection.examples import example, number_hint
from tessera.inspection.minimise import Told
from tessera.inspection.minimise import minimise as make_small
from tessera.ir.equation import Value
from tessera.ir.printer import HEADER, identifier, print_trace
from tessera.ir.types import ScalarType, TensorType, size_hint
from tessera.just_in_time.api import jit
from tessera.just_in_time.backend import Backend
from tessera.just_in_time.compiled import Compiled, compiled_state
from tessera.ops.op import registry
from tessera.pipeline.compilation import Failure
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.transforms.fp8_recipe import FP8 as FP8  # for the scripts
from tessera.util.config import override
from tessera.util.errors import InputError

OWN = (*WITH_KERNELS, "inductor")  # executors that every process has

__all__ = ["case_of", "example", "reproduce", "show", "write"]


def reproduce(
    what: Callable | BaseException | CheckReport,
    path: str = "repro.py",
    *,
    minimise: bool = True,
    seconds: float = 120.0,
    told: Told | None = None,
) -> str:
    """Write a script that shows the failure of a jitted function, of an error it raised, or of a check; gives its path.

    With `minimise` the program is made as small as it can be within `seconds` while it fails in the same way.
    """
    case = case_of(what)
    outcome = case.outcome()
    if outcome and minimise:
        case = make_small(case, seconds, told)
    write(case, path, outcome)
    return path


def case_of(what: object) -> Case:
    """The failing program behind something; of a function that shows no failure, its last graph."""
    if isinstance(what, BaseException):
        failure = _carried(what)
        if failure is None:
            raise InputError(f"expected an error of a compilation, got {type(what).__name__}, which carries no program")
        return of_failure(failure)
    if isinstance(what, CheckReport):
        names = {f.graph for f in what.faults}
        bad = [g for g in what.graphs if g.compilation.name in names] or what.graphs
        if not bad:
            raise InputError("expected a check of something that was compiled; its graphs run eagerly")
        return of_compilation(bad[0].compilation, bad[0].inputs)
    state = compiled_state(what)
    if state is None:
        raise InputError(f"expected what tessera.jit gave, an error or a check's report, got {type(what).__name__}")
    return _of_state(state)


def _of_state(state: Compiled) -> Case:
    if isinstance(state.backend, Backend):
        for record in state.backend.graphs:
            if record.failure is not None:
                return of_failure(record.failure)
    compilations = [c for c in state.compilations() if c.captured is not None]
    if not compilations:
        raise InputError(_why_nothing(state))
    cases = [of_compilation(c) for c in compilations]
    return next((case for case in cases if case.outcome()), cases[-1])


def _why_nothing(state: Compiled) -> str:
    records = state.backend.graphs if isinstance(state.backend, Backend) else []
    for record in records:
        if record.eager_reason:
            return f"{record.name} was not captured ({record.eager_reason}); there is no program to write down"
    return "nothing is compiled, and nothing failed; call the function first"


def _carried(error: BaseException | None) -> Failure | None:
    """The failure that an error, or one it was raised from, carries."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        failure = getattr(current, "tessera_failure", None)
        if isinstance(failure, Failure):
            return failure
        pending += [current.__cause__, current.__context__, getattr(current, "inner_exception", None)]
    return None


# --- the script ---


def write(case: Case, path: str, outcome: str) -> None:
    trace = case.trace
    name = identifier(trace.name)
    text = SCRIPT.format(
        outcome={"wrong": "a wrong result", "": "no failure on made-up inputs"}.get(outcome, outcome),
        torch=torch.__version__,
        header=HEADER,
        needs="".join(
            [f"# It calls {op}, which {where} registers: import that first.\n" for op, where in _foreign(case)]
            + [
                f"# It needs the executor {e.name!r}, which is not Tessera's own: register it first.\n"
                for e in in_order(case.options.executors)
                if e.name not in OWN
            ]
        ),
        program=print_trace(trace),
        inputs="".join(f"        {_input(v, case, i)},\n" for i, v in enumerate(trace.inputs)),
        name=name,
        grads=[v.name in case.wants_grad for v in trace.inputs],
        options=_options(case),
        names="example, show" if case.options.precision is None else "FP8, example, show",
    )
    try:
        compile(text, path, "exec")
    except SyntaxError as error:
        raise InputError(f"the program holds an object that has no text of its own: {error.text}") from error
    with open(path, "w") as file:
        file.write(text)


SCRIPT = """# Shows a failure of Tessera ({outcome}), found with torch {torch}.
# Exits with 1 while it is there.
{needs}import sys

{header}
from tessera.inspection.reproduce import {names}


{program}

def inputs():
    return [
{inputs}    ]


if __name__ == "__main__":
    sys.exit(show({name}, inputs(), requires_grad={grads}, {options}))
"""


def _options(case: Case) -> str:
    chosen = case.options
    parts = [f"executors={list(map(str, chosen.executors))}", f"recompute={chosen.recompute!r}"]
    if chosen.memory_budget is not None:
        parts.append(f"memory_budget={chosen.memory_budget}")
    if chosen.offload != "none":
        parts.append(f"offload={chosen.offload!r}")
    if chosen.precision is not None:
        parts.append(f"precision={chosen.precision!r}")
    return ", ".join(parts)


def _input(v: Value, case: Case, seed: int) -> str:
    match v.type:
        case TensorType() as t:
            shape, stride = (tuple(size_hint(n) for n in sizes) for sizes in (t.shape, t.stride))
            between = case.ranges.get(v.name)
            known = "" if between is None else f", between={between}"
            return f"example({shape}, {stride}, {t.dtype}, {str(t.device)!r}, seed={seed}{known})"
        case ScalarType():
            return repr(number_hint(v, case.trace))
    raise InputError(f"input {v.name} is a {v.type}, which a script cannot make")


def _foreign(case: Case) -> list[tuple[str, str]]:
    """Operators that are neither PyTorch's nor ours, and where they were declared."""
    operators = {}
    for eqn in case.trace.equations:
        if isinstance(eqn.op, OpOverload) and eqn.op.namespace not in ("aten", "prims", "tessera"):
            name = f"{eqn.op.namespace}.{op_name(eqn.op)}"
            operators[name] = registry()[name].where if name in registry() else "another library"
    return list(operators.items())


def show(fn: Callable, inputs: Sequence[object], requires_grad: Sequence[bool], **options: object) -> int:
    """Compile the program, run it and compare it with PyTorch; 1 where something is wrong."""
    args = [x.requires_grad_() if wanted else x for x, wanted in zip(inputs, requires_grad, strict=True)]  # type: ignore[attr-defined]
    with torch.set_grad_enabled(any(requires_grad)), override(program_cache=False):
        try:
            report = check(jit(fn, frontend="functional", strict=True, **options), *args)  # type: ignore[arg-type]
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return 1
    print(report)
    return 0 if report.ok else 1
