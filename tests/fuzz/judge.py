"""Runs a program by eager PyTorch and by Tessera, and says what becomes of it.

What differs is `wrong`, unless a row of `lawful.py` names it as something else. `invalid` is a program that cannot be
run, or that eager has no kernel for.
"""

from __future__ import annotations

from dataclasses import dataclass

from .lawful import LAWFUL, Case
from .runs import compared, run
from .ways import EAGERLY, ours


@dataclass(frozen=True)
class Verdict:
    outcome: str  # same · wrong · invalid, or what a row of LAWFUL calls it
    reason: str = ""
    raised: bool = False  # eager refuses the program
    graphs: int = 0  # compiled
    eager: int = 0  # graphs that ran eagerly


def judge(text: str, kind: str) -> Verdict:
    eager = run(text, EAGERLY)
    if isinstance(eager.error, NameError | SyntaxError | UnboundLocalError):
        return Verdict("invalid", repr(eager.error))
    made: list = []
    compiled = run(text, ours(kind, made))
    if _lacks_kernel(eager.error) and compiled.error is None:
        return Verdict("invalid", "eager lacks a kernel, or the real part of a gradient")
    graphs, given_up = counted(made)
    reason = compared(eager, compiled, text, kind)
    outcome = "same"
    if reason:
        case = Case(text, kind, eager, compiled, reason)
        outcome = next((name for name, holds in LAWFUL if holds(case)), "wrong")
    return Verdict(outcome, reason, eager.error is not None, graphs, given_up)


def _lacks_kernel(error: BaseException | None) -> bool:
    """For what nobody reads, or for the gradient by a real number that is written among complex ones."""
    words = ("not implemented for complex tensors", "Expected isFloatingType(grad.scalar_type())")
    return isinstance(error, NotImplementedError) or any(w in str(error) for w in words)


def counted(made: list) -> tuple[int, int]:
    """Graphs that were compiled, and those that run eagerly."""
    compiled = given_up = 0
    for fn in made:
        state = fn.__tessera__
        compiled += len(state.compilations())
        given_up += sum(bool(g.eager_reason) and g.nodes > 0 for g in getattr(state.backend, "graphs", ()))
    return compiled, given_up
