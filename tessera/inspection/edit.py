"""A user's edited program in place of a stage: checked that it still fits, then compiled on from there."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from types import FunctionType

import torch

from tessera.frontends.captured import numbers_as_values
from tessera.inspection.programs import state_of, why_none
from tessera.ir import fake
from tessera.ir.aliased import Aliased
from tessera.ir.builder import Builder
from tessera.ir.equation import Value, map_values
from tessera.ir.mode import mode_of
from tessera.ir.printer import identifier
from tessera.ir.record import record
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType
from tessera.just_in_time.compiled import Compiled
from tessera.ops.op import keep_whole
from tessera.pipeline.compilation import Compilation
from tessera.pipeline.lists import editable
from tessera.torch_internals.fake import DataDependentOutputException
from tessera.torch_internals.shapes import GuardOnDataDependentSymNode
from tessera.util.errors import CaptureError, EditError, InputError

_TITLE = re.compile(r"^# tessera stage '([^']+)' of graph '([^']+)'", re.M)


def edit(fast: Callable, path: str, stage: str | None = None, graph: str | None = None) -> None:
    """Run the user's edited program in place of a stage, from the next call on.

    The file names its stage and graph in its first line when it was saved from `stages(fast)`; otherwise say
    them. The program must take the same inputs and give outputs of the same types.
    """
    state = state_of(fast)
    if not state.compilations():
        raise InputError(why_none(state))
    text = _read(path)
    title = _TITLE.search(text)
    stage = stage or (title[1] if title else None)
    graph = graph or (title[2] if title else state.compilations()[-1].name)
    if stage is None:
        raise EditError(f"{path} does not say which stage it is; pass stage=…, one of {', '.join(editable())}")
    if stage not in editable():
        raise EditError(f"stage {stage!r} cannot be edited; these can: {', '.join(editable())}")
    compilation = _named(state, graph)
    known = dict(compilation.account.stages)
    if stage not in known:
        raise EditError(f"graph {graph!r} has no stage {stage!r}; it has {', '.join(known)}")
    edited = load(path, text, known[stage])
    aliased = _still_aliased(known[stage], edited, compilation.captured.aliased) if stage == "captured" else None
    compilation.edit(stage, edited, aliased)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise EditError(f"{str(path)[:200]}: expected a file that stages(fast)[…].save(path) wrote: {why}") from error


def _named(state: Compiled, graph: str) -> Compilation:
    for compilation in state.compilations():
        if compilation.name == graph:
            return compilation
    raise EditError(f"no graph {graph!r}; there are {', '.join(c.name for c in state.compilations())}")


def load(path: str, text: str, original: Trace) -> Trace:
    """The program in an edited file as a trace that fits where `original` stood."""
    scope: dict[str, object] = {"__name__": "tessera_edited", "__file__": path}
    with _faults_of(path):
        exec(compile(text, path, "exec"), scope)
    fn = scope.get(identifier(original.name))
    if not isinstance(fn, FunctionType):
        raise EditError(f"{path}: expected a function {identifier(original.name)!r}, got {_functions(scope)}")
    mode = mode_of(original)
    fakes = [_placeholder(v, original, mode) for v in original.inputs]
    names = [v.name for v in original.inputs]
    parameters = list(inspect.signature(fn).parameters)
    if parameters != names:
        line = fn.__code__.co_firstlineno
        raise EditError(f"{path}:{line}: expected a function of ({', '.join(names)}), got ({', '.join(parameters)})")
    builder = Builder(original.name, mode)
    with _faults_of(path):
        edited, _ = record(fn, fakes, names, keep_whole, builder)
    edited = numbers_as_values(_with_given_numbers(edited, original), builder)
    _check(path, original, edited)
    rename = _placed(edited, original) | dict(zip(edited.inputs, original.inputs, strict=True))
    written = {rename[t]: rename.get(v, v) for t, v in edited.mutations.items()}
    return edited.with_(
        inputs=original.inputs,
        equations=tuple(
            e.substitute(rename).with_(outputs=tuple(rename.get(v, v) for v in e.outputs))  # type: ignore[arg-type]
            for e in edited.equations
        ),
        outputs=tuple(rename.get(o, o) if isinstance(o, Value) else o for o in edited.outputs),
        mutations={t: written[t] for t in original.mutations},
        symbols={s: (rename.get(v, v), d) for s, (v, d) in edited.symbols.items()},
    )


@contextmanager
def _faults_of(path: str) -> Iterator[None]:
    """What goes wrong in the user's file is said of its line."""
    try:
        yield
    except EditError:
        raise
    except SyntaxError as error:
        raise EditError(f"{path}:{error.lineno}: expected Python, got {error.msg}") from error
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        place = f"{path}:{lines[-1]}" if lines else path
        raise EditError(f"{place}: {_message(error)}") from error


def _message(error: Exception) -> str:
    """Expected and got, for the mistakes that people make."""
    first = str(error).strip().split("\n")[0]
    match error:
        case NameError():
            return f"expected a name that is defined before this line, got {error.name!r}"
        case AttributeError() if isinstance(error.obj, type(torch.ops.aten)):
            return f"expected an operator of PyTorch, got aten.{error.name}"
        case DataDependentOutputException() | GuardOnDataDependentSymNode():
            return "expected a program that does not look at data, got a branch or a number that depends on a tensor"
        case CaptureError():
            return first
        case _:
            return f"expected arguments that the operator takes, got {type(error).__name__}: {first}"


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


def _with_given_numbers(edited: Trace, original: Trace) -> Trace:
    """A size that an input brings is that input among the outputs, where the original gives an input back."""
    brought = {symbol: v for symbol, (v, dim) in edited.symbols.items() if dim is None}
    outputs = [
        brought.get(str(o), o) if isinstance(o, torch.SymInt) and was in original.inputs else o
        for o, was in zip_longest(edited.outputs, original.outputs[: len(edited.outputs)])
    ]
    return edited.with_(outputs=tuple(outputs))


def _still_aliased(original: Trace, edited: Trace, aliased: dict[int, Aliased]) -> dict[int, Aliased]:
    """Outputs that are made outside, from an input or from another output, and in the edited program are the same
    views of them; the others are computed by it."""
    kept = {}
    for i, alias in aliased.items():
        known: dict[object, int] = {}
        before, after = _way(original, i, alias, known), _way(edited, i, alias, known)
        if before == after:
            kept[i] = alias
    return kept


def _way(trace: Trace, i: int, alias: Aliased, known: dict[object, int]) -> object:
    """How an output comes from inputs and from the output it is a view of, as a number: equal ones are equal."""
    numbers: dict[Value, int] = {}
    made_by = trace.makers()
    for place, v in enumerate(trace.inputs):
        numbers[v] = known.setdefault(("input", place), len(known))
        if v in trace.mutations:
            new, number = trace.mutations[v], known.setdefault(("written", place), len(known))
            numbers[new] = number
            # A printed program writes by copy_ at its end, which records one copy more.
            while new in made_by and made_by[new].op == torch.ops.aten.copy.default:
                new = made_by[new].args[1]
                numbers.setdefault(new, number)  # type: ignore[arg-type]
    if alias.of_output:
        source = trace.outputs[alias.source]
        numbers[source] = known.setdefault("source", len(known))  # type: ignore[index]
    for eqn in trace.equations:
        args = str(map_values((eqn.args, tuple(eqn.kwargs.items())), lambda v: numbers.get(v, v.name)))
        for place, v in enumerate(eqn.outputs):
            if v is not None and v not in numbers:
                numbers[v] = known.setdefault((eqn.op, args, place), len(known))
    out = trace.outputs[i]
    return numbers.get(out) if isinstance(out, Value) else out


def _functions(scope: dict[str, object]) -> str:
    names = [n for n, f in scope.items() if callable(f) and getattr(f, "__module__", "") == "tessera_edited"]
    return ", ".join(names) or "none"


def _check(path: str, original: Trace, edited: Trace) -> None:
    wanted, actual = [_kind(o) for o in original.outputs], [_kind(o) for o in edited.outputs]
    if len(wanted) != len(actual):
        raise EditError(f"{path}: expected {len(wanted)} outputs, got {len(actual)}")
    for i, (a, b) in enumerate(zip(wanted, actual, strict=True)):
        if a != b:
            raise EditError(f"{path}: expected output {i} to be {a}, got {b}")
    if {v.name for v in original.mutations} != {v.name for v in edited.mutations}:
        names = ", ".join(v.name for v in original.mutations) or "nothing"
        got = ", ".join(v.name for v in edited.mutations) or "nothing"
        raise EditError(f"{path}: expected the program to write {names}, it writes {got}")


def _kind(o: object) -> str:
    """Without its place on a mesh, which nobody writes down."""
    if isinstance(o, Value):
        return str(o.type.placed(None) if isinstance(o.type, TensorType) else o.type)
    return repr(o)


def _placed(edited: Trace, original: Trace) -> dict[Value, Value]:
    """Results lie on the mesh where those of the original do."""
    written = [(edited.mutations[v], original.mutations[t]) for v, t in _written(edited, original)]
    pairs = [*zip(edited.outputs, original.outputs, strict=True), *written]
    placed = {}
    for v, was in pairs:
        place = was.type.placement if isinstance(was, Value) and isinstance(was.type, TensorType) else None
        if place is not None and isinstance(v, Value) and isinstance(v.type, TensorType):
            placed[v] = Value(v.name, v.type.placed(place))
    return placed


def _written(edited: Trace, original: Trace) -> list[tuple[Value, Value]]:
    """The inputs that both write."""
    names = {v.name: v for v in original.mutations}
    return [(v, names[v.name]) for v in edited.mutations]
