"""Where two runs of artifacts first differ.

In: functions of artifacts, and what they are called with. Out: one line: the first equation whose results differ, and
the user's line that it stands for. Two programs are walked side by side as long as they do the same; one with kernels
is walked alone, and each kernel is compared with the operators that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.artifact.loaded import Entry, Loaded, load
from tessera.exporters.onnx.compare import compare
from tessera.inspection.step import plain, step
from tessera.ir import interp
from tessera.ir.equation import Equation, Special

Step = tuple[Equation, list[object]]
Call = tuple[Entry, tuple, dict]  # a function, and what it is called with


def portable(path: str) -> Loaded:
    """A file whose programs are run operator by operator."""
    return load(path, trust=False, compile=False)


def of_programs(mine: Call, theirs: Call, seed: int) -> str:
    """Two functions of portable files."""
    ours, others = _steps(*mine, seed), _steps(*theirs, seed)
    for (eqn, results), (other, expected) in zip(ours, others, strict=False):
        if str(eqn.op) != str(other.op):
            return f"{_told(eqn)}: the other program has {_told(other)} there; up to it all results agree"
        if problem := _problem(eqn, results, expected):
            return f"{_told(eqn)}: {problem}"
    if len(ours) != len(others):
        return f"no operator: the programs have {len(ours)} and {len(others)}, and all that both have agree"
    return "no operator by itself: the two programs agree, what was compiled of them does not"


def of_kernels(entry: Entry, args: tuple, kwargs: dict, seed: int) -> str:
    """The first kernel that gives something else than its operators do, of the same operands."""
    wrong: list[str] = []

    def beside(eqn: Equation, operands: tuple, keywords: dict) -> object:
        recipe = eqn.op.recipe if isinstance(eqn.op, Special) else None
        if recipe is None or wrong:
            return plain(eqn, operands, keywords)
        expected = interp.run(recipe.body, *map(_copy, operands))
        given = plain(eqn, operands, keywords)
        over = dict(recipe.over)
        rest = iter(given if isinstance(given, (tuple, list)) else (given,))
        got = [operands[over[k]].view_as(x) if k in over else next(rest) for k, x in enumerate(expected)]
        if problem := _problem(eqn, got, expected):
            wrong.append(f"{_told(eqn)}: {problem}")
        return given

    _run(entry, args, kwargs, seed, call=beside)
    return wrong[0] if wrong else "no kernel by itself: each agrees with the operators that it stands for"


def _steps(entry: Entry, args: tuple, kwargs: dict, seed: int) -> list[Step]:
    """Every equation, and copies of what it gave: later writes do not reach them."""
    done: list[Step] = []
    _run(entry, args, kwargs, seed, after=lambda eqn, results: done.append((eqn, [_copy(x) for x in results])))
    return done


def _run(entry: Entry, args: tuple, kwargs: dict, seed: int, **how: object) -> None:
    flat = [*entry.held, *entry.arguments.flat(args, kwargs)]
    torch.manual_seed(seed)
    with torch.no_grad():
        step(entry.program.trace, [_copy(x) for x in flat], **how)  # type: ignore[arg-type]


def _copy(x: object) -> object:
    return x.clone() if isinstance(x, torch.Tensor) else x


def _problem(eqn: Equation, got: Sequence[object], expected: Sequence[object]) -> str:
    """What is wrong with the first result that is; empty where all agree."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if problem := compare(str(eqn.op), x, y).problem:
                return problem if len(got) == 1 else f"result {i}: {problem}"
        elif x != y:
            return f"expected {y!r}, got {x!r}"
    return ""


def _told(eqn: Equation) -> str:
    names = ", ".join(v.name for v in eqn.results())
    where = " ".join(filter(None, (str(eqn.source), *([names] if names else ()))))
    return f"{eqn.op} ({where})" if where else str(eqn.op)
