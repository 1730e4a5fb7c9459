"""What executors made, in a program that is written down and read again.

In: a claimed operator of a final program. Out: which executor it is of, and what it was made from; read again, that
executor is asked for the same. A region brings its body and, where its executor saves them, its kernel: regions of one
form share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tessera.executors.base import Executor, FusionExecutor, OperatorExecutor, in_order
from tessera.ir.equation import Equation, Recipe, Special
from tessera.ir.kernel import Kernel, bound
from tessera.ir.serial import Reader, Writer
from tessera.ir.trace import Trace
from tessera.util.errors import Unserial

NONE = -1  # no kernel is saved


class Claimed:
    """Writes claimed operators; `kernels` are what their executors saved, each once."""

    def __init__(self, executors: Iterable[str | Executor]) -> None:
        self.executors = {e.name: e for e in in_order(executors)}
        self.kernels: list[dict] = []
        self._saved: dict[int, int] = {}  # by what a callable was lowered from

    def __call__(self, op: Special, writer: Writer) -> list:
        executor = self.executors.get(op.namespace)
        if executor is None:
            raise Unserial(f"the operator {op!r} is no executor's")
        if op.recipe is not None:
            return self._region(op, op.recipe, executor, writer)
        if op.of is not None and op.body is None:
            return ["of", op.namespace, op.name, op.pure, writer.arg(op.of)]
        raise Unserial(f"the operator {op!r} does not say what it was made from")

    def _region(self, op: Special, recipe: Recipe, executor: Executor, writer: Writer) -> list:
        parts, over = [writer.trace(t) for t in recipe.parts], [list(pair) for pair in recipe.over]
        body = writer.trace(recipe.body)
        return ["region", op.namespace, op.name, op.pure, body, parts, over, self._kernel(op.kernel, executor)]

    def _kernel(self, kernel: Kernel | None, executor: Executor) -> int:
        if kernel is None or not isinstance(executor, FusionExecutor) or executor.save is None:
            return NONE
        origin = id(kernel.origin)
        if origin not in self._saved:
            data = executor.save(kernel)
            self._saved[origin] = NONE if data is None else len(self.kernels)
            self.kernels += [] if data is None else [data]
        return self._saved[origin]


class Claims:
    """Reads them."""

    def __init__(self, executors: Iterable[str | Executor], kernels: list[dict]) -> None:
        self.executors, self.kernels = {e.name: e for e in in_order(executors)}, kernels
        self._restored: dict[int, Callable] = {}

    def __call__(self, data: list, eqn: Equation, reader: Reader) -> Special:
        kind, name = data[:2]
        executor = self.executors.get(name)
        if kind == "of" and isinstance(executor, OperatorExecutor):
            return self._operator(data, eqn, reader, executor)
        if kind == "region" and isinstance(executor, FusionExecutor):
            return self._region(data, reader, executor)
        raise Unserial(f"an operator of {name!r}, which takes no part")

    def _operator(self, data: list, eqn: Equation, reader: Reader, executor: OperatorExecutor) -> Special:
        _, namespace, name, pure, of = data
        op = reader.arg(of)
        fn = executor.claims(eqn.with_(op=op))
        if fn is None:
            raise Unserial(f"{namespace} does not claim {op} any more")
        return Special(name, fn, namespace, pure, of=op)  # type: ignore[arg-type]

    def _region(self, data: list, reader: Reader, executor: FusionExecutor) -> Special:
        _, namespace, name, pure, number, parts, over, kernel = data
        body = reader.trace(number)
        recipe = Recipe(body, tuple(map(reader.trace, parts)), tuple((k, j) for k, j in over))
        fn = self._callable(recipe, kernel, executor)
        left = body
        if over:
            gone = dict(recipe.over)
            if not isinstance(fn, Kernel) or fn.writing is None:
                raise Unserial("a region that wrote over its arguments does not offer that any more")
            fn = fn.over(gone)
            left = body.with_(outputs=tuple(v for k, v in enumerate(body.outputs) if k not in gone))
        run, bound_kernel = bound(fn)
        return Special(name, run, namespace, pure, body=left, recipe=recipe, kernel=bound_kernel)

    def _callable(self, recipe: Recipe, kernel: int, executor: FusionExecutor) -> Callable:
        if kernel in self._restored:
            return self._restored[kernel]
        fn: Callable | None = None
        if kernel != NONE and executor.restore is not None:
            fn = executor.restore(recipe, self.kernels[kernel])
        if fn is not None:
            self._restored[kernel] = fn
            return fn
        fn = _compiled(recipe, executor)
        if fn is None:
            raise Unserial(f"{executor.name} does not compile {recipe.body.name} any more")
        return fn


def _compiled(recipe: Recipe, executor: FusionExecutor) -> Callable | None:
    body: Trace = recipe.body
    if not recipe.parts:
        return executor.compile(body)
    return None if executor.compile_together is None else executor.compile_together(body, list(recipe.parts))
