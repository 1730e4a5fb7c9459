"""`jit`: a model or function that compiles itself when called.

In: an nn.Module, a function or a method. Out: something that is called like it (`compiled.py`). Every graph that Dynamo
finds goes to `Backend` (`backend.py`), which keeps what it did for `stages`, `edit` and `explain`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from tessera.distributed.sharding import ask_for, check_outermost, place, sharding_of
from tessera.frontends.dynamo.blocks import follow_blocks
from tessera.frontends.dynamo.frames import entry_of
from tessera.frontends.functional.callables import refuse_suspended
from tessera.func.dispatch import Dispatcher, build
from tessera.just_in_time.backend import Backend, Handle
from tessera.just_in_time.compiled import Compiled, compiled_state, wrap
from tessera.just_in_time.exported import ExportedCall
from tessera.just_in_time.pipelined import PipelinedCall
from tessera.just_in_time.sharded import ShardedCall
from tessera.pipeline.options import Options
from tessera.runtime.buckets import Buckets, bucketed
from tessera.torch_internals import dynamo
from tessera.torch_internals.corrections import correct_dynamo
from tessera.torch_internals.floats import keep_floats
from tessera.torch_internals.tracing import trace_without_collection
from tessera.transforms.fp8_recipe import FP8
from tessera.util.config import check_flags, config
from tessera.util.errors import OptionError


def backend(gm: torch.fx.GraphModule, example_inputs: list[object], **kwargs: object) -> Callable:
    """`torch.compile(model, backend="tessera")`; options: executors, recompute, memory_budget, offload, precision,
    strict, cuda_graph."""
    options = dict(kwargs.get("options") or {})  # type: ignore[call-overload]
    known = {"executors", "recompute", "memory_budget", "offload", "precision", "strict", "cuda_graph"}
    if unknown := set(options) - known:
        raise OptionError(f"unknown option {sorted(unknown)[0]!r}; the options are {', '.join(sorted(known))}")
    strict = options.pop("strict", None)
    chosen = Options.of(
        options.get("executors"),
        options.get("recompute"),
        options.get("memory_budget"),
        options.get("cuda_graph", False),
        options.get("offload"),
        options.get("precision"),
    )
    return Backend(chosen, strict)(gm, example_inputs)


def jit(
    fn: Callable | None = None,
    *,
    executors: str | list[str] | tuple[str, ...] | None = None,
    frontend: str | None = None,
    strict: bool | None = None,
    memory_budget: str | int | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    precision: str | FP8 | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    cuda_graph: bool = False,
    buckets: Buckets | None = None,
    mesh: DeviceMesh | None = None,
    plan: str | Mapping[str, object] | None = None,
    microbatches: int | None = None,
) -> Callable:
    """Compile a model, function or method. Also a decorator, with or without options.

    executors      who may run what, in priority order: ["sdpa", "aten"], or "sdpa,aten"; None: as the flag says
    frontend       "dynamo" (any Python, guards, graph breaks) or "functional" (JAX style, smallest overhead)
    strict         raise on an internal failure instead of running that graph eagerly
    memory_budget  bytes that may be saved for backward, such as "8GB"
    recompute      what backward may recompute: "none", "views", "cheap", "auto"
    offload        "host": large tensors saved for backward wait in host memory; memory_budget then bounds the predicted
                   peak of the programs instead of what is saved
    precision      "fp8": linear layers multiply in 8 bits, forward and backward; tessera.FP8(…) says how
    dynamic        as torch.compile's: None learns from changing sizes, True is dynamic from the start
    fullgraph      refuse graph breaks
    cuda_graph     replay programs without gradients as CUDA graphs; explain says where that cannot be
    buckets        sizes that changing inputs are padded to (tessera.Buckets), so that few programs and graphs serve all
    mesh, plan     shard the model at once (tessera.shard); calls give this rank's part of a batch, and get its part of
                   the result
    microbatches   how many parts a pipeline of the plan cuts a batch into; None: as many as divide its rows, at most 4
                   for each rank
    """
    again = functools.partial(
        jit, executors=executors, frontend=frontend, strict=strict, memory_budget=memory_budget,
        recompute=recompute, offload=offload, precision=precision, dynamic=dynamic, fullgraph=fullgraph,
        cuda_graph=cuda_graph, buckets=buckets,
    )  # fmt: skip
    if fn is None:
        return again
    if not callable(fn) and not isinstance(fn, ExportedProgram):
        raise OptionError(f"expected a module, function, method or exported program, got {type(fn).__name__}")
    if isinstance(fn, type) and issubclass(fn, torch.nn.Module):
        raise OptionError(f"expected a module, got the class {fn.__name__}: make one first, such as {fn.__name__}(…)")
    if dynamic not in (None, True, False):
        raise OptionError(f"dynamic: expected True, False or None, got {dynamic!r}")
    if strict not in (None, True, False):
        raise OptionError(f"strict: expected True, False or None, got {strict!r}")
    if buckets is not None and not isinstance(buckets, Buckets):
        raise OptionError(f"buckets: expected a tessera.Buckets, got {type(buckets).__name__}")
    how = frontend or config.frontend
    check_flags({"frontend": how})
    if isinstance(state := compiled_state(fn), Compiled):
        fn = state.fn
    options = Options.of(executors, recompute, memory_budget, cuda_graph, offload, precision)
    if mesh is not None or plan is not None:
        if not isinstance(fn, torch.nn.Module):
            raise OptionError(f"mesh: expected a module, whose weights lie there, got {type(fn).__name__}")
        place(fn, mesh, plan)
    if (sharding := sharding_of(fn)) is not None:
        ask_for(sharding, microbatches, scheduled=False)
        backend = Backend(options, strict, name_of(fn), argument_names(fn))
        kind = ShardedCall if sharding.plan.pipe is None else PipelinedCall
        return wrap(fn, Compiled(fn, backend, kind(fn, sharding, options, backend, dynamic is not False), again))  # type: ignore[arg-type]
    check_outermost(fn, "jit")
    if microbatches is not None:
        raise OptionError("microbatches: expected a model that tessera.shard laid out with a pipeline, got another")
    if isinstance(fn, ExportedProgram):
        backend = Backend(options, strict)
        call = ExportedCall(fn, backend)
        call.__tessera__ = Compiled(call, backend, call, again)
        return call
    refuse_suspended(fn, generators=how == "functional")
    name, names = name_of(fn), argument_names(fn)
    if how == "functional":
        dispatcher = Dispatcher(fn, name, options)
        call = build(dispatcher)
        return wrap(fn, Compiled(fn, dispatcher, bucketed(call, buckets, names) if buckets else call, again))
    backend = Backend(options, strict, name, names)

    def anew() -> Callable:
        call = under_dynamo(entry_of(fn, name), backend, dynamic=dynamic, fullgraph=fullgraph)
        return bucketed(call, buckets, names) if buckets else call

    return wrap(fn, Compiled(fn, backend, anew(), again, anew))


# Of one function. A model that generates needs a program for the prompt, a token and a full window, each for one row,
# for many and for another cache; past the limit calls run eagerly, and PyTorch's own is soon reached.
PROGRAMS = 32
_PYTORCHS_LIMIT = 8


def under_dynamo(entry: Callable, backend: Backend, **options: bool | None) -> Callable:
    """torch.compile, with room for more programs than it has by itself. A limit that the user set is kept."""
    correct_dynamo()
    follow_blocks()
    trace_without_collection(Handle)
    keep_floats(Handle)
    ours = dynamo.config.recompile_limit == _PYTORCHS_LIMIT
    if ours and "recompile_limit" in inspect.signature(torch.compile).parameters:  # PyTorch 2.11 has one for all
        options["recompile_limit"] = PROGRAMS  # type: ignore[assignment]
    return torch.compile(entry, backend=Handle(backend), **options)  # type: ignore[call-overload]


def name_of(fn: Callable) -> str:
    name = type(fn).__name__ if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", type(fn).__name__)
    return re.sub(r"\W", "", name) or "graph"


def argument_names(fn: Callable) -> tuple[str, ...]:
    """Names of positional arguments, to call inputs by."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in signature.parameters.values() if p.kind in kinds)
