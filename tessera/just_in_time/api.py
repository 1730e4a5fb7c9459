"""`jit`: a model or function that compiles itself when called.

In: an nn.Module, a function or a method. Out: something that is called like it. A compiled module shares its
whole state with the original (`state_dict`, parameters, hooks and attributes are the model's own). Every
graph Dynamo finds is handed to `Backend`, which keeps what it did for `stages`, `edit` and `explain`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import re
import time
import traceback
import warnings
import weakref
from collections.abc import Callable

import torch
import torch._dynamo
from torch._guards import CompileContext
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tessera.frontends.dynamo.breaks import last_counted, why_it_ended
from tessera.frontends.dynamo.frames import entry_of
from tessera.frontends.dynamo.graphs import capture_graph, given_fakes
from tessera.frontends.dynamo.lines import QUIET, calling_line
from tessera.frontends.dynamo.module_hooks import ModuleHooks
from tessera.frontends.dynamo.same_object import guard_same_objects
from tessera.frontends.export import capture_export
from tessera.frontends.functional.callables import refuse_suspended
from tessera.func.dispatch import Dispatcher, build
from tessera.ir.record import recording
from tessera.just_in_time.transformers import keep_own_call, own_call, watch
from tessera.pipeline.compilation import Compilation, Failure, Options, compile_captured
from tessera.runtime.buckets import Buckets, bucketed
from tessera.util.config import config
from tessera.util.errors import CaptureError, OptionError, TesseraError

# Some of Dynamo's own assertions come as they are.
DYNAMO_ERRORS = (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.InternalTorchDynamoError, AssertionError)
FRONTENDS = ("dynamo", "functional")
guard_same_objects()


@dataclasses.dataclass
class GraphRecord:
    """One graph that Dynamo handed over."""

    name: str
    compile_id: str
    compilation: Compilation | None = None
    eager_reason: str = ""  # why the graph runs eagerly, where it does
    break_reason: str = ""
    break_line: str = ""
    nodes: int = 0
    called_at: str = ""  # the user's line whose call made Dynamo compile this
    recompile_reason: str = ""  # why Dynamo compiled once more, where it did: the guard that failed
    failure: Failure | None = None  # what `reproduce` writes down, where a pass failed
    made: float = dataclasses.field(default_factory=time.time)


# Told of every jitted function when it is made; the command line collects them here. Empty otherwise.
WATCHERS: list[Callable[[Compiled], None]] = []


class Backend:
    """What TorchDynamo calls with each graph."""

    def __init__(
        self, options: Options, strict: bool | None = None, name: str = "graph", arguments: tuple[str, ...] = ()
    ) -> None:
        self.options, self.strict, self.name, self.arguments = options, strict, name, arguments
        self.graphs: list[GraphRecord] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[object], **_: object) -> Callable:
        record = self.begin()
        record.nodes = sum(n.op.startswith("call") for n in gm.graph.nodes)
        record.break_reason, record.break_line = why_it_ended(gm)
        self.graphs.append(record)
        if not record.nodes:
            record.eager_reason = "the graph has no operators"
            return gm.forward
        if given_fakes(gm):
            record.eager_reason = "the inputs are fake tensors, which only PyTorch's own operators take"
            return gm.forward
        try:
            captured = capture_graph(gm, example_inputs, record.name, self.arguments)
            call, record.compilation = compile_captured(captured, gm.forward, record.name, self.options)
            return call
        except Exception as error:
            record.failure = getattr(error, "tessera_failure", None)
            return self.run_eagerly(gm, record, error)

    def begin(self) -> GraphRecord:
        """A record of the graph that Dynamo hands over now, with what it says of it."""
        compile_id = str(CompileContext.current_compile_id())
        return self.next_record(compile_id, called_at=calling_line(), recompile_reason=_recompile_reason())

    def next_record(self, compile_id: str = "", **about: str) -> GraphRecord:
        """What there is to say of one graph more, under a name that no other has."""
        return GraphRecord(f"{self.name}_{len(self.graphs)}", compile_id, **about)  # type: ignore[arg-type]

    def run_eagerly(self, gm: torch.fx.GraphModule, record: GraphRecord, error: Exception) -> Callable:
        """Correct without us: this one graph runs as eager PyTorch does."""
        expected = isinstance(error, CaptureError)
        if self.strict if self.strict is not None else config.strict:
            raise error
        record.eager_reason = f"{type(error).__name__}: {error}".split("\n")[0]
        if not expected:
            place = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(
                f"Tessera could not compile {record.name} and runs it eagerly: {record.eager_reason} "
                f"(in {place.name}, {place.filename.rsplit('/', 1)[-1]}:{place.lineno}). "
                "Please report this with the script that tessera.reproduce(fast, 'repro.py') or, on the command line, "
                "`tessera repro script.py` writes; TESSERA_STRICT=1 raises it.",
                stacklevel=2,
            )
        return gm.forward


def _recompile_reason() -> str:
    """Why Dynamo compiles the frame at hand again; empty at a first time. It forgets soon, so this is asked at once."""
    return getattr(torch._dynamo.utils.get_metrics_context(), "_metrics", {}).get("recompile_reason") or ""


class Compiled:
    """State of one jitted callable; `stages`, `edit` and `explain` look here."""

    def __init__(
        self,
        fn: Callable,
        backend: Backend | Dispatcher,
        call: Callable,
        again: Callable,
        anew: Callable[[], Callable] | None = None,
    ) -> None:
        """`anew` gives a call that has compiled nothing yet."""
        self.fn, self.backend, self.call = fn, backend, call
        looks = isinstance(fn, torch.nn.Module) and anew is not None
        self.hooks: ModuleHooks[Callable] | None = ModuleHooks(fn) if looks else None
        self.anew = anew
        self.failures = 0
        self.owner: object = None  # the function that carries this state
        self.again = again  # compiles something else with the same options
        if isinstance(backend, Backend):
            self.call = self.first_call(call, backend)
        for tell in WATCHERS:
            tell(self)

    def first_call(self, call: Callable, backend: Backend) -> Callable:
        """Dynamo may give up on a whole function without a word: then no graph says why."""

        def first(*args: object, **kwargs: object) -> object:
            last_counted()
            out = call(*args, **kwargs)
            if not backend.graphs and (reason := last_counted()):
                eager = "Dynamo found nothing that it could compile"
                backend.graphs.append(backend.next_record(break_reason=reason, eager_reason=eager))
            self.call = call
            return out

        return first

    def look_at_hooks(self) -> None:
        """Dynamo compiles a module's hooks with it and does not see when they change: then it begins anew."""
        assert self.hooks is not None and self.anew is not None
        changed, call = self.hooks.changed(self.call)
        if changed:
            self.call = call or self.anew()

    def recover(self, error: Exception, args: tuple, kwargs: dict) -> object:
        """Dynamo itself failed. If none of the user's code has run yet, the call runs eagerly instead."""
        strict = self.backend.strict if isinstance(self.backend, Backend) else None
        if isinstance(error, AssertionError) and not _of_dynamo(error):
            raise error
        if (strict if strict is not None else config.strict) or _user_code_ran(error):
            raise error
        self.failures += 1
        reason = str(error).strip().splitlines()[0]
        if isinstance(self.backend, Backend):
            self.backend.graphs.append(self.backend.next_record(eager_reason=reason))
        if self.failures >= 3:  # Dynamo would try, and fail, at every call
            self.call = self.fn
        return self.fn(*args, **kwargs)

    def compilations(self) -> list[Compilation]:
        if isinstance(self.backend, Dispatcher):
            return self.backend.compilations
        return [g.compilation for g in self.backend.graphs if g.compilation is not None]


def _user_code_ran(error: BaseException) -> bool:
    """A frame of the user's own between our call and the failure means that part of the call was carried out."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(not frame.filename.startswith(QUIET) for frame in frames)


def _of_dynamo(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename.startswith(os.path.dirname(torch._dynamo.__file__))


def backend(gm: torch.fx.GraphModule, example_inputs: list[object], **kwargs: object) -> Callable:
    """`torch.compile(model, backend="tessera")`; options: executors, recompute, memory_budget, offload, strict,
    cuda_graph."""
    options = dict(kwargs.get("options") or {})  # type: ignore[call-overload]
    known = {"executors", "recompute", "memory_budget", "offload", "strict", "cuda_graph"}
    if unknown := set(options) - known:
        raise OptionError(f"unknown option {sorted(unknown)[0]!r}; the options are {', '.join(sorted(known))}")
    strict = options.pop("strict", None)
    made = Options.of(
        options.get("executors"),
        options.get("recompute"),
        options.get("memory_budget"),
        options.get("cuda_graph", False),
        options.get("offload"),
    )
    return Backend(made, strict)(gm, example_inputs)


def jit(
    fn: Callable | None = None,
    *,
    executors: str | list[str] | tuple[str, ...] | None = None,
    frontend: str | None = None,
    strict: bool | None = None,
    memory_budget: str | int | None = None,
    recompute: str | None = None,
    offload: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    cuda_graph: bool = False,
    buckets: Buckets | None = None,
) -> Callable:
    """Compile a model, function or method. Also a decorator, with or without options.

    executors      who may run what, in priority order: ["sdpa", "aten"], or "sdpa,aten"; None: as the flag says
    frontend       "dynamo" (any Python, guards, graph breaks) or "functional" (JAX style, smallest overhead)
    strict         raise on an internal failure instead of running that graph eagerly
    memory_budget  bytes that may be saved for backward, such as "8GB"
    recompute      what backward may recompute: "none", "views", "cheap", "auto"
    offload        "host": large tensors saved for backward wait in host memory; memory_budget then bounds the predicted
                   peak of the programs instead of what is saved
    dynamic        as torch.compile's: None learns from changing sizes, True is dynamic from the start
    fullgraph      refuse graph breaks
    cuda_graph     replay programs without gradients as CUDA graphs; explain says where that cannot be
    buckets        sizes that changing inputs are padded to (tessera.Buckets), so that few programs and graphs serve all
    """
    again = functools.partial(
        jit, executors=executors, frontend=frontend, strict=strict, memory_budget=memory_budget,
        recompute=recompute, offload=offload, dynamic=dynamic, fullgraph=fullgraph, cuda_graph=cuda_graph,
        buckets=buckets,
    )  # fmt: skip
    if fn is None:
        return again
    if not callable(fn) and not isinstance(fn, ExportedProgram):
        raise OptionError(f"expected a module, function, method or exported program, got {type(fn).__name__}")
    if isinstance(fn, type) and issubclass(fn, torch.nn.Module):
        raise OptionError(f"expected a module, got the class {fn.__name__}: make one first, such as {fn.__name__}(…)")
    if dynamic not in (None, True, False):
        raise OptionError(f"dynamic: expected True, False or None, got {dynamic!r}")
    if buckets is not None and not isinstance(buckets, Buckets):
        raise OptionError(f"buckets: expected a tessera.Buckets, got {type(buckets).__name__}")
    how = frontend or config.frontend
    if how not in FRONTENDS:
        raise OptionError(f"unknown frontend {how!r}; the frontends are {', '.join(FRONTENDS)}")
    if isinstance(state := compiled_state(fn), Compiled):
        fn = state.fn
    options = Options.of(executors, recompute, memory_budget, cuda_graph, offload)
    if isinstance(fn, ExportedProgram):
        return _compiled_export(fn, options, again)
    refuse_suspended(fn, generators=how == "functional")
    name, names = name_of(fn), argument_names(fn)
    if how == "functional":
        dispatcher = Dispatcher(fn, name, options)
        call = build(dispatcher)
        return _wrap(fn, Compiled(fn, dispatcher, bucketed(call, buckets, names) if buckets else call, again))
    backend = Backend(options, strict, name, names)

    def anew() -> Callable:
        call = under_dynamo(entry_of(fn, name), backend, dynamic=dynamic, fullgraph=fullgraph)
        return bucketed(call, buckets, names) if buckets else call

    return _wrap(fn, Compiled(fn, backend, anew(), again, anew))


# Of one function. A model that generates needs a program for the prompt, a token and a full window, each for one row,
# for many and for another cache; past the limit calls run eagerly, and PyTorch's own is soon reached.
PROGRAMS = 32
_PYTORCHS_LIMIT = 8


def under_dynamo(entry: Callable, backend: Backend, **options: bool | None) -> Callable:
    """torch.compile, with room for more programs than it has by itself. A limit that the user set is kept."""
    ours = torch._dynamo.config.recompile_limit == _PYTORCHS_LIMIT
    if ours and "recompile_limit" in inspect.signature(torch.compile).parameters:  # PyTorch 2.11 has one for all
        options["recompile_limit"] = PROGRAMS  # type: ignore[assignment]
    return torch.compile(entry, backend=Handle(backend), **options)  # type: ignore[call-overload]


class Handle:
    """What Dynamo gets in a backend's place. It keeps every backend for good, and a backend knows a whole model."""

    def __init__(self, backend: Backend) -> None:
        self.backend = weakref.ref(backend)  # held by what `jit` gave, without which nothing is compiled

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[object], **more: object) -> Callable:
        backend = self.backend()
        assert backend is not None, "a graph is compiled for a function that is gone"
        return backend(gm, example_inputs, **more)


def _compiled_export(program: ExportedProgram, options: Options, again: Callable) -> Callable:
    """An exported program is captured already: compile it now, for the sizes it was exported with."""
    exported = capture_export(program)
    module = program.module()

    def eager(*inputs: object) -> tuple:
        args, kwargs = pytree.tree_unflatten(list(inputs[len(exported.held) :]), exported.in_spec)
        return tuple(pytree.tree_leaves(module(*args, **kwargs)))

    call, compilation = compile_captured(exported.captured, eager, "exported", options)

    def run(*args: object, **kwargs: object) -> object:
        return exported.pack(call(*exported.held, *exported.flatten(args, kwargs)))

    backend = Backend(options)
    backend.graphs.append(GraphRecord("exported", "", compilation))
    run.__tessera__ = Compiled(run, backend, run, again)  # type: ignore[attr-defined]
    return run


def _wrap(fn: Callable, state: Compiled) -> Callable:
    return _compiled_module(fn, state) if isinstance(fn, torch.nn.Module) else _compiled_function(fn, state)


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


def compiled_state(fn: object) -> Compiled | None:
    """The state of a jitted callable; a function made from one (`functools.wraps`) only carries its attributes."""
    state = getattr(fn, "__tessera__", None)
    owner = getattr(state, "owner", None)
    return state if owner is None or owner is fn else None


def _compiled_function(fn: Callable, state: Compiled) -> Callable:
    @functools.wraps(fn)
    def compiled(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        if recording() is not None:  # inside a transform: be traced as the plain function
            return fn(*args, **kwargs)
        try:
            return state.call(*args, **kwargs)
        except DYNAMO_ERRORS as error:
            return state.recover(error, args, kwargs)

    state.owner = compiled
    compiled.__tessera__ = state  # type: ignore[attr-defined]
    keep_own_call(getattr(fn, "__self__", None), compiled)
    return compiled


_module_classes: dict[type, type] = {}


def _compiled_module(module: torch.nn.Module, state: Compiled) -> torch.nn.Module:
    """An object of the model's own class that shares its `__dict__`; only calling it differs."""
    cls = type(module)
    if cls not in _module_classes:
        _module_classes[cls] = type(
            f"Compiled{cls.__name__}", (_ModuleCall, cls), {"__module__": cls.__module__, **own_call(cls)}
        )
    made = object.__new__(_module_classes[cls])
    object.__setattr__(made, "__dict__", module.__dict__)
    _states[id(made)] = state
    watch(made)
    return made


_states: dict[int, Compiled] = {}


class _ModuleCall:
    """What a compiled module does otherwise than the model whose state it shares."""

    @property
    def __tessera__(self) -> Compiled:
        return _states[id(self)]

    def __call__(self, *args, **kwargs):  # noqa: ANN002, ANN003, ANN204
        state = _states[id(self)]
        if recording() is not None:
            return state.fn(*args, **kwargs)
        if state.hooks is not None and (state.hooks.seen != RemovableHandle.next_id or state.hooks.some):
            state.look_at_hooks()
        try:
            return state.call(*args, **kwargs)
        except DYNAMO_ERRORS as error:
            return state.recover(error, args, kwargs)

    def __deepcopy__(self, memo: dict) -> torch.nn.Module:
        state = _states[id(self)]
        return state.again(copy.deepcopy(state.fn, memo))  # type: ignore[return-value]

    def __reduce__(self) -> tuple:
        raise TesseraError("a compiled module is not pickled; save the model's state_dict, or the model itself")

    def __del__(self) -> None:
        if _states is not None:  # None while the interpreter shuts down
            _states.pop(id(self), None)
