"""Prints a Trace as Python that runs.

In: a Trace. Out: the text of one function whose lines are its equations (`print_trace`), the text of a module
that runs by itself (`print_module`), or that function made callable (`compile_trace`), where every operator
is bound to a global so that a call costs no attribute look-up. All three come from the same lines. A sub-trace
is a function above it, printed once however often it is called; one that reads a size of the program around it
stands inside that program.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import os
import re
import sys
import weakref
from collections.abc import Callable, Mapping

import torch

from tessera.ir.block import Block
from tessera.ir.definitions import INDENT, Definitions
from tessera.ir.dist import Collective
from tessera.ir.equation import NO_GRAD, Arg, Equation, Operator, Special, Value, recompute_region, symbols_in
from tessera.ir.expression import NAMES, expression
from tessera.ir.formula import Formula
from tessera.ir.mesh import Mesh
from tessera.ir.schema import short_name
from tessera.ir.types import SYMBOLIC, TensorType
from tessera.torch_internals.operators import OpOverload, op_name, overload_name
from tessera.util.code import code_of

HEADER = """import builtins
import math

import torch

from tessera.ir.specials import specials as tessera

aten = torch.ops.aten
inf, nan = float("inf"), float("nan")
"""
# What programs find around them, what nobody reads, and the list that a boxed program is given.
RESERVED = frozenset((*NAMES, "tessera", "aten", "dist", "collectives", "inf", "nan", "_", "_given"))
Around = Callable[[int, str], list[str]]
Line = tuple[str, Equation | None]  # a line, and the equation it belongs to
_numbers = itertools.count()


def print_trace(trace: Block, types: bool = True, sizes: Mapping[str, str] | None = None) -> str:
    """The program for a person: one equation a line, with types and the user's lines beside them. `sizes`: what they
    call sizes, by their symbols; a name that is a value's too is left out."""
    taken = _value_names(trace) if sizes else set()
    names = {symbol: name for symbol, name in (sizes or {}).items() if name not in taken | RESERVED}
    return _Module(trace, operator_name, types, names=names).text()


def print_module(trace: Block, constants: str = "", title: str = "") -> str:
    """A program that runs by itself. Tensors it closes over are read from the file `constants`; without one, they are
    called `constants` and whoever runs the text brings them. What executors have claimed stands above the program, as
    the operators it is (`definitions`)."""
    head = f"# {title}\n{HEADER}" if title else HEADER
    if trace.constants:
        names = ", ".join(v.name for v in trace.constants)
        head += f"{names}, = {f'torch.load({constants!r}, weights_only=True)' if constants else 'constants'}\n"
    for mesh in {eqn.op.mesh for eqn in trace.equations if isinstance(eqn.op, Collective)}:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
        head += f"\nfrom tessera.ir.specials import collectives\n\ndist = collectives({axes})\n"
    claimed = Definitions(trace, _value_names(trace))

    def reference(op: Operator, args: tuple, kwargs: dict) -> str:
        return claimed.name(op) or operator_name(op, args, kwargs)

    module = _Module(trace, reference, types=True)
    above = "".join(f"{line}\n" for line in claimed.lines(module.function_text))
    return f"{head}\n\n{above}{module.text()}"


def save_module(trace: Block, path: str, title: str = "") -> None:
    constants = os.path.splitext(os.path.abspath(path))[0] + ".constants.pt"
    if trace.constants:
        torch.save(tuple(t.detach() for t in trace.constants.values()), constants)
    with open(path, "w", encoding="utf-8") as file:
        file.write(print_module(trace, constants, title))


def print_line(trace: Block, eqn: Equation) -> str:
    """One equation as the printed program has it, with its types."""
    writer = _Function(_Module(trace, operator_name, types=True), trace)
    return writer.comment(writer.equation(eqn), eqn)


def equation_lines(trace: Block) -> list[Line]:
    """The program without comments, sub-traces included: each line, and the equation it belongs to."""
    return _Module(trace, operator_name, types=False).lines()


def compile_trace(
    trace: Block,
    bind: Callable[[Operator], Callable] | None = None,
    dead: dict[int, list[Value]] | None = None,
    around: Around | None = None,
    names_in_scope: dict[str, object] | None = None,
    boxed: bool = False,
) -> Callable:
    """The trace as a Python function over tensors. `dead[i]` lists the values nothing reads after equation i.

    `boxed`: it takes one list of its inputs and empties it, so that an input nobody else holds dies where `dead` says.
    `around(i, line)` gives the lines that stand where equation i's would, for whoever measures a program; what they
    mention is found in `names_in_scope`.
    """
    scope: dict[str, object] = {**NAMES, "aten": torch.ops.aten, "inf": math.inf, "nan": math.nan}
    scope.update(names_in_scope or {})
    names: dict[Operator, str] = {}
    values = _value_names(trace)

    def reference(op: Operator, args: tuple, kwargs: dict) -> str:
        if op not in names:
            base = identifier(operator_name(op).removeprefix("torch.ops.").replace(".", "_"))
            name, count = base, 1
            while name in scope or name in values:
                name, count = f"{base}_{count}", count + 1
            scope[name] = bind(op) if bind else callable_of(op)
            names[op] = name
        return names[op]

    text = _Module(trace, reference, types=False, scope=scope).text(dead, around, boxed)
    scope.update({v.name: tensor for v, tensor in trace.constants.items()})
    # The text stands in linecache, so that a traceback shows the generated line, for as long as the function lives.
    filename = f"<tessera {trace.name} {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(code_of(text, filename), scope)
    fn = scope[identifier(trace.name)]
    weakref.finalize(fn, linecache.cache.pop, filename, None).atexit = False
    fn.source = text  # type: ignore[attr-defined]
    return fn  # type: ignore[return-value]


# Where a slice's end stands among its arguments. PyTorch writes "to the end" as the largest number there is.
_END = {torch.ops.aten.slice.Tensor: 3, torch.ops.aten.slice_scatter.default: 4}


def _without_end(eqn: Equation) -> tuple[Arg, ...]:
    """The arguments of an equation as a person writes them: `aten.slice(x, 0, 1)` goes to the end."""
    place = _END.get(eqn.op, len(eqn.args))  # type: ignore[call-overload]
    end, after = eqn.args[place : place + 1], eqn.args[place + 1 :]
    if not end or type(end[0]) is not int or end[0] != sys.maxsize:
        return eqn.args
    return (*eqn.args[:place], None, *after) if after else eqn.args[:place]


def callable_of(op: Operator) -> Callable:
    return op.fn if isinstance(op, Special) else op


def operator_name(op: Operator, args: tuple = (), kwargs: dict | None = None) -> str:
    """`aten.linear`; the overload is named only where a call by the short name could mean another."""
    if isinstance(op, Special):
        return f"{op.namespace}.{op.name}"
    short = short_name(op, args, kwargs or {})
    return short if op.namespace == "aten" else f"torch.ops.{short}"


def identifier(text: str) -> str:
    name = re.sub(r"\W", "_", text)
    if not name or name[0].isdigit() or keyword.iskeyword(name) or name in RESERVED:
        name = f"v_{name}"
    return name


class _Module:
    """The functions of one program: sub-traces that stand by themselves first, each once, the trace itself last."""

    def __init__(
        self,
        trace: Block,
        reference: Callable[[Operator, tuple, dict], str],
        types: bool,
        scope: dict[str, object] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.trace, self.reference, self.types, self.scope = trace, reference, types, scope
        self.size_names, self.symbols = names, re.compile(rf"\b({'|'.join(names)})\b") if names else None
        self.above: list[list[Line]] = []
        self.names: dict[Block, str] = {}
        self.taken: set[str] | None = None

    def text(
        self, dead: dict[int, list[Value]] | None = None, around: Around | None = None, boxed: bool = False
    ) -> str:
        return "\n".join(line for line, _ in self.lines(dead, around, boxed)) + "\n"

    def lines(
        self, dead: dict[int, list[Value]] | None = None, around: Around | None = None, boxed: bool = False
    ) -> list[Line]:
        main = _Function(self, self.trace, dead, around).lines(self.trace.name, boxed)
        return [line for lines in self.above for line in (*lines, ("", None), ("", None))] + main

    def function_text(self, trace: Block, name: str, over: dict[int, int]) -> list[str]:
        return [line for line, _ in _Function(self, trace).lines(name, over=over)]

    def sized(self, text: str) -> str:
        """The text of a size or a type, with sizes by the names that people gave them."""
        return self.symbols.sub(lambda m: self.size_names[m[1]], text) if self.symbols else text  # type: ignore[index]

    def function(self, trace: Block, caller: _Function) -> str:
        """The name of the function for a sub-trace, which is written now if it is not there yet."""
        if trace in self.names:
            return self.names[trace]
        if self.taken is None:  # a function's name must be no variable's
            self.taken = {identifier(self.trace.name), *_value_names(self.trace)}
        base = name = identifier(trace.name)
        count = 1
        while name in self.taken or name in (self.scope or ()):
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        if self.scope is not None:
            self.scope[name] = None  # bound when the text is executed; no operator may take the name
            self.scope.update({v.name: t for v, t in trace.constants.items()})
        lines = _Function(self, trace).lines(name)
        if _free_symbols(trace):
            caller.helpers += lines
        else:
            self.names[trace] = name
            self.above.append(lines)
        return name


def _complex(a: complex) -> str:
    """`(1+2j)` is a sum as Python reads it: it has no infinite parts, and drops signs of zeros."""
    plain = all(math.isfinite(x) and x for x in (a.real, a.imag))
    return repr(a) if plain else f"builtins.complex({a.real!r}, {a.imag!r})"


def _value_names(trace: Block) -> set[str]:
    """Names of all values of a program and its sub-traces."""
    names = {v.name for v in trace.values()}
    return names.union(*(_value_names(body) for body in trace.inner()))


def _meshes(trace: Block) -> list[Mesh]:
    """The mesh that the values of a program lie on, where they lie on one."""
    types = (v.type for v in trace.values())
    placed = (t.placement for t in types if isinstance(t, TensorType) and t.placement is not None)
    return [placement.mesh for placement in itertools.islice(placed, 1)]


def _free_symbols(trace: Block) -> set[str]:
    """Sizes a sub-trace mentions and does not read off its own values."""
    used = set[str]().union(*(symbols_in((eqn.args, eqn.kwargs)) for eqn in trace.equations))
    return used.union(*(_free_symbols(body) for body in trace.inner())) - set(trace.symbols)


_WORDS = re.compile(r"[A-Za-z_]\w*")


class _Function:
    """Renders one trace."""

    def __init__(
        self,
        module: _Module,
        trace: Block,
        dead: dict[int, list[Value]] | None = None,
        around: Around | None = None,
    ) -> None:
        self.module, self.trace, self.dead = module, trace, dead or {}
        self.around = around or (lambda index, line: [line])
        self.reference, self.types = module.reference, module.types
        self.helpers: list[Line] = []
        self.sizes: dict[str, str] = {}  # lines that read one, and its name

    def lines(self, name: str, boxed: bool = False, over: dict[int, int] | None = None) -> list[Line]:
        """`over`: outputs that are written over inputs instead of given back, both by position."""
        trace, over = self.trace, over or {}
        body: list[Line] = [(line, None) for line in self.symbol_lines(trace.inputs)]
        for index in range(len(trace.equations)):
            body += self.equation_block(index)
        for target, value in trace.mutations.items():
            if value is not target:
                copy = self.reference(torch.ops.aten.copy_.default, (target, value), {})
                body.append((f"{copy}({target.name}, {value.name})", None))
        for place, target in over.items():
            written, value = trace.inputs[target].name, self.arg(trace.outputs[place])
            body.append((f"{written}.view_as({value}).copy_({value})", None))
        outputs = tuple(o for place, o in enumerate(trace.outputs) if place not in over)
        body.append((f"return {self.tuple(outputs)}", None))
        body = body if self.types else self.without_unread_sizes(body)
        names = ", ".join(v.name for v in trace.inputs)
        head = [f"def {identifier(name)}({'_given' if boxed else names}):"]
        if boxed:
            head += [f"{INDENT}[{names}] = _given", f"{INDENT}_given.clear()"]
        if self.types:
            head += [f"{INDENT}# mesh {mesh}" for mesh in _meshes(trace)]
            sized = self.module.sized
            head += [f"{INDENT}# {v.name}: {sized(str(v.type))}" for v in (*trace.inputs, *trace.constants)]
        return [(line, None) for line in head] + [(INDENT + line, eqn) for line, eqn in body]

    def equation_block(self, index: int) -> list[Line]:
        """An equation with the functions it needs before it, and the names it brings and ends after it."""
        eqn, equations = self.trace.equations[index], self.trace.equations
        line = self.equation(eqn)
        block, self.helpers = self.helpers, []
        # Where a person reads, and edits, the program says what carries no gradient and what backward runs again;
        # run, it needs not.
        contexts = self.contexts(eqn)
        if contexts and (not index or self.contexts(equations[index - 1]) != contexts):
            block.append((f"with {', '.join(contexts)}:", eqn))
        line = f"{INDENT}{line}" if contexts else line
        # A rank that waits for others in vain says at which line, so exchanges keep the user's where they run.
        commented = self.types or getattr(eqn.op, "namespace", "") == "dist"
        own = self.around(index, self.comment(line, eqn) if commented else line) + self.symbol_lines(eqn.results())
        if self.dead.get(index):
            own.append(f"del {', '.join(v.name for v in self.dead[index])}")
        return block + [(line, eqn) for line in own]

    def contexts(self, eqn: Equation) -> list[str]:
        """The tags of an equation, as a program says them."""
        if not self.types or not eqn.tags:
            return []
        region = recompute_region(eqn.tags)
        no_grad = ["torch.no_grad()"] if NO_GRAD in eqn.tags else []
        return no_grad if region is None else [*no_grad, f"tessera.recompute({region!r})"]

    def symbol_lines(self, defined: tuple[Value, ...] | list[Value]) -> list[str]:
        """Bind the symbolic sizes that these values bring."""
        lines = []
        for symbol, (value, dim) in self.trace.symbols.items():
            if value in defined and value.name != symbol:
                name = self.module.sized(symbol)
                lines.append(f"{name} = {value.name}" + ("" if dim is None else f".shape[{dim}]"))
                self.sizes[lines[-1]] = name
        return lines

    def without_unread_sizes(self, body: list[Line]) -> list[Line]:
        """Run, a program reads no size that it does not use: nobody may know it any more."""
        if not self.sizes:
            return body
        read = {word for line, _ in body if line.strip() not in self.sizes for word in _WORDS.findall(line)} | {""}
        return [(line, eqn) for line, eqn in body if self.sizes.get(line.strip(), "") in read]

    def equation(self, eqn: Equation) -> str:
        parts = [self.arg(a) for a in _without_end(eqn)] + [f"{k}={self.arg(a)}" for k, a in eqn.kwargs.items()]
        call = f"{self.reference(eqn.op, eqn.args, eqn.kwargs)}({', '.join(parts)})"
        names = [v.name if v is not None else "_" for v in eqn.outputs]
        if not eqn.many:
            return f"{names[0]} = {call}" if names else call
        return f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}" if names else call

    def comment(self, line: str, eqn: Equation) -> str:
        types = self.module.sized(", ".join(str(v.type) for v in eqn.results()))
        notes = "  ".join(filter(None, (types, str(eqn.source))))
        return f"{line:<60}  # {notes}" if notes else line

    def tuple(self, items: tuple[Arg, ...]) -> str:
        inner = ", ".join(self.arg(item) for item in items)
        return f"({inner},)" if len(items) == 1 else f"({inner})"

    def arg(self, a: Arg) -> str:
        match a:
            case Value():
                return a.name
            case tuple():
                return self.tuple(a)
            case list():
                return f"[{', '.join(map(self.arg, a))}]"
            case dict():
                return "{" + ", ".join(f"{k!r}: {self.arg(v)}" for k, v in a.items()) + "}"
            case slice():
                return f"builtins.slice({self.arg(a.start)}, {self.arg(a.stop)}, {self.arg(a.step)})"
            case torch.device():
                return f"torch.device({str(a)!r})"
            case complex():
                return _complex(a)
            case None | bool() | int() | str() | float():
                return repr(a)
            case torch.dtype() | torch.layout() | torch.memory_format():
                return repr(a)
            case _ if isinstance(a, (*SYMBOLIC, Formula)):
                return self.module.sized(expression(a))
            case Block():
                return self.module.function(a, self)
            case _:
                return self.opaque(a)

    def opaque(self, a: Arg) -> str:
        """An object with no text of its own: bound by name where the program is run, shown where it is read."""
        if isinstance(a, OpOverload):
            return f"torch.ops.{a.namespace}.{op_name(a)}.{overload_name(a)}"
        scope = self.module.scope
        if scope is None:
            return f"<{type(a).__name__}>"
        name = identifier(f"object_{type(a).__name__}_{len(scope)}")
        scope[name] = a
        return name
