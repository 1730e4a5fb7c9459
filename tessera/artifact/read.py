"""A program of an artifact, from its member to a function.

In: a member that holds tables. Out: a function of flat tensors, and the account of what runs how. Tables are checked
(`ir/serial_check.py`), then read, then printed as Python by the same printer as ever; the texts in the file are for
people. Devices that the file names are put in terms of those at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tessera.artifact.container import Container
from tessera.artifact.regions import Kernels, Regions
from tessera.artifact.specials import bring
from tessera.artifact.weights import check_type
from tessera.ir.aliased import Aliased
from tessera.ir.binding import quick
from tessera.ir.equation import Special
from tessera.ir.formula import Formulas
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.ir.schema import is_view
from tessera.ir.serial import VERSION, Reader
from tessera.ir.serial_check import check_tables
from tessera.ir.trace import Trace
from tessera.runtime.call import Layout, build_call
from tessera.store.layout import read_layout
from tessera.torch_internals.operators import OpOverload
from tessera.util.errors import ArtifactError, InputError, TesseraError, Unserial

READ_VERSIONS = (VERSION,)
# What reading tables that passed their checks may still raise, as of an operator that this PyTorch does not have.
FAULTS = (TesseraError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, AssertionError)


@dataclass(frozen=True)
class Program:
    trace: Trace
    layout: Layout
    run: Callable[..., tuple]  # the program itself
    call: Callable[..., tuple]  # with what stands around it: writes, views
    written: tuple[int, ...]  # inputs that the program itself writes
    counts: dict[str, int]  # regions by who runs them


def read_program(
    container: Container,
    member: object,
    tensors: dict[str, torch.Tensor],
    kernels: Kernels | None,
    device: Callable[[str], torch.device],
) -> Program:
    data = container.json(member)
    where = f"{container.path}: {member}"
    if not isinstance(data, dict) or data.get("version") not in READ_VERSIONS:
        told = data.get("version") if isinstance(data, dict) else type(data).__name__
        raise ArtifactError(f"{where}: expected tables of version {VERSION}, got {told}")
    names, number = data.get("constants"), data.get("program")
    if not isinstance(names, list) or not all(isinstance(n, str) and n in tensors for n in names):
        raise ArtifactError(f"{where}: expected constants that are among the weights")
    tables, recorded = data.get("tables"), data.get("kernels")
    if not isinstance(recorded, list):
        raise ArtifactError(f"{where}: expected a list of kernels")
    written = data.get("written")
    try:
        check_tables(tables, len(names))
        assert isinstance(tables, dict)
        if type(number) is not int or not 0 <= number < len(tables["traces"]):
            raise ArtifactError(f"{where}: expected the number of a program, got {str(number)[:40]}")
        bring(tables)
        _move(tables, device)
        regions = Regions(recorded, kernels, bind)
        reader = Reader(tables, (), [tensors[n] for n in names], Formulas(), regions)
        trace = reader.trace(number)
        for block in trace.nested():
            for v, x in block.constants.items():
                check_type(v, x, where)
        layout = _layout(data.get("layout"), trace, reader)
        if not isinstance(written, list) or not all(type(n) is int and 0 <= n < len(trace.inputs) for n in written):
            raise Unserial(f"expected the inputs that are written, got {str(written)[:40]}")
        run = compile_trace(trace, bind=bind, dead=lifetimes(trace))
        call = around(run, layout)
    except ArtifactError:
        raise
    except FAULTS as error:
        raise ArtifactError(f"{where}: {error}") from error
    return Program(trace, layout, run, call, tuple(written), regions.counts)


def around(run: Callable[..., tuple], layout: Layout) -> Callable[..., tuple]:
    """A program with its writes and views around it."""
    return build_call(run, layout, _no_eager, guarded=True)


def bind(op: object) -> Callable:
    return op.fn if isinstance(op, Special) else quick(op)  # type: ignore[arg-type]


def _no_eager(*_: object) -> tuple:
    raise InputError(
        "an argument that is written shares memory with another one, or forward-mode gradients are asked for: no "
        "artifact computes that"
    )


def _layout(data: object, trace: Trace, reader: Reader) -> Layout:
    """Checked: `build_call` prints its numbers, and runs its views."""
    if not isinstance(data, dict):
        raise Unserial(f"expected how results line up, got {type(data).__name__}")
    layout = read_layout(data, reader)
    inputs, results = len(trace.inputs), len(trace.outputs)

    def number(n: object, most: int) -> None:
        if type(n) is not int or not 0 <= n < most:
            raise Unserial(f"layout: expected a number below {most}, got {str(n)[:40]}")

    def alias(part: Aliased) -> None:
        number(part.source, results if part.of_output else inputs)
        for op, args, kwargs, index, _ in part.steps:
            views = isinstance(op, OpOverload) and is_view(op) and isinstance(args, tuple) and isinstance(kwargs, dict)
            if not views or not (index is None or type(index) is int):
                raise Unserial(f"layout: expected views, got {str(op)[:40]}")

    for n in (*layout.written, *layout.counted, *layout.viewed, *(source for source, _ in layout.write_back)):
        number(n, inputs)
    for n in (*(position for _, position in layout.write_back), *(position for position, _ in layout.placed)):
        number(n, results)
    for place, part in enumerate(layout.outputs):
        if isinstance(part, Aliased):
            alias(part)
            if part.shared is not None:
                earlier, steps = part.shared
                number(earlier, place)
                number(steps, len(part.steps) + 1)
        elif not isinstance(part, tuple):
            number(part, results)
    for _, part in layout.placed:
        alias(part)
    if type(layout.fixed) is not bool:
        raise Unserial("layout: expected whether sizes are fixed")
    return layout


def _move(tables: dict, device: Callable[[str], torch.device]) -> None:
    """Every device that the tables name, as the one that is used for it."""
    for row in tables["types"]:
        if row[0] == "tensor":
            row[4] = str(device(row[4]))
    for trace in tables["traces"]:
        for pair in trace["constants"]:
            if isinstance(pair[1], list):
                pair[1][3] = str(device(pair[1][3]))
        for eqn in trace["equations"]:
            for arg in (*eqn[1], *(value for _, value in eqn[2])):
                _move_arg(arg, device)


def _move_arg(arg: object, device: Callable[[str], torch.device]) -> None:
    match arg:
        case ["device", name]:
            arg[1] = str(device(name))  # type: ignore[index]
        case [("l" | "t" | "slice"), *items]:
            for item in items:
                _move_arg(item, device)
        case ["d", *pairs]:
            for _, value in pairs:
                _move_arg(value, device)
