"""`check`: is what Tessera computes right, and if not, who is to blame?

In: a model or function and arguments. Out: a `CheckReport`. It runs as eager PyTorch, in float64 and compiled, forward
and backward; every compiled graph is then checked by itself on the inputs it got. The model's state and the random
generators are as before afterwards.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tessera.inspection.compare import LAST_PLACES, Comparison, compare
from tessera.inspection.graph_check import Fault, GraphCheck, copied
from tessera.inspection.precise import gradients, widen
from tessera.inspection.programs import state_of
from tessera.inspection.saved import Saved, modules_of
from tessera.just_in_time.api import jit
from tessera.just_in_time.backend import Backend
from tessera.just_in_time.compiled import Compiled, compiled_state
from tessera.pipeline.compilation import Compilation
from tessera.torch_internals import pytree
from tessera.util.config import override
from tessera.util.units import counted

SEED = 99
SHOWN = 5  # wrong results listed, the worst first


@dataclass(frozen=True)
class CheckReport:
    """The verdict: `ok`, what was compared, who is to blame. `print` it, or take `to_dict()`."""

    ok: bool
    reference: str
    comparisons: list[Comparison]
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    graphs: list[GraphCheck] = field(default_factory=list, repr=False)  # for `reproduce`

    def __str__(self) -> str:
        results = counted(len(self.comparisons), "result")
        head = f"{'right' if self.ok else 'WRONG'}: {results} compared with {self.reference}"
        worst = sorted((c for c in self.comparisons if not c.ok), key=lambda c: -c.error)
        lines = [head, *map(str, self.faults), *(f"  {c}" for c in worst[:SHOWN])]
        more = [f"  and {len(worst) - SHOWN} more"] if len(worst) > SHOWN else []
        return "\n".join([*lines, *more, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__  # what a prompt shows

    def to_dict(self) -> dict:
        return {
            "ok": self.ok,
            "reference": self.reference,
            "comparisons": [{**dataclasses.asdict(c), "ok": c.ok} for c in self.comparisons],
            "faults": [dataclasses.asdict(f) for f in self.faults],
            "notes": self.notes,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self), style="green" if self.ok else "red")


def check(fn: Callable, /, *args: object, **kwargs: object) -> CheckReport:
    """Run `fn(*args, **kwargs)` by eager PyTorch, in float64 and by Tessera, and compare, gradients included.

    On a difference that the dtypes do not explain, the report names the pass, the operator's rule or the executor that
    made it, and the first wrong equation. What `tessera.jit` gave is checked with its own options; random numbers are
    drawn by PyTorch, so that both sides draw the same.
    """
    state = compiled_state(fn)
    plain = state.fn if state is not None else fn
    with override(fused_random="off"):
        fast = state.again(plain) if state is not None else jit(plain)
        return _Check(plain, fast, args, kwargs).run()


class _Check:
    def __init__(self, fn: Callable, fast: Callable, args: tuple, kwargs: dict) -> None:
        self.fn, self.fast, self.args, self.kwargs = fn, fast, args, kwargs
        self.saved = Saved(fn, args, kwargs)
        self.wrt = self.differentiated()

    def differentiated(self) -> dict[str, torch.Tensor]:
        """What gradients are taken of, by name: parameters, and arguments that ask for it."""
        tensors: dict[str, torch.Tensor] = {}
        if not torch.is_grad_enabled():
            return tensors
        for module in modules_of(self.fn):
            tensors.update({name: p for name, p in module.named_parameters() if p.requires_grad})
        for i, x in enumerate(pytree.tree_leaves((self.args, self.kwargs))):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                tensors[f"argument {i}"] = x
        return tensors

    def run(self) -> CheckReport:
        try:
            eager, drew = self.outcome(self.fn)
            self.outcome(self.fast)  # compiles
            recorded: dict[Compilation, list[object]] = {}
            with recording(state_of(self.fast).compilations(), recorded):
                ours, _ = self.outcome(self.fast)
            reference = None if drew else self.precise()
            noise = max((_noise(x) for x in eager.values()), default=0.0)
            compared = [_compared(key, ours.get(key), x, reference, noise) for key, x in eager.items()]
            graphs, faults, notes = check_graphs(recorded)
        finally:
            self.saved.restore()
        comparisons = [c for c in compared if c is not None]
        if drew:
            notes.append(
                "the program draws random numbers: its results are compared with eager's, its graphs in float64"
            )
        elif reference is None:
            notes.append("the whole program does not run in float64; each graph was checked in it")
        if reference is None:
            comparisons += [c for g in graphs for c in g.comparisons]
        notes += eager_notes(state_of(self.fast))
        ok = not faults and all(c.ok for c in comparisons)
        if not ok and not faults:
            faults.append(Fault("the whole program", "call", "what stands between the compiled graphs"))
        return CheckReport(ok, "float64" if graphs or reference else "eager", comparisons, faults, notes, graphs)

    def outcome(self, fn: Callable) -> tuple[dict[str, object], bool]:
        """Outputs, gradients and buffers of one run from the saved state; did it draw random numbers?"""
        self.saved.restore()
        torch.manual_seed(SEED)
        before = torch.get_rng_state()
        outputs = pytree.tree_leaves(fn(*self.args, **self.kwargs))
        drew = not torch.equal(before, torch.get_rng_state())
        return self.named(outputs, list(self.wrt.values()), dict(self.buffers())), drew

    def buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        for module in modules_of(self.fn):
            yield from module.named_buffers()

    def named(
        self, outputs: list[object], wrt: list[torch.Tensor], buffers: dict[str, torch.Tensor]
    ) -> dict[str, object]:
        results: dict[str, object] = {f"output {i}": _held(o) for i, o in enumerate(outputs)}
        grads = gradients(outputs, wrt, [_seed(i, o) for i, o in enumerate(outputs)])
        for (name, x), grad in zip(zip(self.wrt, wrt, strict=True), grads, strict=True):
            results[f"gradient of {name}"] = torch.zeros_like(x) if grad is None else _held(grad)
        results.update({f"buffer {name}": _held(b) for name, b in buffers.items()})
        return results

    def precise(self) -> dict[str, object] | None:
        """The whole program in float64, where it can be run so."""
        if not isinstance(self.fn, torch.nn.Module):
            return self.precise_function()
        self.saved.restore()
        state = {n: widen(x.detach().clone()) for n, x in (*self.fn.named_parameters(), *self.fn.named_buffers())}
        args, kwargs, moved = self.wide_arguments()
        for name in self.wrt:
            if name in state:
                state[name].requires_grad_()
        wrt = [moved[name] if name in moved else state[name] for name in self.wrt]
        with suppress(Exception):  # an operator without float64, a dtype written into the program
            outputs = pytree.tree_leaves(torch.func.functional_call(self.fn, state, args, kwargs))
            return self.named(outputs, wrt, {n: state[n] for n, _ in self.fn.named_buffers()})
        return None

    def precise_function(self) -> dict[str, object] | None:
        if any(True for _ in modules_of(self.fn)):
            return None  # parameters that nobody can replace from outside
        self.saved.restore()
        args, kwargs, moved = self.wide_arguments()
        with suppress(Exception):
            outputs = pytree.tree_leaves(self.fn(*args, **kwargs))
            return self.named(outputs, [moved[name] for name in self.wrt], {})
        return None

    def wide_arguments(self) -> tuple[tuple, dict, dict[str, torch.Tensor]]:
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        wide = [widen(copied(x)) for x in leaves]
        moved = {}
        for i, x in enumerate(wide):
            if f"argument {i}" in self.wrt:
                moved[f"argument {i}"] = x.requires_grad_()
        args, kwargs = pytree.tree_unflatten(wide, spec)
        return args, kwargs, moved


class recording:
    """While this is entered, the inputs of the first call of each compiled graph are noted."""

    def __init__(self, compilations: Iterable[Compilation], into: dict[Compilation, list[object]]) -> None:
        self.compilations, self.into = list(compilations), into

    def __enter__(self) -> None:
        for compilation in self.compilations:
            record_first(compilation, self.into)

    def __exit__(self, *error: object) -> None:
        for compilation in self.compilations:
            stop_recording(compilation)


def record_first(compilation: Compilation, into: dict[Compilation, list[object]]) -> None:
    """Note the inputs of the next call of a graph."""
    original = compilation.executable.call

    def call(*args: object) -> object:
        into.setdefault(compilation, [copied(x) for x in args])
        compilation.executable.call = original
        return original(*args)

    call.original = original  # type: ignore[attr-defined]
    compilation.executable.call = call


def stop_recording(compilation: Compilation) -> None:
    compilation.executable.call = getattr(compilation.executable.call, "original", compilation.executable.call)


def check_graphs(recorded: dict[Compilation, list[object]]) -> tuple[list[GraphCheck], list[Fault], list[str]]:
    """Check each compiled graph on the inputs it got."""
    graphs, faults, notes = [], [], []
    for compilation, inputs in recorded.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from running the user's operators in another dtype
                graph = GraphCheck(compilation, inputs)
                wrong = graph.run()
        except Exception as error:
            notes.append(f"{compilation.name} could not be checked by itself: {type(error).__name__}: {error}")
            continue
        if graph.precision != "float64":
            notes.append(
                f"{compilation.name} was compared with eager PyTorch: its derivative is of its author's choice"
            )
        graphs.append(graph)
        faults += wrong
    return graphs, faults, notes


def eager_notes(state: Compiled) -> list[str]:
    records = state.backend.graphs if isinstance(state.backend, Backend) else []
    return [f"{g.name} runs eagerly: {g.eager_reason}" for g in records if g.eager_reason]


def _compared(
    key: str, ours: object, eager: object, reference: dict[str, object] | None, noise: float
) -> Comparison | None:
    """Without a reference eager stands in for it; half of a dtype's digits must then agree, except below the noise of
    the other results: a gradient that cancels, such as a bias's before a batch norm, has no digits of its own."""
    result = compare(key, ours, eager, widen(eager) if reference is None else reference[key])
    if result is None or reference is not None or not isinstance(eager, torch.Tensor) or not eager.is_floating_point():
        return result
    loose = torch.finfo(eager.dtype).eps ** 0.5 * (float(eager.abs().max()) if eager.numel() else 0.0)
    return dataclasses.replace(result, limit=max(result.limit, loose, noise))


def _noise(x: object) -> float:
    """What rounding may leave of terms as large as these."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not x.numel():
        return 0.0
    return LAST_PLACES.get(x.dtype, 32) * torch.finfo(x.dtype).eps * float(x.detach().abs().max())


def _seed(index: int, x: object) -> torch.Tensor | None:
    if not isinstance(x, torch.Tensor) or not x.requires_grad:
        return None
    generator = torch.Generator().manual_seed(SEED + index)
    return torch.randn(x.shape, generator=generator).to(x.device)


def _held(x: object) -> object:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x
