"""Writes LLVM IR as text: values that are scalars or vectors, instructions, loops, helper functions.

An instruction's operands are brought to a common number of lanes by themselves (a scalar becomes a splat), and the
same pure instruction is written once within a scope. Mutable state lives in `slot`s, which are stack memory that
LLVM's first pass turns into registers. Lanes are many more than a machine register holds: LLVM splits such vectors,
which is how kernels are unrolled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FLOATS = ("float", "double")
SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "float": 4, "double": 8, "ptr": 8}
SUFFIX = {"half": "f16", "float": "f32", "double": "f64", "ptr": "p0"}


@dataclass(frozen=True, slots=True)
class V:
    """An operand: `%x` or a literal, of an LLVM element type; `lanes` 0 is a scalar."""

    name: str
    elem: str
    lanes: int = 0

    @property
    def type(self) -> str:
        return type_of(self.elem, self.lanes)

    @property
    def literal(self) -> bool:
        return not self.name.startswith("%")

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


def type_of(elem: str, lanes: int) -> str:
    return f"<{lanes} x {elem}>" if lanes else elem


def suffix(elem: str, lanes: int) -> str:
    """How an intrinsic's name spells a type."""
    scalar = SUFFIX.get(elem, elem)
    return f"v{lanes}{scalar}" if lanes else scalar


def number(elem: str, value: float | int | bool) -> str:
    """A literal; floats are written exactly, as the bits of a double, unless short decimals do."""
    if elem == "i1":
        return "true" if value else "false"
    if elem not in FLOATS:
        bits = SIZES[elem] * 8
        wrapped = int(value) & ((1 << bits) - 1)
        return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)
    exact = round_float(float(value)) if elem == "float" else float(value)
    if abs(exact) < 1e6 and (exact * 16).is_integer():
        return repr(exact)
    return f"0x{struct.unpack('<Q', struct.pack('<d', exact))[0]:016X}"


def round_float(value: float) -> float:
    """To the nearest float32; what is too large becomes infinite."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


class Code:
    """One function's body, and what the module needs beside it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.slots: list[str] = []
        self.declared: dict[str, str] = {}
        self.helpers: dict[str, str] = {}
        self.block = "entry"
        self.known: dict[str, V] = {}
        self.count = 0

    # --- plumbing ---

    def fresh(self, hint: str = "v") -> str:
        self.count += 1
        # "d1" and 23 must not meet "d12" and 3
        return f"{hint}.{self.count}" if hint[-1:].isdigit() else f"{hint}{self.count}"

    def emit(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def comment(self, text: str) -> None:
        self.lines.append(f"  ; {text}")

    def value(self, text: str, elem: str, lanes: int, hint: str = "v", pure: bool = True) -> V:
        """The result of an instruction; a pure one that was already written in this scope is not repeated."""
        if pure and (seen := self.known.get(text)):
            return seen
        v = V(f"%{self.fresh(hint)}", elem, lanes)
        self.emit(f"{v.name} = {text}")
        if pure:
            self.known[text] = v
        return v

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.block = name

    def go(self, label: str) -> None:
        self.emit(f"br label %{label}")

    def branch(self, condition: V, yes: str, no: str) -> None:
        self.emit(f"br i1 {condition.name}, label %{yes}, label %{no}")

    # --- constants, lanes ---

    def const(self, elem: str, value: float | int | bool, lanes: int = 0) -> V:
        return self.splat(V(number(elem, value), elem), lanes)

    def like(self, x: V, value: float | int | bool) -> V:
        """A constant of x's type."""
        return self.const(x.elem, value, x.lanes)

    def splat(self, x: V, lanes: int) -> V:
        if x.lanes == lanes:
            return x
        assert x.lanes == 0, f"{x} cannot have {lanes} lanes"
        if x.literal:
            return V(f"splat ({x.elem} {x.name})", x.elem, lanes)
        one = self.value(f"insertelement {type_of(x.elem, lanes)} poison, {x}, i64 0", x.elem, lanes)
        zeros = f"<{lanes} x i32> zeroinitializer"
        return self.value(f"shufflevector {one}, {one.type} poison, {zeros}", x.elem, lanes)

    def match(self, *xs: V) -> list[V]:
        lanes = max(x.lanes for x in xs)
        return [self.splat(x, lanes) for x in xs]

    def lane_numbers(self, elem: str, lanes: int, step: int = 1) -> V:
        return V("<" + ", ".join(f"{elem} {k * step}" for k in range(lanes)) + ">", elem, lanes)

    def lane(self, x: V, k: int) -> V:
        return self.value(f"extractelement {x}, i64 {k}", x.elem, 0) if x.lanes else x

    def part(self, x: V, start: int, lanes: int) -> V:
        """Some lanes in a row, as a vector."""
        if lanes == x.lanes:
            return x
        picks = ", ".join(f"i32 {start + k}" for k in range(lanes))
        return self.value(f"shufflevector {x}, {x.type} poison, <{lanes} x i32> <{picks}>", x.elem, lanes)

    # --- arithmetic ---

    def bin(self, op: str, a: V, b: V) -> V:
        a, b = self.match(a, b)
        assert a.elem == b.elem, f"{op} of {a} and {b}"
        return self.value(f"{op} {a}, {b.name}", a.elem, a.lanes)

    def fadd(self, a: V, b: V) -> V:
        return self.bin("fadd", a, b)

    def fsub(self, a: V, b: V) -> V:
        return self.bin("fsub", a, b)

    def fmul(self, a: V, b: V) -> V:
        return self.bin("fmul", a, b)

    def fdiv(self, a: V, b: V) -> V:
        return self.bin("fdiv", a, b)

    def fneg(self, a: V) -> V:
        return self.value(f"fneg {a}", a.elem, a.lanes)

    def compare(self, how: str, a: V, b: V) -> V:
        """`how` is an fcmp or icmp predicate, by the operands' type."""
        a, b = self.match(a, b)
        kind = "fcmp" if a.elem in FLOATS else "icmp"
        return self.value(f"{kind} {how} {a}, {b.name}", "i1", a.lanes)

    def select(self, c: V, a: V, b: V) -> V:
        if c.lanes == 0 and a.lanes == b.lanes == 0:
            return self.value(f"select {c}, {a}, {b}", a.elem, 0)
        c, a, b = self.match(c, a, b)
        return self.value(f"select {c}, {a}, {b}", a.elem, a.lanes)

    def convert(self, op: str, x: V, elem: str) -> V:
        return self.value(f"{op} {x} to {type_of(elem, x.lanes)}", elem, x.lanes)

    def freeze(self, x: V) -> V:
        """Some number, always the same, where LLVM holds the result to be undefined."""
        return self.value(f"freeze {x}", x.elem, x.lanes)

    def call(self, base: str, *args: V, elem: str = "", pure: bool = True) -> V:
        """An intrinsic overloaded on its first argument's type, giving that type (or `elem`)."""
        args = tuple(self.match(*args))
        name = f"llvm.{base}.{suffix(args[0].elem, args[0].lanes)}"
        return self.call_named(name, elem or args[0].elem, args[0].lanes, args, pure)

    def call_named(self, name: str, elem: str, lanes: int, args: Sequence[V], pure: bool = True) -> V:
        result = type_of(elem, lanes)
        self.declare(name, result, [a.type for a in args])
        return self.value(f"call {result} @{name}({', '.join(map(str, args))})", elem, lanes, pure=pure)

    def declare(self, name: str, result: str, args: Sequence[str]) -> None:
        if name not in self.helpers:
            self.declared[name] = f"declare {result} @{name}({', '.join(args)})"

    def fma(self, a: V, b: V, c: V) -> V:
        return self.call("fmuladd", a, b, c)

    # --- memory ---

    def slot(self, elem: str, lanes: int, hint: str = "slot", count: int = 1) -> V:
        """Stack memory, made at the function's start."""
        name = f"%{self.fresh(hint)}"
        many = f", i64 {count}" if count != 1 else ""
        self.slots.append(f"  {name} = alloca {type_of(elem, lanes)}{many}, align 64")
        return V(name, "ptr")

    def load(self, elem: str, lanes: int, address: V, align: int = 0, hint: str = "v") -> V:
        text = f"load {type_of(elem, lanes)}, {address}, align {align or SIZES[elem]}"
        return self.value(text, elem, lanes, hint, pure=False)

    def store(self, x: V, address: V, align: int = 0) -> None:
        self.emit(f"store {x}, {address}, align {align or SIZES[x.elem]}")

    def address(self, base: V, elem: str, offset: V) -> V:
        """base + offset elements; a vector of addresses where the offset is a vector."""
        return self.value(f"getelementptr {elem}, {base}, {offset}", "ptr", offset.lanes, "p")

    # --- control ---

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is computed inside may not be reused after it."""
        before = dict(self.known)
        yield
        self.known = before

    @contextmanager
    def loop(self, start: V, stop: V, step: int | V, hint: str) -> Iterator[V]:
        """for i in range(start, stop, step)"""
        tag = self.fresh(hint)
        body, latch, done = f"{tag}.body", f"{tag}.latch", f"{tag}.done"
        by = step if isinstance(step, V) else self.const("i64", step)
        before = self.block
        self.branch(self.compare("slt", start, stop), body, done)
        self.label(body)
        i = V(f"%{tag}", "i64")
        self.emit(f"{i.name} = phi i64 [ {start.name}, %{before} ], [ {i.name}.next, %{latch} ]")
        with self.scope():
            yield i
            self.go(latch)
        self.label(latch)
        self.emit(f"{i.name}.next = add nsw i64 {i.name}, {by.name}")
        self.emit(f"{i.name}.more = icmp slt i64 {i.name}.next, {stop.name}")
        self.branch(V(f"{i.name}.more", "i1"), body, done)
        self.label(done)

    @contextmanager
    def when(self, condition: V, hint: str = "if") -> Iterator[None]:
        tag = self.fresh(hint)
        self.branch(condition, f"{tag}.then", f"{tag}.end")
        self.label(f"{tag}.then")
        with self.scope():
            yield
            self.go(f"{tag}.end")
        self.label(f"{tag}.end")

    # --- helper functions ---

    def each_lane(self, function: str, *args: V, elem: str = "") -> V:
        """A C function applied lane by lane, by a loop in a helper function of its own."""
        args = tuple(self.match(*args))
        first, lanes = args[0], args[0].lanes
        elem = elem or first.elem
        if not lanes:
            return self.call_named(function, elem, 0, args)
        self.declare(function, elem, [a.elem for a in args])
        name = f"each.{function}.v{lanes}"
        if name not in self.helpers:
            self.helpers[name] = _each_text(name, function, elem, lanes, [a.elem for a in args])
        joined = ", ".join(map(str, args))
        return self.value(f"call {type_of(elem, lanes)} @{name}({joined})", elem, lanes)


def _each_text(name: str, function: str, elem: str, lanes: int, elems: list[str]) -> str:
    result = type_of(elem, lanes)
    params = ", ".join(f"{type_of(e, lanes)} %x{k}" for k, e in enumerate(elems))
    picks = [f"  %e{k} = extractelement {type_of(e, lanes)} %x{k}, i64 %i" for k, e in enumerate(elems)]
    args = ", ".join(f"{e} %e{k}" for k, e in enumerate(elems))
    return "\n".join(
        [
            f"define internal {result} @{name}({params}) noinline {{",
            "entry:",
            "  br label %body",
            "body:",
            "  %i = phi i64 [ 0, %entry ], [ %next, %body ]",
            f"  %sum = phi {result} [ poison, %entry ], [ %new, %body ]",
            *picks,
            f"  %r = call {elem} @{function}({args})",
            f"  %new = insertelement {result} %sum, {elem} %r, i64 %i",
            "  %next = add i64 %i, 1",
            f"  %more = icmp ult i64 %next, {lanes}",
            "  br i1 %more, label %body, label %done",
            "done:",
            f"  ret {result} %new",
            "}",
        ]
    )
