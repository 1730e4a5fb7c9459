"""Checks tables that come from a stranger, before a `Reader` sees them.

In: tables as `serial.Writer` makes them, of which nothing is known but that they are JSON. Out: nothing, or `Unserial`
that says where and what was expected. Programs are printed as Python and run, so whatever is printed as it stands is
checked to be what it should: names are plain identifiers and unique, numbers are numbers and within their tables,
values are defined once and before they are read, a program holds only programs that stand before it, operators come
from a fixed list, and conditions are arithmetic.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable

from tessera.ir.formula import FLOAT, LARGEST, SYMBOL, Formulas
from tessera.ir.printer import RESERVED
from tessera.torch_internals.operators import is_dispatched
from tessera.util.errors import Unserial

NAMESPACES = frozenset(("aten", "prims", "tessera"))
REFUSED = frozenset(("from_file",))  # operators of those that read or write files
SPECIALS = frozenset(
    ("number", "check", "functional", "functional_over", "keep_grad", "laid_out", "call", "checkpoint", "cond")
    + ("while_loop", "scan", "batch_norm", "attention_math", "linear_cross_entropy", "linear_loss", "masked_read")
    + ("class_logit", "raise_if")
)
TABLES = ("types", "values", "sources", "tags", "ops", "traces", "places")
FIELDS = ("name", "inputs", "equations", "outputs", "mutations", "constants", "symbols")
MOST_DIMENSIONS = 64
MOST_EQUATIONS = 500_000  # with those of the programs that are called, wherever they are called
MOST_CONSTANT = 1 << 24  # elements from the first to the last of a constant that is written whole
NAME = re.compile(r"[A-Za-z_]\w{0,200}", re.ASCII)
PYTHONS = {"__and__", "__or__", "__xor__", "__lshift__", "__rshift__"}  # operators that ATen calls as Python does
WORD = re.compile(r"[\w.+-]{0,100}", re.ASCII)  # names of dtypes, layouts, devices, overloads
DEVICE = re.compile(r"(cpu|cuda|meta|mps|xpu|hpu)(:\d{1,4})?")
_MATH = frozenset(("max", "min", "abs", "int", "float", "round", "floor", "ceil", "trunc", "sqrt"))
_NODES = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub,
    ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.Pow, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
    ast.Name, ast.Load, ast.Constant, ast.Call, ast.Attribute, ast.IfExp,
)  # fmt: skip


def check_tables(tables: object, held: int) -> None:
    """`held`: how many tensors whoever reads brings."""
    if not isinstance(tables, dict) or set(tables) != set(TABLES):
        raise Unserial(f"expected the tables {', '.join(TABLES)}")
    for name, rows in tables.items():
        _expect(isinstance(rows, list), f"the table {name}", "a list", rows)
    _Checker(tables, held).run()


def _expect(holds: object, where: str, wanted: str, got: object) -> None:
    if not holds:
        raise Unserial(f"{where}: expected {wanted}, got {str(got)[:80]!r}")


class _Checker:
    def __init__(self, tables: dict[str, list], held: int) -> None:
        self.tables, self.held, self.sizes = tables, held, Formulas()
        self.below: list[int] = []  # of each operator, how many programs have to stand before whoever uses it
        self.bodies: list[list[int]] = []  # of each operator, the programs that it holds
        self.long: list[int] = []  # of each program, its equations and those of all that it calls

    def run(self) -> None:
        for name in TABLES[:4]:
            self._each(name, getattr(self, f"_{name}"))
        self._each("places", self._places)
        self._each("ops", self._operator)
        self._each("traces", self._trace)

    def _each(self, table: str, check: Callable[[str, object, int], None]) -> None:
        for i, row in enumerate(self.tables[table]):
            check(f"{table}[{i}]", row, i)

    def number(self, where: str, n: object, table: str) -> int:
        _expect(type(n) is int and 0 <= n < len(self.tables[table]), where, f"a number in the table {table}", n)
        return n  # type: ignore[return-value]

    # --- what stands for itself ---

    def _types(self, where: str, row: object, _: int) -> None:
        _expect(isinstance(row, list) and row, where, "a type", row)
        match row:
            case ["scalar", "int" | "float" | "bool"]:
                return
            case ["opaque", str(name)] if WORD.fullmatch(name):
                return
            case ["tensor", str(dtype), list(shape), list(stride), str(device), str(layout), offset, [bool(), bool()]]:
                _expect(WORD.fullmatch(dtype) and WORD.fullmatch(layout), where, "a dtype and a layout", row)
                _expect(DEVICE.fullmatch(device), where, "a device", device)
                _expect(len(stride) in (0, len(shape)) and len(shape) <= MOST_DIMENSIONS, where, "strides", row)
                for size in (*shape, *stride, offset):
                    self.sizes.read(size)
                return
        _expect(False, where, "a type", row)

    def _values(self, where: str, row: object, _: int) -> None:
        _expect(isinstance(row, list) and len(row) == 2, where, "a name and a type", row)
        name, type_ = row  # type: ignore[misc]
        _expect(is_name(name), where, "a name that a variable can have", name)
        self.number(where, type_, "types")

    def _sources(self, where: str, row: object, _: int) -> None:
        _expect(isinstance(row, list) and len(row) == 3, where, "a place, a module and a note", row)
        self.number(where, row[0], "places")  # type: ignore[index]
        _expect(isinstance(row[1], str) and isinstance(row[2], str), where, "texts", row)  # type: ignore[index]

    def _tags(self, where: str, row: object, _: int) -> None:
        _expect(isinstance(row, list) and all(isinstance(tag, str) for tag in row), where, "texts", row)

    def _places(self, where: str, row: object, _: int) -> None:
        fine = isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and type(row[1]) is int
        _expect(fine, where, "a file and a line", row)

    # --- operators ---

    def _operator(self, where: str, row: object, _: int) -> None:
        _expect(isinstance(row, list) and row, where, "an operator", row)
        match row:
            case ["op", *_]:
                self._overload(where, row)
                self._holds([])
            case ["special", str(name)]:
                _expect(name in SPECIALS, where, f"one of {', '.join(sorted(SPECIALS))}", name)
                self._holds([])
            case ["of", str(namespace), str(name), bool(), ["op", *_] as of]:
                _expect(is_name(name) and is_name(namespace), where, "a name", row)
                self._overload(where, of)
                self._holds([])
            case ["region", str(namespace), str(name), bool(), body, list(parts), list(over), int()]:
                _expect(is_name(name) and is_name(namespace), where, "a name", row)
                numbers = [self.number(where, n, "traces") for n in (body, *parts)]
                pairs = all(isinstance(p, list) and len(p) == 2 and all(type(n) is int for n in p) for p in over)
                _expect(pairs, where, "pairs of numbers", over)
                self._holds(numbers)
            case _:
                _expect(False, where, "an operator", row)

    def _holds(self, programs: list[int]) -> None:
        self.below.append(max(programs, default=-1) + 1)
        self.bodies.append(programs)

    def _overload(self, where: str, row: object) -> None:
        _expect(isinstance(row, list) and len(row) == 4 and all(isinstance(x, str) for x in row), where, "a name", row)
        _, namespace, name, overload = row  # type: ignore[misc]
        _expect(namespace in NAMESPACES, where, f"an operator of {', '.join(sorted(NAMESPACES))}", namespace)
        plain = NAME.fullmatch(name) and (not name.startswith("__") or name in PYTHONS)
        _expect(plain, where, "the name of an operator", name)
        _expect(NAME.fullmatch(overload), where, "the name of an overload", overload)
        _expect(name not in REFUSED, where, "an operator that touches no files", name)
        if namespace == "aten" and not is_dispatched(f"aten::{name}{'' if overload == 'default' else f'.{overload}'}"):
            raise Unserial(f"{where}: there is no operator aten.{name}.{overload} of tensors")

    # --- programs ---

    def _trace(self, where: str, row: object, index: int) -> None:
        _expect(isinstance(row, dict) and set(row) == set(FIELDS), where, f"the fields {', '.join(FIELDS)}", row)
        assert isinstance(row, dict)
        _expect(isinstance(row["name"], str) and len(row["name"]) <= 200, where, "a name", row["name"])
        for field in FIELDS[1:]:
            _expect(isinstance(row[field], list), f"{where}.{field}", "a list", row[field])
        defined, names = set[int](), set[str]()

        def define(at: str, v: object) -> None:
            number = self.number(at, v, "values")
            name = self.tables["values"][number][0]
            _expect(number not in defined and name not in names, at, "a value that is not defined yet", name)
            defined.add(number)
            names.add(name)

        for v in row["inputs"]:
            define(f"{where}.inputs", v)
        for pair in row["constants"]:
            _expect(isinstance(pair, list) and len(pair) == 2, f"{where}.constants", "a value and a tensor", pair)
            define(f"{where}.constants", pair[0])
            self._tensor(f"{where}.constants", pair[1])
        self.long.append(len(row["equations"]))
        for i, eqn in enumerate(row["equations"]):
            self._equation(f"{where}.equations[{i}]", eqn, index, defined, define)
            for body in self.bodies[eqn[0]]:
                self._add(where, index, body)
        self._arg(f"{where}.outputs", ["t", *row["outputs"]], index, defined)
        for pair in row["mutations"]:
            _expect(isinstance(pair, list) and len(pair) == 2, f"{where}.mutations", "two values", pair)
            _expect(pair[0] in row["inputs"] and pair[1] in defined, f"{where}.mutations", "values of it", pair)
        for bound in row["symbols"]:
            _expect(isinstance(bound, list) and len(bound) == 3, f"{where}.symbols", "where a size is read", bound)
            symbol, v, dim = bound
            fine = isinstance(symbol, str) and not keyword.iskeyword(symbol)
            fine = fine and (SYMBOL.fullmatch(symbol) or dim is None and FLOAT.fullmatch(symbol))
            _expect(fine and v in defined, f"{where}.symbols", "a symbol and a value", bound)
            _expect(dim is None or type(dim) is int and 0 <= dim < MOST_DIMENSIONS, f"{where}.symbols", "a dim", dim)

    def _add(self, where: str, index: int, body: int) -> None:
        """One program calls another. A few that call each other twice would be more than any machine runs."""
        self.long[index] += self.long[body]
        _expect(self.long[index] <= MOST_EQUATIONS, where, f"at most {MOST_EQUATIONS} equations", self.long[index])

    def _equation(self, where: str, row: object, index: int, defined: set[int], define: Callable) -> None:
        _expect(isinstance(row, list) and len(row) == 7, where, "an equation", row)
        op, args, kwargs, outputs, many, source, tags = row  # type: ignore[misc]
        number = self.number(where, op, "ops")
        _expect(self.below[number] <= index, where, "programs that stand before this one", op)
        _expect(all(isinstance(x, list) for x in (args, kwargs, outputs)) and many in (0, 1), where, "lists", row)
        self._arg(where, ["t", *args], index, defined)
        for pair in kwargs:
            _expect(isinstance(pair, list) and len(pair) == 2 and is_name(pair[0]), where, "a keyword", pair)
            self._arg(where, pair[1], index, defined)
        if self.tables["ops"][number] == ["special", "check"]:
            _condition(where, args, [pair[0] for pair in kwargs])
        for v in outputs:
            if v != -1:
                define(where, v)
        self.number(where, source, "sources")
        self.number(where, tags, "tags")

    def _arg(self, where: str, a: object, index: int, defined: set[int]) -> None:
        if a is None or type(a) in (bool, str, float):
            return
        if type(a) is int:
            _expect(abs(a) <= 2 * LARGEST + 1, where, "a number of 64 bits", a)
            return
        _expect(isinstance(a, list) and a and isinstance(a[0], str), where, "an argument", a)
        match a:
            case ["v", v]:
                _expect(type(v) is int and v in defined, where, "a value that is defined before", v)
            case [("l" | "t"), *items]:
                for item in items:
                    self._arg(where, item, index, defined)
            case ["d", *pairs]:
                for pair in pairs:
                    _expect(isinstance(pair, list) and len(pair) == 2, where, "a key and a value", pair)
                    _expect(type(pair[0]) in (str, int, bool), where, "a plain key", pair[0])
                    self._arg(where, pair[1], index, defined)
            case ["slice", start, stop, step]:
                for item in (start, stop, step):
                    self._arg(where, item, index, defined)
            case ["torch", str(name)] if WORD.fullmatch(name):
                return
            case ["device", str(name)] if DEVICE.fullmatch(name):
                return
            case ["size", size]:
                self.sizes.read(size)
            case ["number", number]:
                self.sizes.number(number)
            case ["complex", int() | float(), int() | float()]:
                return
            case ["result", int()]:
                return
            case ["trace", number]:
                number = self.number(where, number, "traces")
                _expect(number < index, where, "a program that stands before this one", number)
                self._add(where, index, number)
            case ["op", *_]:
                self._overload(where, a)
            case _:
                _expect(False, where, "an argument", a)

    def _tensor(self, where: str, x: object) -> None:
        if type(x) is int:
            _expect(0 <= x < self.held, where, "one of the tensors that are held", x)
            return
        fine = isinstance(x, list) and len(x) == 5 and all(isinstance(x[i], str) for i in (0, 3, 4))
        _expect(fine and WORD.fullmatch(x[0]) and DEVICE.fullmatch(x[3]), where, "a tensor", x)  # type: ignore[index]
        shape, stride = x[1], x[2]  # type: ignore[index]
        _expect(isinstance(shape, list) and isinstance(stride, list) and len(shape) == len(stride), where, "sizes", x)
        for n in (*shape, *stride):
            _expect(type(n) is int and 0 <= n <= LARGEST, where, "a size", n)
        extent = sum((n - 1) * step for n, step in zip(shape, stride, strict=True) if n)
        _expect(extent < MOST_CONSTANT, where, f"a constant of at most {MOST_CONSTANT} elements", x)


def is_name(name: object) -> bool:
    """What a variable of a printed program can be called."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.startswith("__"):
        return False
    return not keyword.iskeyword(name) and name not in RESERVED


def _condition(where: str, args: list, symbols: list[str]) -> None:
    """The text of a `tessera.check`: arithmetic over its symbols, and nothing else."""
    fine = 2 <= len(args) <= 3 and all(isinstance(a, str) for a in args) and len(args[0]) <= 2000
    _expect(fine, where, "a condition and a message", args)
    try:
        tree = ast.parse(args[0], mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unserial(f"{where}: expected a condition, got {args[0][:80]!r}") from None
    for node in ast.walk(tree):
        fine = isinstance(node, _NODES)
        if isinstance(node, ast.Attribute):
            fine = isinstance(node.value, ast.Name) and node.value.id in ("builtins", "math") and node.attr in _MATH
        elif isinstance(node, ast.Call):
            fine = isinstance(node.func, ast.Attribute) and not node.keywords
        elif isinstance(node, ast.Name):
            fine = node.id in symbols or node.id in ("builtins", "math")
        elif isinstance(node, ast.Constant):
            fine = type(node.value) in (int, float, bool)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):  # a few powers of powers fill all memory
            powers = any(isinstance(inner, ast.Pow) for inner in ast.walk(node.left))
            fine = isinstance(node.right, ast.Constant) and node.right.value in range(9) and not powers
        _expect(fine, where, "a condition over sizes", args[0])
