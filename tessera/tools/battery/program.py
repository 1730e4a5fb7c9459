"""One program, eager and compiled, on copies of the same arguments: results, gradients and what was written.

In: a function and its arguments; those tensors that require grad are differentiated. Out: nothing, or `Wrong` (a
difference), `Skip` (eager refuses) or the error of the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import tessera
from tessera.tools.battery.case import Skip, Wrong
from tessera.tools.battery.compare import check, close, same_strides, tensors
from tessera.tools.battery.copies import copied
from tessera.util.errors import CaptureError

SEED = 7
Arguments = tuple[tuple, dict]


@dataclass(frozen=True)
class Program:
    """A function of tensors, and how to try it."""

    fn: Callable
    args: tuple
    kwargs: dict = field(default_factory=dict)
    backward: bool = False
    cotangent: Callable[[Tensor], Tensor] = lambda t: t  # lays a cotangent out
    roots: Callable[[object], object] = lambda out: out  # what of the result is differentiated
    unwritten: Callable[[Tensor], bool] = lambda _: False  # of a result: it holds whatever the memory held
    strides: bool = True  # results must be laid out as eager's
    calls: int = 1  # how often the compiled one is called
    options: dict = field(default_factory=dict)  # of tessera.jit


@dataclass(frozen=True)
class Ran:
    """What one run gave."""

    results: object
    gradients: list[Tensor | None]
    written: list[Tensor]


def run(program: Program, fn: Callable, given: Arguments, seed: int = SEED) -> Ran:
    torch.manual_seed(seed)
    args, kwargs = given
    out = fn(*args, **kwargs)
    inputs = tensors(given)
    gradients: list[Tensor | None] = []
    if program.backward:
        roots = [t for t in tensors(program.roots(out)) if t.requires_grad]
        wanted = [t for t in inputs if t.requires_grad and t.is_leaf]
        if not roots:
            raise NoGradient("nothing in the result requires grad")
        cotangents = [program.cotangent(_drawn(t, place)) for place, t in enumerate(roots)]
        gradients = list(torch.autograd.grad(roots, wanted, cotangents, allow_unused=True))
    return Ran(out, gradients, [t.detach() for t in inputs])


class NoGradient(Exception):
    """There is nothing to differentiate."""


def _drawn(like: Tensor, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + place)
    dtype = torch.complex64 if like.is_complex() else torch.float32
    return torch.randn(like.shape, generator=generator, dtype=dtype).to(like.device, like.dtype)


def check_program(program: Program) -> None:
    """Compile it, run it, and compare it with eager."""
    given: Arguments = (program.args, program.kwargs)
    try:
        want = run(program, program.fn, copied(given))  # type: ignore[arg-type]
        again = run(program, program.fn, copied(given), SEED + 70)  # type: ignore[arg-type]
    except Exception as error:
        raise Skip(f"eager: {type(error).__name__}: {error}") from error
    values = same_twice(want, again, program.unwritten)
    fast = tessera.jit(program.fn, strict=True, **program.options)
    for _ in range(program.calls):
        try:
            got = run(program, fast, copied(given))  # type: ignore[arg-type]
        except NoGradient:
            raise Wrong("no result requires grad, eager's do") from None
        except Exception as error:
            if not isinstance(getattr(error, "inner_exception", error), CaptureError):
                raise
            raise Skip(f"runs eagerly: {error}") from error  # what is said to be no program of ours
        compare(program, got, want, given, values)


def compare(program: Program, got: Ran, want: Ran, given: Arguments, values: bool) -> None:
    finer: list[Ran] = []

    def exact(part: str) -> Callable[[], Sequence[object]]:
        def compute() -> Sequence[object]:
            if not finer:
                finer.append(run(program, program.fn, copied(given, torch.float64)))  # type: ignore[arg-type]
            return tensors(getattr(finer[0], part))

        return compute

    check("result", got.results, want.results, exact("results"), values, program.unwritten)
    if program.strides:
        same_strides("result", got.results, want.results)
    for place, (a, b) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        if (a is None) != (b is None):
            raise Wrong(f"gradient[{place}]: expected {_said(b)}, got {_said(a)}")
    check("gradient", got.gradients, want.gradients, exact("gradients"), values)
    check("argument afterwards", got.written, want.written, exact("written"), values)


def _said(gradient: Tensor | None) -> str:
    return "None" if gradient is None else "a tensor"


def same_twice(a: Ran, b: Ran, unwritten: Callable[[Tensor], bool]) -> bool:
    """Does eager give the same whatever the seed is? Otherwise only the form of a result can be compared."""
    mine, theirs = ([*tensors(r.results), *tensors(r.gradients)] for r in (a, b))
    return len(mine) == len(theirs) and all(
        x.shape == y.shape and (unwritten(x) or close(x, y)) for x, y in zip(mine, theirs, strict=True)
    )
