"""A kernel of the user's as an operator: `register_kernel`.

In: a Triton kernel or a tile program, what its results look like, and how its other arguments follow from the
operator's. Out: an operator as `register_operator` makes one: whole in traces, with a derivative if given, under jit,
grad, vmap and torch.compile, for sizes known only at run time. Everything given by a function is asked for by the
names of that function's parameters: `lambda x, BLOCK: …` gets the argument x and the constant BLOCK.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import torch

from tessera.executors.kernel_tile import TileKernel, is_tile_program, tile_kernel
from tessera.executors.kernel_triton import TritonKernel
from tessera.executors.register import register_executor, register_operator
from tessera.tile.schedules.schedule import Schedule
from tessera.torch_internals.operators import op_schema
from tessera.util.errors import OptionError, RuleError

Program = TileKernel | TritonKernel
Like = str | Callable[..., object]
MOST_EXAMPLES = 256  # that vmap runs one by one


def register_kernel(
    name: str,
    kernel: object,
    *,
    outputs: Mapping[str, Like],
    given: Mapping[str, object] | None = None,
    grid: object = None,
    options: Mapping[str, object] | None = None,
    names: Sequence[str] | None = None,
    scalars: Mapping[str, type] | None = None,
    schedule: Schedule | None = None,
    contiguous: bool = True,
    vjp: Callable | None = None,
    jvp: Callable | None = None,
    batch: Callable | None = None,
) -> Callable:
    """Make an operator called `name` of a Triton kernel or a tile program.

        @triton.jit
        def add_kernel(x, y, out, n, BLOCK: tl.constexpr): ...

        add = tessera.register_kernel(
            "mylib::add", add_kernel,
            outputs={"out": "x"},                                  # a result, and what it looks like
            given={"n": lambda x: x.numel(), "BLOCK": 1024},       # what the operator's caller does not pass
            grid=lambda n, BLOCK: (triton.cdiv(n, BLOCK),),
            vjp=lambda ct, out, x, y: (ct, ct),
        )

    A tile program is a `tile.kernel`, MLIR text or the path of a file; `names` names its buffers, its symbols are
    parameters by their own names, and it needs no grid; `schedule` says how it runs, if not as the compiler thinks.
    What is neither in `outputs` nor in `given` is a parameter of the operator, in the kernel's order: a tensor, or a
    number where its annotation, its default or `scalars` says so. A result is like an argument (its name), or what
    a function gives: an empty tensor, or sizes. Tensors are made contiguous first, unless `contiguous` is false.
    `vjp`, `jvp` and `batch` are as for `register_operator`; without `batch`, vmap runs the kernel once an example.
    """
    if is_tile_program(kernel):
        program: Program = TileKernel(name, tile_kernel(name, kernel), names, schedule)
        if grid is not None:
            raise OptionError(f"{name}: a tile program has its own grid; leave grid= out, or give schedule=")
    else:
        program = TritonKernel(name, kernel, dict(scalars or {}))
    call = _Call(name, program, dict(outputs), dict(given or {}), grid, dict(options or {}), contiguous)
    operator = register_operator(
        name,
        call.function(),
        fake=call.types,
        vjp=vjp,
        jvp=jvp,
        batch=batch or (lambda *a: one_by_one(name, operator, *a)),
    )
    # compiled programs call the kernel itself: what the dispatcher and autograd would look at is settled there
    full = op_schema(operator).name  # type: ignore[attr-defined]
    register_executor(full.replace("::", "_"), {full.replace("::", "."): call.run})
    return operator


class _Call:
    """One call of a kernel: arguments completed, results made, launched."""

    def __init__(
        self,
        name: str,
        program: Program,
        outputs: dict[str, Like],
        given: dict[str, object],
        grid: object,
        options: dict,
        contiguous: bool,
    ) -> None:
        self.name, self.program, self.outputs, self.given = name, program, outputs, given
        self.grid, self.options, self.contiguous = grid, options, contiguous
        known = program.parameters
        for what, asked in (("outputs", outputs), ("given", given)):
            if unknown := [n for n in asked if n not in known]:
                raise OptionError(f"{name}: {what}= names {unknown}; the kernel has {list(known)}")
        program.check_outputs(list(outputs))
        self.parameters = [n for n in known if n not in outputs and n not in given and n not in program.tuned]
        if lost := [n for n in self.parameters if n in program.constant]:
            raise OptionError(
                f"{name}: {lost[0]} is a compile-time constant; give it, as in given={{{lost[0]!r}: 1024}}"
            )
        self.tensors = [n for n in self.parameters if program.kind(n) is torch.Tensor]
        if not self.tensors:
            raise OptionError(f"{name}: expected a tensor among the operator's arguments {self.parameters}")
        self._check_names()

    def _check_names(self) -> None:
        """Functions ask for names that there are, and none for a name that is made later."""
        if isinstance(self.program, TritonKernel) and self.grid is None:
            raise OptionError(f"{self.name}: expected grid=, a tuple or a function such as lambda x: (x.shape[0],)")
        fixed = {n for n, g in self.given.items() if not callable(g)}
        available = {*self.parameters, *fixed}
        for what, like in self.outputs.items():
            if isinstance(like, str) and like not in self.tensors:
                raise OptionError(f"{self.name}: {what} should be like {like!r}; tensors are {self.tensors}")
            if callable(like):
                self._asks(f"outputs[{what!r}]", like, available)
        available |= set(self.outputs)
        for what, value in self.given.items():
            if callable(value):
                self._asks(f"given[{what!r}]", value, available)
        if callable(self.grid):
            self._asks("grid", self.grid, {*available, *self.given, *self.program.tuned})

    def _asks(self, what: str, fn: Callable, available: set[str]) -> None:
        if lost := [n for n in asked_for(fn) if n not in available]:
            raise OptionError(f"{self.name}: {what} asks for {lost}; there are {sorted(available)}")

    # --- at a call ---

    def function(self) -> Callable:
        """With the operator's parameters as its signature."""
        hints: dict[str, object] = {n: self.program.kind(n) for n in self.parameters}
        hints["return"] = torch.Tensor if len(self.outputs) == 1 else tuple[(torch.Tensor,) * len(self.outputs)]  # type: ignore[misc]

        def run(*args: object) -> object:
            return self.run(*args)

        run.__name__ = self.name.split("::")[-1]
        run.__annotations__ = hints
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        run.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in self.parameters])  # type: ignore[attr-defined]
        return run

    def values(self, args: Sequence[object]) -> dict[str, object]:
        values: dict[str, object] = dict(zip(self.parameters, args, strict=True))
        if self.contiguous:
            values = {n: a.contiguous() if isinstance(a, torch.Tensor) else a for n, a in values.items()}
        self.program.check(values)
        return values

    def results(self, values: dict[str, object]) -> dict[str, torch.Tensor]:
        constants = {n: g for n, g in self.given.items() if not callable(g)}
        return {n: self._result(n, like, values | constants) for n, like in self.outputs.items()}

    def _result(self, name: str, like: Like, values: dict[str, object]) -> torch.Tensor:
        first = values[self.tensors[0]]
        assert isinstance(first, torch.Tensor)
        dtype = self.program.dtype(name)
        model = values[like] if isinstance(like, str) else by_name(like, values)
        if isinstance(model, torch.Tensor):
            result = torch.empty_like(model, memory_format=torch.contiguous_format) if isinstance(like, str) else model
        else:
            result = first.new_empty(list(model), dtype=dtype or first.dtype)  # type: ignore[call-overload]
        if dtype is not None and result.dtype is not dtype:
            result = result.new_empty(result.shape, dtype=dtype)
        return result.zero_() if name in self.program.summed else result

    def types(self, *args: object) -> object:
        return self._given_back(self.results(self.values(args)))

    def run(self, *args: object) -> object:
        values = self.values(args)
        results = self.results(values)
        values |= results
        if any(t.numel() for t in results.values()):
            values |= {n: by_name(g, values) if callable(g) else g for n, g in self.given.items()}
            self.program.launch(values, self._grid(), self.options)
        return self._given_back(results)

    def _grid(self) -> object:
        """As Triton takes it: a function of all arguments, with those that a tuner chose."""
        return (lambda meta: by_name(self.grid, meta)) if callable(self.grid) else self.grid  # type: ignore[arg-type]

    def _given_back(self, results: dict[str, torch.Tensor]) -> object:
        return next(iter(results.values())) if len(results) == 1 else tuple(results.values())


@functools.cache
def asked_for(fn: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(fn).parameters)


def by_name(fn: Callable, values: Mapping[str, object]) -> object:
    return fn(*(values[n] for n in asked_for(fn)))


def one_by_one(name: str, op: Callable, size: object, on: Sequence[bool], *args: object) -> object:
    """vmap of a kernel that has no batching rule: once an example, results stacked."""
    if not isinstance(size, int) or size > MOST_EXAMPLES:
        raise RuleError(
            f"vmap: {name} has no batching rule and would run once for each of {size} examples; register it with batch="
        )
    rows = [op(*(a[i] if b else a for a, b in zip(args, on, strict=True))) for i in range(size)]  # type: ignore[index]
    if isinstance(rows[0], torch.Tensor):
        return torch.stack(rows)
    return [torch.stack(column) for column in zip(*rows, strict=True)]
