"""Reads StableHLO. In: text or bytecode, of any version that jaxlib reads. Out: a `Module` of plain data.

MLIR's own verifier has looked at every operation before: operands exist, types fit. What it does not promise is checked
here: nesting, that functions do not call themselves, that constants are no larger than the limits allow.
"""

from __future__ import annotations

import math
import re
from typing import Any

from tessera.frontends.stablehlo import limits
from tessera.frontends.stablehlo.bindings import bindings, context
from tessera.frontends.stablehlo.elements import ELEMENTS, Element, Quantized
from tessera.frontends.stablehlo.literals import constant, value_of
from tessera.frontends.stablehlo.module import Block, Function, Module, Operation, Tensor, Token, Tuple, Type
from tessera.frontends.stablehlo.probe import survives
from tessera.util.errors import InputError, TesseraError

BYTECODE = b"ML\xefR"


def parse(source: str | bytes, name: str = "program", limit: int | None = None, probed: bool = True) -> Module:
    """The program that the text or bytecode holds; `name` stands in messages. Bytecode is tried in another process
    first, unless it was made in this one (`probed` is false)."""
    if len(source) > limits.FILE_BYTES:
        raise InputError(f"{name}: expected at most {limits.FILE_BYTES:,} bytes, got {len(source):,}")
    if isinstance(source, bytes) and not source.startswith(BYTECODE):
        try:
            source = source.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{name}: expected MLIR bytecode or text, got bytes that are neither") from error
    if isinstance(source, str):
        limits.check_text(source, name)
    elif probed:
        survives(source, name)
    mlir = context()
    with mlir, bindings().ir.Location.unknown(mlir):
        operation = _read(source, mlir, name).operation
        try:
            functions = _Reader(name, len(source), limit).functions(operation)
            attributes = {a.name: value_of(a.attr) for a in _named(operation)}
        except TesseraError:
            raise
        except Exception as error:
            raise InputError(f"{name}: what MLIR read makes no sense: {_first_line(error)}") from error
    if not functions:
        raise InputError(f"{name}: expected a module with a function, got none")
    _refuse_recursion(functions, name)
    _refuse_expansion(functions, name)
    return Module(name, functions, len(source), attributes)


def _read(source: str | bytes, mlir: Any, name: str) -> Any:
    b = bindings()
    try:
        if isinstance(source, bytes):
            try:
                return b.stablehlo.deserialize_portable_artifact(mlir, source)
            except Exception:  # bytecode that was written without a version: the dialect as it is
                return b.ir.Module.parse(source)
        return b.ir.Module.parse(source)
    except Exception as error:
        raise InputError(f"{name}: MLIR does not read this: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__


def _named(operation: Any) -> list:
    """Attributes with their names; the bindings iterate over names or over pairs, by version."""
    pairs = []
    for item in operation.attributes:
        pairs.append(item if hasattr(item, "attr") else _Pair(item, operation.attributes))
    return pairs


class _Pair:
    def __init__(self, name: str, attributes: Any) -> None:
        self.name, self._attributes = name, attributes

    @property
    def attr(self) -> Any:
        return self._attributes[self.name]


class _Reader:
    def __init__(self, name: str, size: int, limit: int | None) -> None:
        self.name, self.size = name, size
        self.limit = math.inf if limit is None else limit
        self.trusted = limit is not None
        self.numbers: dict[Any, int] = {}
        self.types: dict[str, Type] = {}

    def functions(self, module: Any) -> dict[str, Function]:
        functions: dict[str, Function] = {}
        operations = [view.operation for view in module.regions[0].blocks[0].operations]
        for operation in operations:
            if operation.name not in ("func.func", "sdy.mesh"):
                raise InputError(f"{self.name}: expected functions in the module, got a {operation.name}")
        if not self.trusted:
            arguments = [t for o in operations if o.name == "func.func" for t in self.signature(o)]
            self.limit = limits.value_limit(self.size + max(map(_bytes, arguments), default=0))
        for operation in operations:
            if operation.name == "func.func":
                function = self.function(operation)
                functions[function.name] = function
        return functions

    def signature(self, operation: Any) -> list[Type]:
        """Types of the arguments, if a caller can give them: those of a public function."""
        visibility = [a.attr.value for a in _named(operation) if a.name == "sym_visibility"]
        inputs = bindings().ir.TypeAttr(operation.attributes["function_type"]).value.inputs
        return [] if visibility == ["private"] else [self.type(t) for t in inputs]

    def function(self, operation: Any) -> Function:
        name = operation.attributes["sym_name"].value
        if not operation.regions[0].blocks:
            raise InputError(f"{self.name}: the function {name!r} has no body")
        self.numbers = {}
        results = bindings().ir.TypeAttr(operation.attributes["function_type"]).value.results
        return Function(name, self.block(operation.regions[0], 0), tuple(map(self.type, results)))

    def block(self, region: Any, depth: int) -> Block:
        if depth > limits.REGIONS:
            raise InputError(f"{self.name}: expected regions nested at most {limits.REGIONS} deep, got more")
        if len(region.blocks) != 1:
            raise InputError(f"{self.name}: expected one block in a region, got {len(region.blocks)}")
        block = region.blocks[0]
        arguments = tuple(self.number(a) for a in block.arguments)
        types = tuple(self.type(a.type) for a in block.arguments)
        operations = [self.operation(view.operation, depth) for view in block.operations]
        if not operations or operations[-1].results or not operations[-1].name.endswith(".return"):
            raise InputError(f"{self.name}: expected a block that ends in a return")
        return Block(arguments, types, tuple(operations[:-1]), operations[-1].operands)

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def operation(self, operation: Any, depth: int) -> Operation:
        line = _line(operation.location)
        operands = tuple(operation.operands)
        results = tuple(operation.results)
        result_types = tuple(self.type(r.type) for r in results)
        for type_ in result_types:
            if isinstance(type_, Tensor):
                sizes = [n for n in type_.shape if n is not None]
                limits.check_value(sizes, type_.element.held.itemsize, self.limit, f"{self.name}, {line}")
        return Operation(
            operation.name,
            tuple(self.number(v) for v in operands),
            tuple(self.number(v) for v in results),
            tuple(self.type(v.type) for v in operands),
            result_types,
            self.attributes(operation, result_types, line),
            tuple(self.block(region, depth + 1) for region in operation.regions if region.blocks),
            line,
        )

    def attributes(self, operation: Any, result_types: tuple[Type, ...], line: str) -> dict[str, object]:
        if operation.name in ("stablehlo.constant", "arith.constant") and isinstance(result_types[0], Tensor):
            shape, element = result_types[0].shape, result_types[0].element
            return {"value": constant(operation, shape, element)}  # type: ignore[arg-type]
        return {a.name: value_of(a.attr) for a in _named(operation)}

    def type(self, type_: Any) -> Type:
        key = str(type_)
        if key not in self.types:
            self.types[key] = self.read_type(type_, key)
        return self.types[key]

    def read_type(self, type_: Any, text: str) -> Type:
        ir = bindings().ir
        if isinstance(type_, ir.RankedTensorType):
            shape = tuple(None if type_.is_dynamic_dim(i) else n for i, n in enumerate(type_.shape))
            return Tensor(shape, self.element(str(type_.element_type)))
        if isinstance(type_, ir.TupleType):
            return Tuple(tuple(self.type(type_.get_type(i)) for i in range(type_.num_types)))
        if text == "!stablehlo.token":
            return Token()
        if text in ELEMENTS:  # scalars of other dialects
            return Tensor((), ELEMENTS[text])
        raise InputError(f"{self.name}: values of type {text} have no meaning here")

    def element(self, text: str) -> Element:
        if text.startswith("!quant.uniform"):
            return quantized(text, self.name)
        if text not in ELEMENTS:
            raise InputError(f"{self.name}: elements of type {text} have no meaning here")
        return ELEMENTS[text]


_UNIFORM = re.compile(r"!quant\.uniform<(u?)(i\d+)(?:<(-?\d+):(-?\d+)>)?:(\w+)(?::(\d+))?, \{?([^{}]*)\}?>$")


def quantized(text: str, name: str) -> Quantized:
    """`!quant.uniform<i8<-127:127>:f32:1, {0.1:3, 0.2}>`: storage and its ends, expressed type, axis, scales and
    zeros."""
    match = _UNIFORM.match(text)
    if match is None:
        raise InputError(f"{name}: quantized elements of type {text} have no meaning here")
    unsigned, storage, low, high, expressed, axis, pairs = match.groups()
    read = []
    for pair in pairs.split(","):
        scale, _, zero = pair.strip().partition(":")
        read.append((float(scale), int(zero or 0)))
    ends = None if low is None else (int(low), int(high))
    element = ELEMENTS[("ui" + storage[1:]) if unsigned else storage]
    return Quantized.of(element, ELEMENTS[expressed], read, None if axis is None else int(axis), ends)


def _line(location: Any) -> str:
    """Where an operation stands: its name in the program that was exported, or the line of the text."""
    text = str(location)
    named = re.match(r'loc\("([^"]*)"(:\d+:\d+)?', text)
    if named is None:
        return "an unknown line"
    return f"line {named[2].split(':')[1]}" if named[2] and named[1] == "-" else named[1] + (named[2] or "")


def _bytes(type_: Type) -> int:
    if not isinstance(type_, Tensor):
        return 0
    return math.prod(n for n in type_.shape if n is not None) * type_.element.held.itemsize


def _calls(block: Block) -> list[str]:
    """The functions that a block calls, one as often as it does."""
    called: list[str] = []
    for operation in block.operations:
        for key in ("callee", "decomposition"):
            if isinstance(name := operation.attributes.get(key), str):
                called.append(name)
        if isinstance(names := operation.attributes.get("called_computations"), list):
            called += (name for name in names if isinstance(name, str))
        for region in operation.regions:
            called += _calls(region)
    return called


def _count(block: Block) -> int:
    return sum(1 + sum(map(_count, operation.regions)) for operation in block.operations)


def _refuse_expansion(functions: dict[str, Function], name: str) -> None:
    """A few functions that call each other twice, and so on, are no more than their bytes justify."""
    own = {f.name: _count(f.body) for f in functions.values()}
    sizes: dict[str, int] = {}

    def size(function: str) -> int:
        if function not in sizes:
            sizes[function] = own[function] + sum(size(c) for c in _calls(functions[function].body) if c in functions)
        return sizes[function]

    most = limits.EXPANDED * max(sum(own.values()), limits.LEAST_OPERATIONS)
    if (count := max(map(size, functions))) > most:
        raise InputError(f"{name}: expected at most {most} operations where functions are called, got {count}")


def _refuse_recursion(functions: dict[str, Function], name: str) -> None:
    """Functions that call themselves, however far around, and chains of calls that are too long."""
    calls = {f.name: _calls(f.body) for f in functions.values()}
    depth: dict[str, int] = {}
    for start in calls:
        stack, way = [(start, iter(calls[start]))], {start}
        while stack:
            at, rest = stack[-1]
            callee = next((c for c in rest if depth.get(c) is None), None)
            if callee is None:
                depth[at] = 1 + max((depth.get(c, 0) for c in calls.get(at, ())), default=0)
                way.discard(at)
                stack.pop()
                if depth[at] > limits.CALLS:
                    raise InputError(f"{name}: expected calls nested at most {limits.CALLS} deep, got more at {at!r}")
            elif callee in way:
                raise InputError(f"{name}: the function {callee!r} calls itself")
            else:
                way.add(callee)
                stack.append((callee, iter(calls.get(callee, ()))))
