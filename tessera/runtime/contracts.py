"""Compares what kernels really give with what a trace says of it, while a program runs.

In: a trace that is about to become Python. Out: `around` and the names it needs, for `printer.compile_trace`; and a
check of the program's inputs. Shape, dtype, device, strides, the offset of new memory, where a view begins, and what
shares memory must be as the types, `ir/starts.py` and `passes/memory/alias.py` say: kernels of ours are compiled for
these strides, and passes write over what is said to be nobody else's. A difference raises a `ContractError`. Nothing of
this is there unless `config.verify` is on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tessera.ir.equation import Equation, Special, Value, symbols_in
from tessera.ir.interp import number
from tessera.ir.layouts import may_be_random_state, unpromised
from tessera.ir.printer import print_line
from tessera.ir.starts import starts
from tessera.ir.trace import Trace
from tessera.ir.types import SYMBOLIC, TensorType, size_key
from tessera.passes.memory.alias import Roots, always_view, roots
from tessera.runtime.plan import positions_read
from tessera.torch_internals.operators import OpOverload, op_name
from tessera.util.errors import ContractError

NAME = "_tessera_contract"
Symbols = dict[str, object]


def contracts(trace: Trace) -> tuple[Callable[[int, str], list[str]], dict[str, object]]:
    """What stands around every equation, and the names that it mentions."""
    shared, known = roots(trace), _bound_by_inputs(trace)
    scope: dict[str, object] = {}
    calls: dict[int, str] = {}
    for index, eqn in enumerate(trace.equations):
        check = _Contract(trace, eqn, shared)
        symbols = ", ".join(f"{s!r}: {s}" for s in sorted(_needed(eqn.results()) & known))
        known.update(s for s, (v, _) in trace.symbols.items() if v in eqn.results())
        if check.results:
            scope[f"{NAME}_{index}"] = check
            results, read = (_tuple([v.name for v in values]) for values in (check.results, check.read))
            calls[index] = f"{NAME}_{index}({results}, {read}, {{{symbols}}})"

    def around(index: int, line: str) -> list[str]:
        return [line, calls[index]] if index in calls else [line]

    return around, scope


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _needed(values: Sequence[Value]) -> set[str]:
    types = [v.type for v in values if isinstance(v.type, TensorType)]
    return symbols_in([(t.shape, t.stride, t.offset) for t in types])


def _bound_by_inputs(trace: Trace) -> set[str]:
    return {symbol for symbol, (v, _) in trace.symbols.items() if v in trace.inputs}


def checked_inputs(trace: Trace, run: Callable, boxed: bool) -> Callable:
    """The program behind a check of what it reads. Of an input that nothing reads a stand-in may be given."""
    reads = positions_read(trace)
    wanted = [(place, v) for place, v in enumerate(trace.inputs) if place in reads and isinstance(v.type, TensorType)]
    bound = [(s, trace.inputs.index(v), dim) for s, (v, dim) in trace.symbols.items() if v in trace.inputs]

    def checked(*args: object) -> object:
        given: Sequence = args[0] if boxed else args  # type: ignore[assignment]
        there = [(s, given[i], dim) for s, i, dim in bound if given[i] is not None]
        symbols = {s: x if dim is None else x.shape[dim] for s, x, dim in there}
        for place, v in wanted:
            if difference := _difference(v.tensor, given[place], symbols, strides=True):
                raise ContractError(f"{trace.name}: the input {v.name} is said to be {difference}")
        return run(*args)

    checked.source = run.source  # type: ignore[attr-defined]
    return checked


class _Contract:
    """What one equation promises; called with its results, the tensors it read and the sizes that are known."""

    def __init__(self, trace: Trace, eqn: Equation, shared: Roots) -> None:
        self.trace, self.eqn = trace, eqn
        self.results = [v for v in eqn.results() if isinstance(v.type, TensorType)]
        self.read = list(dict.fromkeys(v for v in eqn.inputs() if isinstance(v.type, TensorType)))
        self.fresh = [shared[v] == {v} for v in self.results]
        self.view = isinstance(eqn.op, OpOverload) and always_view(eqn.op) and bool(self.read)
        self.begins = starts(eqn) or [None] * len(self.results)  # behind the start of what they are views of
        self.strides = not unpromised(eqn)
        # A scatter, and a user's kernel, copy all of the memory that their argument is a part of; a region's result may
        # be a view of another.
        self.anywhere = isinstance(eqn.op, Special) or op_name(eqn.op).endswith("_scatter")

    def __call__(self, results: tuple, read: tuple, symbols: Symbols) -> None:
        for v, fresh, begin, got in zip(self.results, self.fresh, self.begins, results, strict=True):
            if got is None:
                self.fail(v, f"{v.type}, got nothing")
            if difference := _difference(v.tensor, got, symbols, self.strides):
                self.fail(v, difference)
            if got.layout is not torch.strided or not got.numel():
                continue
            if sharing := self.wrongly_shared(fresh, got, read):
                self.fail(v, sharing)
            if fresh and got.storage_offset() and not self.anywhere:
                self.fail(v, f"the beginning of new memory, got what begins {got.storage_offset()} elements after it")
            if begin is not None and (after := got.storage_offset() - read[0].storage_offset()) != begin:
                self.fail(v, f"{begin} elements after the start of {self.read[0].name}, got {after}")

    def wrongly_shared(self, fresh: bool, got: Tensor, read: tuple) -> str:
        same = [v.name for v, t in zip(self.read, read, strict=True) if _same_memory(t, got)]
        if fresh and same:
            return f"new memory, got that of {same[0]}"
        if self.view and not same:
            return f"a view of {self.read[0].name}, got new memory"
        return ""

    def fail(self, v: Value, difference: str) -> None:
        line = print_line(self.trace, self.eqn).strip()
        where = f" (from {self.eqn.source})" if str(self.eqn.source) else ""
        raise ContractError(f"{self.trace.name}: {v.name} is said to be {difference}{where}\n    {line}")


def _same_memory(a: object, b: Tensor) -> bool:
    if not isinstance(a, Tensor) or a.layout is not torch.strided:
        return False
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _difference(wanted: TensorType, got: object, symbols: Symbols, strides: bool) -> str:
    """`f32[2, 3], got f32[3, 2]`, or nothing. Sizes that nobody knows yet are not compared."""
    if not isinstance(got, Tensor):
        return f"{wanted}, got {type(got).__name__}"
    for what, a, b in (("", wanted.dtype, got.dtype), ("laid out as ", wanted.layout, got.layout)):
        if a != b:
            return f"{what}{a}, got {b}"
    mine, theirs = wanted.device, got.device
    if not may_be_random_state(got) and (
        mine.type != theirs.type or (mine.index is not None and mine.index != theirs.index)
    ):
        return f"on {mine}, got {theirs}"
    shape = [_number(s, symbols) for s in wanted.shape]
    if len(shape) != got.ndim or any(a is not None and a != b for a, b in zip(shape, got.shape, strict=True)):
        return f"{list(map(size_key, wanted.shape))}, got {list(got.shape)}"
    if got.layout is not torch.strided or not got.numel():
        return ""
    if wanted.bits != (got.is_conj(), got.is_neg()):
        return f"lazily conjugate, negative {wanted.bits}, got {(got.is_conj(), got.is_neg())}"
    if strides:
        steps = [_number(s, symbols) for s in wanted.stride]
        for a, b, size in zip(steps, got.stride(), got.shape, strict=True):
            if size > 1 and a is not None and a != b:
                return f"of strides {steps}, got {list(got.stride())} (of the shape {list(got.shape)})"
    return ""


def _number(size: object, symbols: Symbols) -> int | None:
    """The size, if what it mentions is known."""
    if not isinstance(size, SYMBOLIC):
        return size  # type: ignore[return-value]
    if any(str(s) not in symbols for s in size.node.expr.free_symbols):
        return None
    return number(size, symbols)  # type: ignore[return-value]
