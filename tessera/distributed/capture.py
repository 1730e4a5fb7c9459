"""A model's call, or a loss over it, as one program over whole tensors.

In: a model whose weights are or will be DTensors, a function of it, a part of a batch. Out: a `Forward`, whose
inputs are whole weights, buffers and the whole batch. It is captured on fake tensors, so nothing of that size is ever
made; sizes inside of it are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tessera.distributed.caches import Caches, Left
from tessera.distributed.known_experts import known_experts
from tessera.distributed.python_state import refuse_hooks
from tessera.distributed.regions import Regions
from tessera.distributed.stateless import left_as_it_was, with_tensors
from tessera.distributed.weights import local_of, whole_type
from tessera.frontends.functional.raising import with_checks
from tessera.frontends.functional.selected import Selecting
from tessera.frontends.functional.trace import Traced, trace_function
from tessera.ir.builder import Builder
from tessera.ir.equation import Equation, Value, map_values
from tessera.ir.record import recording
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, symbol_of
from tessera.passes.clean.canonicalise import canonicalise
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce
from tessera.passes.clean.fold import fold
from tessera.passes.decompose.random import compute_random
from tessera.torch_internals import pytree
from tessera.torch_internals.distributed import instead_of_local_map
from tessera.torch_internals.modules import without_hooks_of
from tessera.transforms.over_ranks import collectives
from tessera.transforms.selected_rows import Chosen, over_all_rows
from tessera.util.errors import CaptureError

FEWEST = (0, 1, 16, 256, 4096)  # rows; one of them is enough for what takes the first k
PARTS = "torch.distributed.tensor"  # its hooks speak of parts, and values here are whole


@dataclass(frozen=True)
class Forward:
    """A captured program. Its outputs are the caller's, then the results of the modules that were watched."""

    traced: Traced
    recorded: Trace  # as the model wrote it
    trace: Trace
    weights: dict[str, Value]
    buffers: dict[str, Value]
    batch: tuple[Value, ...]
    results: int  # how many outputs are the caller's
    watched: tuple[str, ...]  # the modules whose results are the outputs after those
    left: Left | None = None  # what it leaves in caches, whose tensors are the last of the caller's outputs
    counts: Trace | None = None  # of a pipeline's microbatch, what counts in it; sums over all are inputs
    chosen: Mapping[int, Chosen] = field(default_factory=dict)  # outputs of which masks, behind the others, choose rows
    steady: frozenset[int] = frozenset()  # outputs that are as long by chance as a batch has rows
    alone: tuple[str, ...] = ()  # what sees the rows of a microbatch alone, with its line

    @property
    def outputs(self) -> tuple:
        return self.trace.outputs[: self.results]

    @property
    def distinct(self) -> list[Value]:
        """The caller's outputs that are values, each once."""
        return list(dict.fromkeys(v for v in self.outputs if isinstance(v, Value)))

    def pack(self, outputs: Sequence[object]) -> object:
        """The caller's outputs, in the form that the function gave them."""
        given = [*outputs]
        for i, chosen in self.chosen.items():
            if isinstance(x := given[i], Tensor):
                given[i] = chosen.of(x, given[chosen.mask])  # type: ignore[arg-type]
        rest: list[object] = [None] * (len(self.trace.outputs) - self.results)
        return self.traced.pack([*given[: self.results - len(self.masks)], *rest])[0]  # type: ignore[index]

    @property
    def masks(self) -> set[int]:
        """The outputs that choose rows of others."""
        return {chosen.mask for chosen in self.chosen.values()}


def capture(
    model: nn.Module,
    function: Callable | None,
    batch: tuple,
    named: dict,
    batch_types: Mapping[int, TensorType],
    watched: Collection[str] = (),
    caches: Caches | None = None,
    regions: Regions | None = None,
) -> Forward:
    """`function(model, *batch, **named)`, or the model's own call. `batch_types` are those of the tensors of the whole
    batch, by their place, then of those in caches; `watched` names modules whose results are wanted. What speaks of one
    rank's parts is run by `regions`: a model that calls collectives sees its rank's rows."""
    refuse_hooks(model, function is not None)
    caches = caches or Caches(())
    exchange: Equation | None = None
    left: list[Left] = []
    chosen: dict[int, Chosen] = {}
    recorded: list[list[Equation]] = []
    types = {name: whole_type(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
    names, results = list(types), dict[str, Tensor]()

    def run(held: list, batch: tuple, named: dict, cached: list) -> tuple:
        recorder = recording()
        assert recorder is not None
        recorded[:] = [recorder.builder.equations]

        def called(held: list, args: tuple, kwargs: dict) -> object:
            return with_tensors(model, dict(zip(names, held, strict=True)), lambda: model(*args, **kwargs))

        call: Callable = model
        if exchange is not None and regions is not None:
            call = _Called(model, regions.over_rows(called, held, rows, exchange))

        def whole() -> object:
            return call(*batch, **named) if function is None else function(call, *batch, **named)

        with _watching(model, watched, results), caches.holding(cached):
            out = with_tensors(model, dict(zip(names, held, strict=True)), whole)
            new, changed = caches.left(cached)
        left[:] = [changed]
        return (caches.named(out), new) if caches.objects else out, list(results.values())

    batch, named = pytree.tree_map_only(DTensor, local_of, (batch, named))
    held = [torch.empty(0, dtype=t.dtype, device=t.device) for t in types.values()]
    all_types = {**dict(enumerate(types.values())), **{len(names) + i: t for i, t in batch_types.items()}}
    rows = next((t.shape[0] for t in batch_types.values() if t.shape), None)
    params = dict(model.named_parameters())
    trained = {i for i, n in enumerate(names) if n in params and params[n].requires_grad}
    given = enumerate(pytree.tree_leaves((batch, named)), len(names))
    trained.update(i for i, x in given if isinstance(x, Tensor) and x.requires_grad)

    def traced_with(times: int = 1, few: int | None = None) -> tuple[Traced, bool]:
        """With so many times the number that stands for rows that a mask selects, or few; was there such a mask?"""
        local_map = instead_of_local_map(regions.local_map) if regions is not None else nullcontext()
        with left_as_it_was(model), known_experts(model), without_hooks_of(model, PARTS), local_map:
            cached = [local_of(x) for x in caches.tensors]
            selecting: list[Selecting] = []

            def selected(*args: object) -> object:
                selecting[:] = [Selecting(times, few)]
                with selecting[0]:
                    return run(*args)  # type: ignore[arg-type]

            name = type(model).__name__
            traced = with_checks(
                lambda: trace_function(
                    selected, (held, batch, named, cached), types=all_types, name=name, trained=trained
                )
            )
            return traced, bool(selecting[0].met)

    def traced_once() -> Traced:
        traced, selects = traced_with()
        chosen.clear()
        if not selects:
            return traced
        trace, rows = _over_all_rows(traced.trace, traced_with, len(traced.trace.outputs) - len(results))
        if rows and caches.objects:
            raise CaptureError(
                f"{type(model).__name__}: expected results of known sizes beside a cache, got rows of a mask"
            )
        chosen.update(rows)
        return replace(traced, trace=trace)

    try:
        traced = traced_once()
    except Exception:
        if not recorded or not any(collectives(recorded[0])):  # behind one, whole sizes need not fit
            raise
        traced = None
    exchange = next(collectives(recorded[0]), None)
    if exchange is not None or traced is None:
        assert exchange is not None
        _check_rows_alone(exchange, rows, watched, caches)
        traced = traced_once()
        if (outside := next(collectives(traced.trace.equations), None)) is not None:
            raise CaptureError(
                f"{outside.source}: {outside.op} exchanges parts of ranks outside of the model; expected it in the "
                "model's own call, or in a function that local_map wraps, since elsewhere values are whole"
            )
    recorded_trace = _with_symbols(_named(traced.trace, names), len(names), (batch, named))
    trace = simplified(recorded_trace)
    inputs = dict(zip(names, trace.inputs, strict=False))
    params = {name for name, _ in model.named_parameters()}
    return Forward(
        traced,
        recorded_trace,
        trace,
        {name: v for name, v in inputs.items() if name in params},
        {name: v for name, v in inputs.items() if name not in params},
        trace.inputs[len(names) :],
        len(trace.outputs) - len(results),
        tuple(results),
        left[0] if caches.objects else None,
        chosen=chosen,
    )


def _over_all_rows(
    trace: Trace, traced_with: Callable[..., tuple[Traced, bool]], results: int
) -> tuple[Trace, dict[int, Chosen]]:
    for fewest in FEWEST:
        try:
            few = traced_with(few=fewest)[0].trace
            break
        except Exception:  # what the program's own functions raise about so few, eager raises too
            if fewest == FEWEST[-1]:
                raise
    return over_all_rows(trace, traced_with(2)[0].trace, few, fewest, results)


def simplified(trace: Trace) -> Trace:
    """Its inputs stay as they are."""
    for apply in (canonicalise, fold, cse, dce):
        trace = apply(trace)
    return compute_random(trace, lambda device: True, lambda eqn: True)


def _with_symbols(trace: Trace, first: int, arguments: object) -> Trace:
    """Symbols are sizes of parts. One rank's program reads them off its own inputs, wherever the whole's sizes are
    formulas of them."""
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    symbols = {
        symbol: (v, dim)
        for v, x in reversed(list(zip(trace.inputs[first:], tensors, strict=False)))
        for dim, n in enumerate(x.shape)
        if isinstance(n, torch.SymInt) and (symbol := symbol_of(n))
    }
    return trace.with_(symbols={**trace.symbols, **symbols}) if symbols else trace


def _check_rows_alone(exchange: Equation, rows: object, watched: Collection[str], caches: Caches) -> None:
    """What does not go with a model that sees its rank's rows alone."""
    beside = f"placements of what {', '.join(watched)} gives" if watched else "a cache" if caches.objects else ""
    if beside or rows is None:
        raise CaptureError(
            f"{exchange.source}: {exchange.op} makes the model see its rank's rows alone; expected a batch with rows "
            f"and no {beside or 'other arguments'} beside it: put what exchanges parts into a function that local_map "
            "wraps"
        )


@contextmanager
def _watching(model: nn.Module, names: Collection[str], results: dict[str, Tensor]) -> Iterator[None]:
    """Keep the first tensor that each of these modules gives."""
    results.clear()

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, out: object) -> None:
            tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            if tensors:
                results.setdefault(name, tensors[0])

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
        yield


class _Called:
    """A model whose calls see their rank's rows; all else is the model's own."""

    def __init__(self, model: nn.Module, call: Callable) -> None:
        self._model, self._call = model, call

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def _named(trace: Trace, names: Sequence[str]) -> Trace:
    """Inputs called as the model calls its weights."""
    builder = Builder(trace.name)
    builder.reserve(trace.values())
    fresh = {v: Value(builder.fresh(n.replace(".", "_")), v.type) for v, n in zip(trace.inputs, names, strict=False)}
    return trace.with_(
        inputs=tuple(fresh.get(v, v) for v in trace.inputs),
        equations=tuple(e.substitute(fresh) for e in trace.equations),
        outputs=map_values(trace.outputs, lambda v: fresh.get(v, v)),
        mutations={fresh.get(t, t): fresh.get(v, v) for t, v in trace.mutations.items()},
        symbols={s: (fresh.get(v, v), d) for s, (v, d) in trace.symbols.items()},
    )
