"""The body of a Python loop as the body of a scan: what goes round, which rows it reads, what it gives.

In: the statements of a loop, the name of its turn and what runs after it. Out: a `Body`, or None where the loop does
anything but compute.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_CARRY, _ROWS = "_tessera_carry", "_tessera_rows"
# What a body may consist of. No jump, no `with`, no definition, and no attribute that is assigned.
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If, ast.For, ast.Pass)
_EXPRESSIONS = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)


@dataclass(frozen=True)
class Helpers:
    module: str
    name: str


HELPERS = Helpers("tessera.frontends.open_lists", "_tessera_open")


def load(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def call(helper: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(load(HELPERS.name), helper, ast.Load()), list(args), [])


def number(x: int | None) -> ast.expr:
    return ast.Constant(x)


def names_in(node: ast.AST, kind: type) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, kind)}


def is_bound_elsewhere(fn: ast.AST) -> bool:
    """Whether the text has names that mean something else inside a class, or assigns names of other scopes."""
    words = (getattr(x, "id", None) or getattr(x, "attr", "") for x in ast.walk(fn))
    declared = any(isinstance(x, (ast.Global, ast.Nonlocal)) for x in ast.walk(fn))
    return declared or any(w.startswith("__") and not w.endswith("__") for w in words)


@dataclass
class Body:
    """`read` and `stored`: (tensor, dim, offset), by the name that a turn has for the row; dim None is what the loop is
    over. `appended`, `last`: lists and names after the loop, by what a turn gives them."""

    statements: list[ast.stmt]
    carried: list[str] = field(default_factory=list)
    read: dict[str, tuple[ast.expr, int | None, int]] = field(default_factory=dict)
    appended: dict[str, str] = field(default_factory=dict)
    stored: dict[str, tuple[ast.expr, int, int]] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(body: list[ast.stmt], turn: str, counts: bool, after: list[ast.stmt]) -> Body | None:
        """The body of a loop; `counts`: whether its turn is a number of a range, or else a row of what it is over."""
        if any(isinstance(s, ast.Expr) and not isinstance(s.value, ast.Constant) and not _append(s) for s in body):
            return None
        return Body._made(body, turn, counts, after)

    @staticmethod
    def of_value(value: ast.expr, turn: str, counts: bool) -> Body | None:
        """What a list comprehension computes."""
        return Body._made([ast.Expr(value)], turn, counts, [])

    @staticmethod
    def _made(body: list[ast.stmt], turn: str, counts: bool, after: list[ast.stmt]) -> Body | None:
        made = Body(copy.deepcopy(body))
        if not all(map(_computes, made.statements)) or turn in _assigned(made.statements) or _is_live(turn, after):
            return None
        if not made._take_out(turn) or (counts and not made._index(turn)):
            return None
        if not counts:
            made.read[f"{_ROWS}0"] = (number(None), None, 0)
            made.statements.insert(0, ast.Assign([ast.Name(turn, ast.Store())], load(f"{_ROWS}0"), lineno=1))
        names = _assigned(made.statements) - {turn}
        made.carried = sorted(n for n in names if _reads_first(made.statements, n))
        lost = sorted(n for n in names - set(made.carried) if not n.startswith("_tessera") and _is_live(n, after))
        made.last = {f"_tessera_last{i}": n for i, n in enumerate(lost)}
        left = set().union(*(names_in(s, ast.Load) for s in made.statements))
        return None if left & {*made.appended.values()} or _roots(made) & names else made

    def _take_out(self, turn: str) -> bool:
        """Appends and stores become assignments of what a turn gives."""
        for i, stmt in enumerate(self.statements):
            made, value = f"_tessera_given{i}", None
            if (to := _append(stmt)) is not None:
                if to[0] in self.appended.values():
                    return False
                self.appended[made], value = to
            elif isinstance(stmt, ast.Assign) and isinstance(stmt.targets[0], ast.Subscript):
                place = _row(stmt.targets[0], turn) if len(stmt.targets) == 1 else None
                if place is None or place[2]:
                    return False
                self.stored[made], value = place[:1] + place[1], stmt.value
            if value is not None:
                self.statements[i] = ast.copy_location(ast.Assign([ast.Name(made, ast.Store())], value), stmt)
        nested = [s for stmt in self.statements if isinstance(stmt, (ast.If, ast.For)) for s in ast.walk(stmt)]
        return not any(
            isinstance(s, ast.Subscript) and isinstance(s.ctx, ast.Store) or isinstance(s, ast.Expr) for s in nested
        )

    def _index(self, turn: str) -> bool:
        """`x[:, t, a]` becomes `row[:, a]`; False where the number of the turn is left over."""
        rows = _Rows(turn)
        self.statements = [rows.visit(s) for s in self.statements]
        self.read = {name: place for name, place in rows.found.values()}
        return not any(turn in names_in(s, ast.Load) for s in self.statements)

    def names(self) -> set[str]:
        return _assigned(self.statements)

    @property
    def row_names(self) -> list[str]:
        return list(self.read)

    def rows(self) -> ast.expr:
        triples = [ast.Tuple([x, number(dim), number(k)], ast.Load()) for x, dim, k in self.read.values()]
        return ast.Tuple(list(triples), ast.Load())

    def scan(self, over: str, turn: str, inside: Callable[[list[ast.stmt]], list[ast.stmt]]) -> list[ast.stmt]:
        """The loop as statements: a function for its turn, the scan, and what is known after it."""
        given = [*self.appended, *self.stored, *self.last]
        now = [f"{name} = {n}" for name, n in self.last.items()]
        # A scan wants results that are tensors of their own, and lie as they did the turn before.
        back = f"return {_tuple(_clone(self.carried) or [f'{_CARRY}[0].clone()'])}, {_tuple(_clone(given))}"
        text = [f"def {turn}({_CARRY}, {_ROWS}): pass", f"{_target([*self.carried], given)} = None"]
        make, bind = ast.parse("\n".join(text)).body
        assert isinstance(make, ast.FunctionDef) and isinstance(bind, ast.Assign)
        take = [f"{_tuple(names)} = {of}" for names, of in ((self.carried, _CARRY), (self.row_names, _ROWS)) if names]
        make.body = [*_parsed(take), *inside(self.statements), *_parsed([*now, back])]
        bind.value = call("loop", load(over), load(turn), _loads(self.carried), self.rows())
        ends = _parsed([f"{n} = {name}[-1]" for name, n in self.last.items()])
        for made, to in self.appended.items():
            ends.append(ast.Assign([ast.Name(to, ast.Store())], call("appended", load(to), load(made))))
        for made, (to, dim, offset) in self.stored.items():
            ends.append(ast.Expr(call("stored", to, load(over), number(dim), number(offset), load(made))))
        return [make, bind, *ends]


class _Rows(ast.NodeTransformer):
    def __init__(self, turn: str) -> None:
        self.turn = turn
        self.found: dict[tuple, tuple[str, tuple[ast.expr, int | None, int]]] = {}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        place = _row(node, self.turn)
        if place is None:
            return node
        of, (dim, offset), rest = place
        key = (ast.dump(of), dim, offset)
        name, _ = self.found.setdefault(key, (f"{_ROWS}{len(self.found)}", (of, dim, offset)))
        if all(map(_is_whole, rest)):
            return ast.copy_location(load(name), node)
        return ast.copy_location(ast.Subscript(load(name), ast.Tuple(rest, ast.Load()), node.ctx), node)


def _row(node: ast.Subscript, turn: str) -> tuple[ast.expr, tuple[int, int], list[ast.expr]] | None:
    """`x[:, t + 1, a]` as x, (1, 1) and `[:, a]`; None where the number of the turn stands elsewhere. What remains is
    empty, too, where it is whole."""
    parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    dim = next((i for i, part in enumerate(parts) if not _is_whole(part)), None)
    if dim is None or not _is_path(node.value):
        return None
    offset, rest = _offset(parts[dim], turn), [*parts[:dim], *parts[dim + 1 :]]
    if offset is None or any(turn in names_in(part, ast.Load) for part in rest):
        return None
    return copy.deepcopy(node.value), (dim, offset), [] if all(map(_is_whole, rest)) else rest


def _offset(node: ast.expr, turn: str) -> int | None:
    match node:
        case ast.Name(id=name) if name == turn:
            return 0
        case ast.BinOp(ast.Name(id=name), (ast.Add() | ast.Sub()) as op, ast.Constant(value=int(k))) if name == turn:
            return k if isinstance(op, ast.Add) else -k
    return None


def _is_whole(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and node.lower is None and node.upper is None and node.step is None


def _is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_path(node.value))


def _append(stmt: ast.stmt) -> tuple[str, ast.expr] | None:
    match stmt:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(id=to), "append"), [value], [])):
            return to, value
    return None


def _computes(stmt: ast.stmt) -> bool:
    inner = [x for x in ast.walk(stmt) if isinstance(x, ast.stmt)]
    if not all(isinstance(x, _STATEMENTS) for x in inner) or any(isinstance(x, _EXPRESSIONS) for x in ast.walk(stmt)):
        return False
    return not any(isinstance(x, ast.Attribute) and not isinstance(x.ctx, ast.Load) for x in ast.walk(stmt))


def _assigned(body: list[ast.stmt]) -> set[str]:
    return {name for stmt in body for x in ast.walk(stmt) if isinstance(x, ast.stmt) for name in _targets(x)}


def _targets(stmt: ast.stmt) -> Iterator[str]:
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [getattr(stmt, "target", None)]
    for target in targets:
        if target is not None:
            yield from names_in(target, ast.Store)


def _reads_first(body: list[ast.stmt], name: str) -> bool:
    """Whether a turn may read what the turn before it left under this name."""
    for stmt in body:
        first = stmt.value if isinstance(stmt, (ast.Assign, ast.AnnAssign)) else getattr(stmt, "iter", None)
        if first is not None and name not in names_in(first, ast.Load) and name in _targets(stmt):
            return False
        if name in names_in(stmt, ast.Load) or name in _assigned([stmt]):
            return True
    return False


def _is_live(name: str, after: list[ast.stmt]) -> bool:
    return _reads_first(after, name) if any(name in names_in(s, ast.Load) for s in after) else False


def _roots(body: Body) -> set[str]:
    """Tensors whose rows are read, or written: a turn may not change which they are, nor read what it has written."""
    places = [x for x, _, _ in (*body.read.values(), *body.stored.values())]
    written = {ast.dump(x) for x, _, _ in body.stored.values()}
    mentioned = {ast.dump(x) for s in body.statements for x in ast.walk(s) if isinstance(x, (ast.Name, ast.Attribute))}
    if written & (mentioned | {ast.dump(x) for x, _, _ in body.read.values()}):
        return _assigned(body.statements)  # refused
    return set().union(*(names_in(x, ast.Load) for x in places)) if places else set()


def _parsed(lines: list[str]) -> list[ast.stmt]:
    return [stmt for line in lines for stmt in ast.parse(line).body]


def _clone(names: list[str]) -> list[str]:
    return [f"{name}.contiguous().clone()" for name in names]


def _tuple(names: list[str]) -> str:
    return f"({', '.join(names)}{',' if names else ''})"


def _target(carried: list[str], given: list[str]) -> str:
    return f"({_tuple(carried) if carried else '_tessera_none'}, {_tuple(given) if given else '_tessera_none'})"


def _loads(names: list[str]) -> ast.expr:
    return ast.Tuple([load(name) for name in names], ast.Load())
