"""Python loops over open sizes, for `torch.export`, which would run such a loop for the example's size alone.

In: the code of functions that iterated over an open size. Out: while inside `rewritten`, those functions have code in
which such a loop is a call of `open_lists.loop`, a scan over rows:

    for t in range(n):                       def body(carry, rows): h, = carry; x_t, = rows; …
        h = cell(x[:, t], h)           -->   (h,), (y,) = loop(range, body, (h,), ((x, 1, 0),))
        ys.append(h)                         ys = appended(ys, y)

A loop is rewritten where its body computes: it assigns names, appends to lists that are empty and have one name, stores
rows, and uses the number of the turn as an index alone. What goes round is what the body reads before it assigns it.
Everything else stays as it is, and PyTorch refuses it as before. What a body does behind a call is TorchDynamo's to
judge, which traces it for scan.
"""

from __future__ import annotations

import ast
import gc
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType

from tessera.frontends.open_bodies import HELPERS, Body, call, is_bound_elsewhere, load, names_in

_Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


@contextmanager
def rewritten(codes: Iterable[CodeType]) -> Iterator[bool]:
    """While inside, functions of these codes loop over open sizes; whether there is one among them that can."""
    new = {code: made for code in codes if (made := _new_code(code)) is not None}
    changed = [(fn, fn.__code__) for code in new for fn in _functions(code)]
    try:
        for fn, code in changed:
            fn.__code__ = new[code]
        yield bool(changed)
    finally:
        for fn, code in changed:
            fn.__code__ = code


def _functions(code: CodeType) -> list[FunctionType]:
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()  # referrers are looked for among what is not
    try:
        return [x for x in gc.get_referrers(code) if isinstance(x, FunctionType) and x.__code__ is code]
    finally:
        if frozen:
            gc.freeze()


def _new_code(code: CodeType) -> CodeType | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None  # no text of it: a lambda in a longer line, code that was made while running
    fn = tree.body[0] if tree.body else None
    if not isinstance(fn, ast.FunctionDef) or fn.name != code.co_name or is_bound_elsewhere(fn):
        return None
    fn.decorator_list = []
    writer = _Writer(fn)
    fn.body = [ast.parse(f"import {HELPERS.module} as {HELPERS.name}").body[0], *writer.block(fn.body, [])]
    if not writer.count:
        return None
    outside = [ast.parse(f"{name} = None").body[0] for name in code.co_freevars]
    outer = ast.parse("def outer(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [*outside, fn]
    ast.increment_lineno(fn, code.co_firstlineno - 1)  # the text begins with a decorator, as the code does
    module = compile(ast.fix_missing_locations(ast.Module([outer], [])), code.co_filename, "exec", dont_inherit=True)
    made = _inner(_inner(module, "outer"), fn.name)
    return made if made is not None and made.co_freevars == code.co_freevars else None


def _inner(code: CodeType | None, name: str) -> CodeType | None:
    found = (x for x in (code.co_consts if code else ()) if isinstance(x, CodeType) and x.co_name == name)
    return next(found, None)


class _Writer(ast.NodeTransformer):
    """Rewrites what loops over open sizes in a function; `count`: how many places."""

    def __init__(self, fn: ast.FunctionDef) -> None:
        self.count = 0
        self.closed_over = _closed_over(fn)
        self.lists = _Lists(fn)

    def block(self, body: list[ast.stmt], after: list[ast.stmt]) -> list[ast.stmt]:
        """Statements, and those that run after them."""
        out: list[ast.stmt] = []
        for i, stmt in enumerate(body):
            out.extend(self.statement(stmt, [*body[i + 1 :], *after]))
        return out

    def statement(self, stmt: ast.stmt, after: list[ast.stmt]) -> list[ast.stmt]:
        if isinstance(stmt, (*_Functions, ast.ClassDef)):
            return [stmt]
        if isinstance(stmt, ast.For) and (made := self.loop(stmt, after)) is not None:
            return made
        later = [stmt, *after] if isinstance(stmt, (ast.For, ast.While)) else after
        for field, value in ast.iter_fields(stmt):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(stmt, field, self.block(value, later))
            elif isinstance(value, ast.expr):
                setattr(stmt, field, self.visit(value))
        return [stmt]

    def left(self, node: ast.AST) -> ast.AST:
        return node

    visit_Lambda = visit_GeneratorExp = visit_SetComp = visit_DictComp = left  # what they bind is their own

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _is_call(node, "list", 1):
            self.count += 1
            return call("listed", node.func, *node.args)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        (first, *more), n = node.generators, self.count
        if more or first.ifs or first.is_async or not isinstance(first.target, ast.Name):
            return node
        counts = _over_range(first.iter)
        body = Body.of_value(node.elt, first.target.id, counts)
        if body is None:
            return node
        self.count += 1
        over = f"_tessera_over{n}"
        test = call("is_open", ast.NamedExpr(ast.Name(over, ast.Store()), self.iterable(first.iter)))
        first.iter = load(over)
        turn = body.statements[-1]
        assert isinstance(turn, ast.Expr)
        takes = [ast.arg(r) for r in (body.row_names if counts else [first.target.id])]
        arguments = ast.arguments([], takes, None, [], [], None, [])
        return ast.IfExp(test, call("mapped", load(over), ast.Lambda(arguments, turn.value), body.rows()), node)

    def loop(self, stmt: ast.For, after: list[ast.stmt]) -> list[ast.stmt] | None:
        if stmt.orelse or not isinstance(stmt.target, ast.Name):
            return None
        body = Body.of(stmt.body, stmt.target.id, _over_range(stmt.iter), after)
        if body is None or self.closed_over & (body.names() | {*body.appended.values()}):
            return None
        if not all(self.lists.is_fresh(name, stmt) for name in body.appended.values()):
            return None
        n = self.count
        self.count += 1
        over, turn = f"_tessera_over{n}", f"_tessera_body{n}"
        head = ast.Assign([ast.Name(over, ast.Store())], self.iterable(stmt.iter), lineno=stmt.lineno)
        stmt.iter = load(over)
        stmt.body = self.block(stmt.body, [stmt, *after])
        made = body.scan(over, turn, lambda block: self.block(block, []))
        return [_at(head, stmt), _at(ast.If(call("is_open", load(over)), made, [stmt]), stmt)]

    def iterable(self, node: ast.expr) -> ast.expr:
        if _over_range(node):
            assert isinstance(node, ast.Call)
            return call("ranged", node.func, *node.args)
        return self.visit(node)


class _Lists:
    """Which lists of a function nobody else can know when a loop begins."""

    def __init__(self, fn: ast.FunctionDef) -> None:
        nodes = list(ast.walk(fn))
        self.makers = [x for x in nodes if isinstance(x, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
        self.read = [x for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]
        self.loops = [x for x in nodes if isinstance(x, (ast.For, ast.While))]

    def is_fresh(self, name: str, loop: ast.For) -> bool:
        """It is made once, without elements, before the loop and in every round of the loops around that one, and is
        read nowhere before."""
        makers = [x for x in self.makers if any(name in names_in(t, ast.Store) for t in _targets(x))]
        empty = len(makers) == 1 and isinstance(v := makers[0].value, ast.List) and not v.elts
        if not empty or len(_targets(makers[0])) > 1 or makers[0].lineno > loop.lineno:
            return False
        around = [x for x in self.loops if x.lineno < loop.lineno and _end(x) >= _end(loop)]
        made_inside = all(x.lineno < makers[0].lineno for x in around)
        return made_inside and not any(x.id == name and x.lineno < loop.lineno for x in self.read)


def _targets(stmt: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _closed_over(fn: ast.FunctionDef) -> set[str]:
    """Names that functions inside of this one read: in a body of its own a loop would set others."""
    inner = [x for x in ast.walk(fn) if x is not fn and isinstance(x, (*_Functions, ast.Lambda, ast.ClassDef))]
    return set().union(*(names_in(x, ast.Load) for x in inner)) if inner else set()


def _at(node: ast.stmt, like: ast.stmt) -> ast.stmt:
    for inner in ast.walk(node):
        if not hasattr(inner, "lineno") and isinstance(inner, (ast.stmt, ast.expr, ast.arg)):
            ast.copy_location(inner, like)
    return node


def _is_call(node: ast.expr, name: str, *counts: int) -> bool:
    plain = isinstance(node, ast.Call) and not node.keywords and len(node.args) in counts
    return plain and isinstance(node.func, ast.Name) and node.func.id == name  # type: ignore[union-attr]


def _over_range(node: ast.expr) -> bool:
    return _is_call(node, "range", 1, 2)
