"""Runs a StableHLO program: on real tensors it is the interpreter, under the recorder it writes the Trace.

In: a `Module`, the device its constants go to, the limit on its values. Out: what the main function gives. Operations
run in order; each is looked up in the table of meanings. An operation whose operands are known while a program is
recorded runs then, so that constants stay small.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from tessera.frontends.stablehlo import limits
from tessera.frontends.stablehlo.elements import Element, Quantized
from tessera.frontends.stablehlo.module import Block, Module, Operation, Tensor
from tessera.frontends.stablehlo.operators import quantization
from tessera.frontends.stablehlo.registry import TABLE, NoMeaningError, Row, Site
from tessera.frontends.stablehlo.sizes import one_shape, sizes_meaning
from tessera.frontends.stablehlo.values import Sizes, Splat, Value, is_fake, tensor_of
from tessera.ir.equation import Source
from tessera.ir.record import recording
from tessera.torch_internals.dispatch import disable_current_modes
from tessera.util.errors import InputError, TesseraError

SMALL = 1 << 12  # elements of a constant that is worth computing when the program is recorded


class Interpreter:
    def __init__(self, module: Module, device: torch.device, limit: int, constants: dict[int, Value]) -> None:
        """`constants`: those that were moved to the device before, by the identity of their operations."""
        self.module, self.device, self.limit, self.constants = module, device, limit, constants
        self.environment: dict[int, Value] = {}

    def main(self, arguments: Sequence[torch.Tensor]) -> tuple[Value, ...]:
        function = self.module.main
        given = [t.element.enter(x) for t, x in zip(function.body.types, arguments, strict=True)]  # type: ignore[union-attr]
        results = self.call(function.name, given)
        return tuple(self.leave(x, t) for x, t in zip(results, function.results, strict=True))

    def leave(self, x: Value, type_: object) -> Value:
        if isinstance(x, tuple):
            return tuple(self.leave(a, t) for a, t in zip(x, type_.types, strict=True))  # type: ignore[attr-defined]
        return None if x is None else type_.element.leave(tensor_of(x, self.device))  # type: ignore[attr-defined]

    def check(self, shape: Sequence[int], element: Element) -> None:
        limits.check_value(shape, element.held.itemsize, self.limit, self.module.name)

    # --- functions and blocks ---

    def function(self, name: str) -> Block:
        if name not in self.module.functions:
            raise InputError(f"{self.module.name}: the function {name!r} is called and not there")
        return self.module.functions[name].body

    def call(self, name: str, arguments: Sequence[Value]) -> tuple[Value, ...]:
        body = self.function(name)
        outside, self.environment = self.environment, {}
        try:
            return self.block(body, arguments, last=True)
        finally:
            self.environment = outside

    def block(self, block: Block, arguments: Sequence[Value], last: bool = False) -> tuple[Value, ...]:
        """Run a block. With `last`, values go with the last operation that reads them."""
        values = self.environment
        values.update(zip(block.arguments, arguments, strict=True))
        ends = block.last_uses if last else {}
        for place, operation in enumerate(block.operations):
            results = self.operation(operation, tuple(values[i] for i in operation.operands))
            values.update(zip(operation.results, results, strict=True))
            for i in ends.get(place, ()):
                values.pop(i, None)
        return tuple(values[i] for i in block.returns)

    # --- one operation ---

    def operation(self, operation: Operation, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        if operation.name in ("stablehlo.constant", "arith.constant"):
            return (self.constant(operation),)
        row = TABLE.get(operation.name)
        if row is None:
            raise NoMeaningError(f"{operation.name} at {operation.line} has no meaning here")
        site = Site(operation, self)
        if (sizes := sizes_meaning(site, operands)) is not None:
            return (sizes,)
        recorder = recording()
        if recorder is not None and not recorder.locate:
            recorder.builder.source = Source(note=operation.line)
        try:
            out = self.folded(row, site, operands) if recorder is not None else self.apply(row, site, operands)
        except TesseraError:
            raise
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, OverflowError) as error:
            if type(error).__module__.startswith("torch"):  # of the recorder: a value was asked for
                raise
            raise InputError(f"{operation.name} at {operation.line}: {error}") from error
        results = out if isinstance(out, list) else [out]
        if len(results) != len(operation.results):
            raise InputError(f"{operation.name} at {operation.line}: expected {len(operation.results)} results")
        return tuple(results)

    def constant(self, operation: Operation) -> Value:
        """A constant on the program's device; one number at every place is a Splat."""
        if id(operation) not in self.constants:
            tensor, type_ = operation.attributes["value"], operation.result_types[0]
            assert isinstance(tensor, torch.Tensor) and isinstance(type_, Tensor)
            with disable_current_modes():
                if tensor.numel() > 0 and all(
                    s == 0 or n == 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)
                ):
                    value: Value = Splat(tensor.reshape(-1)[0].item(), tuple(tensor.shape), type_.element)
                else:
                    value = tensor.to(self.device)
            self.constants[id(operation)] = value
        return self.constants[id(operation)]

    def folded(self, row: Row, site: Site, operands: tuple[Value, ...]) -> object:
        """While a program is recorded: what is known already, and small, is computed now, by torch itself."""
        known = operands and not any(is_fake(x) or isinstance(x, (tuple, Sizes)) or x is None for x in operands)
        small = all(isinstance(t, Tensor) and t.static and _count(t) <= SMALL for t in site.operation.result_types)
        splats = row.elementwise and all(isinstance(x, Splat) for x in operands)
        if known and row.folds and not site.operation.regions and (small or splats):
            with disable_current_modes():
                return self.apply(row, site, operands)
        return self.apply(row, site, operands)

    def apply(self, row: Row, site: Site, operands: tuple[Value, ...]) -> object:
        if any(isinstance(t, Tensor) and isinstance(t.element, Quantized) for t in _types(site)) and not row.storage:
            return quantization.through_floats(row, site, [tensor_of(x, self.device) for x in operands], self.apply)
        if row.elementwise and not all(t.static for t in site.operation.operand_types if isinstance(t, Tensor)):
            one_shape(operands)
        if row.raw:
            return row.run(site, *operands)
        if row.elementwise and operands and all(isinstance(x, Splat) for x in operands):
            return self.splat(row, site, operands)  # type: ignore[arg-type]
        if row.numbers and any(isinstance(x, torch.Tensor) for x in operands):
            return row.run(site, *(x.number if isinstance(x, Splat) else _plain(x, self.device) for x in operands))
        return row.run(site, *(_plain(x, self.device) for x in operands))

    def splat(self, row: Row, site: Site, operands: tuple[Splat, ...]) -> object:
        """An operation on numbers that are the same everywhere: once."""
        recorded = recording() is not None or torch.compiler.is_exporting()
        with disable_current_modes() if recorded else nullcontext():
            cpu = torch.device("cpu")
            out = row.run(site, *(Splat(x.number, (), x.element).tensor(cpu) for x in operands))
            if isinstance(out, list) or out.ndim:
                return out
            return Splat(out.item(), max((x.shape for x in operands), key=len), site.element)


def _plain(x: Value, device: torch.device) -> Value:
    return tensor_of(x, device) if isinstance(x, (Splat, Sizes)) else x


def _types(site: Site) -> tuple:
    return (*site.operation.operand_types, *site.operation.result_types)


def _count(t: Tensor) -> int:
    count = 1
    for n in t.shape:
        count *= n or 0
    return count
