"""Functional tracing: a Python function over tensors becomes a Trace, with no bytecode looked at.

In: a function and its arguments, any pytrees. Out: a `Traced`: the trace, whose inputs are the tensors among the
arguments and then the tensors of a surrounding recording that the function closes over (so that a nested
transform never takes an outer variable for a constant), and the structures of what goes in and comes out. Python
numbers are baked in; other tensors closed over, such as a module's parameters, become the trace's constants.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tessera.frontends.captured import aliases
from tessera.frontends.functional.data_writes import refuse_data_writes, watched_data
from tessera.frontends.requires_grad import requires_grad_known, with_history
from tessera.ir import fake
from tessera.ir.aliased import Aliased
from tessera.ir.builder import Builder
from tessera.ir.equation import Value
from tessera.ir.record import Recorded, Recorder, record_with, recording, user_line
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, type_of
from tessera.ops.op import keep_whole
from tessera.torch_internals import pytree
from tessera.torch_internals.autograd import TensorBase
from tessera.torch_internals.dispatch import disable_current_modes, is_traceable_wrapper_subclass
from tessera.torch_internals.dynamo import COMPILED_CALL, compile_lock, frames_uncounted
from tessera.torch_internals.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    detect_fake_mode,
)
from tessera.torch_internals.functorch import functorch_interpreters
from tessera.torch_internals.memory import memory_of
from tessera.torch_internals.shapes import GuardOnDataDependentSymNode
from tessera.util.errors import CaptureError
from tessera.util.files import PACKAGE

Leaf = object


ASKS_A_VALUE = (DataDependentOutputException, GuardOnDataDependentSymNode)
# Of `.numpy()`, and of indexing by what `.tolist()` gave, PyTorch says so in words alone.
ASKS_IN_WORDS = (".numpy() is not supported", "valid indices (got SymInt)")
# Functions of PyTorch that a traced program must not run as they are, since what they rely on (autograd, TorchDynamo)
# is not at work: (owner, name, what to put in place of the original). `function`, `control` and others enter theirs.
WATCHED: list[tuple[Any, str, Callable[[Any], object]]] = []
_tracing: list[Builder] = []
_ABSENT = object()


@dataclass(frozen=True)
class Traced:
    trace: Trace
    leaves: tuple[Leaf, ...]  # the arguments, flat; those at `places` are the trace's first inputs
    places: tuple[int, ...]
    captured: tuple[torch.Tensor, ...]  # tensors closed over that are the trace's last inputs
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    mode: FakeTensorMode
    aliased: dict[int, Aliased]  # outputs that are views of an input which the function writes
    enables_grad: bool = False  # under no_grad, the function turns gradients on for a part of itself

    @property
    def args(self) -> list[torch.Tensor]:
        """What the trace is called with to compute what the function computes."""
        return [*(self.leaves[i] for i in self.places), *self.captured]  # type: ignore[list-item]

    def grad_mode(self) -> AbstractContextManager:
        """What the trace runs in."""
        return torch.enable_grad() if self.enables_grad else nullcontext()

    def input(self, place: int) -> Value:
        """The input that stands for the argument leaf at `place`."""
        return self.trace.inputs[self.places.index(place)]

    def pack(self, outputs: Sequence[object]) -> object:
        return pytree.tree_unflatten(list(outputs), self.out_spec)


def trace_function(
    fn: Callable,
    args: tuple,
    kwargs: dict | None = None,
    types: dict[int, TensorType] | None = None,
    name: str = "",
    close: bool = False,
    differentiated: Collection[int] = (),
    moved: Collection[int] = (),
    trained: Collection[int] = (),
) -> Traced:
    """Trace `fn(*args, **kwargs)`.

    `types[i]` replaces the type of the i-th flat argument (one example of a batch). With `close`, every tensor
    closed over becomes an input and the trace has no constants: what a sub-trace must be. `differentiated` are the flat
    arguments that a transform differentiates by: what is made of them says that it requires gradients. `moved` are the
    ones that forward mode gives tangents, `trained` those that require gradients outside.
    """
    leaves, in_spec = pytree.tree_flatten((args, kwargs or {}))
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    mode = mode_for(leaves)
    every = argument_names(fn, args, kwargs or {})
    names = [every[i] for i in places]
    builder = Builder(name or getattr(fn, "__name__", "function").replace("<lambda>", "function"), mode)

    def run(*fakes: torch.Tensor) -> object:
        full = list(leaves)
        for place, tensor in zip(places, fakes, strict=True):
            full[place] = tensor
        inner_args, inner_kwargs = pytree.tree_unflatten(full, in_spec)
        with ExitStack() as stack:
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            return fn(*inner_args, **inner_kwargs)

    autocast = autocast_state()
    # Of a function that is differentiated, a no_grad around the call says nothing.
    grad = bool(differentiated) or torch.is_grad_enabled()
    with fake.alone(), torch.set_grad_enabled(grad):
        fakes = [fake.fake_of((types or {}).get(i) or _type(leaves[i], i), mode) for i in places]
        try:
            # torch.func hides every argument of what it differentiates backwards; forwards, those with tangents.
            hidden = places if differentiated else {*moved, *(types or ())}
            begin = {*differentiated, *trained}
            flags = [i in begin or (leaves[i] if i not in hidden else False) for i in places]
            with watching(builder), requires_grad_known(builder, flags, bool(begin or moved)):
                recorded = record_with(Recorder(builder, keep_whole), run, fakes, names)
        except ASKS_A_VALUE as error:
            raise value_needed(error) from error
        except DynamicOutputShapeException as error:  # an operator for whose sizes PyTorch has no symbols
            raise CaptureError(
                f"{error_line(error)}: the sizes of what {error.func} gives are known only when the program runs; give "
                "it Python numbers in place of tensors that hold lengths or counts, or keep the shape"
            ) from error
        except (RuntimeError, IndexError) as error:
            if any(words in str(error) for words in ASKS_IN_WORDS):
                raise value_needed(error) from error
            if AUTOGRAD in str(error):
                raise CaptureError(f"{error_line(error)}: {_DIFFERENTIATES}") from error
            raise
        if builder.enables_grad and (types or moved):  # They are on around it then: what runs without them is marked.
            with torch.enable_grad():
                again = trace_function(
                    torch.no_grad()(fn), args, kwargs, types, name, close, moved=moved, trained=trained
                )
            return dataclasses.replace(again, enables_grad=True)
        if builder.data_taken and differentiated:
            known = (*zip(recorded.trace.inputs, flags, strict=True), *recorded.trace.constants.items())
            refuse_data_writes(recorded.trace, builder.data_taken, with_history(known, recorded.trace.equations))
        _refuse_unknown_sizes(recorded.trace)
        _refuse_hidden_writes(recorded.trace)
        _refuse_shared_writes(recorded.trace, [leaves[i] for i in places])
        trace, captured = _close(recorded.trace, mode, close, any(isinstance(x, FakeTensor) for x in leaves))
    return Traced(trace, tuple(leaves), places, captured, in_spec, recorded.spec, mode, _written(recorded))


def _written(recorded: Recorded) -> dict[int, Aliased]:
    """Outputs that show an input after it was written: running the trace gives copies of them."""
    if not recorded.trace.mutations:
        return {}
    views = {i: a for i, a in aliases(recorded)[0].items() if not a.of_output}
    return {i: a for i, a in views.items() if recorded.trace.inputs[a.source] in recorded.trace.mutations}


def value_needed(error: Exception) -> CaptureError:
    """The error that says, with the user's line, that a program asks for a number only a run would give."""
    return CaptureError(f"{error_line(error)}: {_ASKS}")


def _refuse_unknown_sizes(trace: Trace) -> None:
    """PyTorch's formulas are traced one by one; a size that each of them would learn only by running has no name
    that they share."""
    for symbol, (v, dim) in trace.symbols.items():
        if symbol.startswith(("u", "zuf")) and v not in trace.inputs:
            source = next((e.source for e in trace.equations if v in e.results()), None)
            if dim is None:  # by the program's own line, or inside an operator it calls: they look the same here
                raise CaptureError(f"{source}: {_ASKS}")
            raise CaptureError(
                f"{source}: the shape of {v.name} is known only when the program runs; keep the shape, and choose "
                f"values with torch.where. {_KEEPS}"
            )


def _refuse_hidden_writes(trace: Trace) -> None:
    """Collectives that write into a tensor say so to nobody."""
    for eqn in trace.equations:
        if getattr(eqn.op, "namespace", "") == "c10d":
            raise CaptureError(
                f"{eqn.source}: {eqn.op} writes into a tensor where a trace cannot see it; expected all_reduce, "
                "broadcast, all_gather, all_gather_into_tensor, reduce_scatter_tensor or all_to_all_single"
            )


def _refuse_shared_writes(trace: Trace, tensors: Sequence[object]) -> None:
    """Every argument was traced with memory of its own; a write that another argument would see is not in the trace."""
    if not trace.mutations:
        return
    arguments = dict(zip(trace.inputs, tensors, strict=False))
    memory = [(v, memory_of(x)) for v, x in (*arguments.items(), *trace.constants.items())]
    for target in trace.mutations:
        if sum(m == memory_of(arguments[target]) for _, m in memory) > 1:
            raise CaptureError(
                f"the function writes {target.name}: {target.type}, whose memory another argument shares"
            )


@contextmanager
def watching(builder: Builder) -> Iterator[None]:
    """While this function is traced, what `WATCHED` names is replaced. To other threads it does what it did; they trace
    and compile when this one is done."""
    with compile_lock, frames_uncounted(), _replaced(builder):
        yield


@contextmanager
def _replaced(builder: Builder) -> Iterator[None]:
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in WATCHED]
    _tracing.append(builder)
    for (owner, name, original), (_, _, replace) in zip(before, WATCHED, strict=True):
        setattr(owner, name, replace(original))
    try:
        yield
    finally:
        for owner, name, original in before:
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        _tracing.pop()


def tracing() -> bool:
    """The program that runs now is being traced here, by no other recorder or transform in between."""
    recorder = recording()
    ours = bool(_tracing) and recorder is not None and recorder.builder is _tracing[-1]
    return ours and not functorch_interpreters()


def _refused(name: str) -> Callable[[Any], object]:
    """A method that makes a tensor eager autograd's: while a function is traced there is no such thing."""
    plain = getattr(TensorBase, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        if tracing() and isinstance(self, FakeTensor) and all((*args, *kwargs.values())):
            raise CaptureError(
                f"{user_line()}: Tensor.{name}() is called inside a transform, which differentiates by its arguments; "
                "call grad or vjp there in place of autograd"
            )
        return plain(self, *args, **kwargs)

    return lambda _: method


def _deepcopy(original: Callable) -> Callable:
    """A tensor that is closed over is copied as it is, outside the program; one of the program has no data to copy."""

    def method(self: torch.Tensor, memo: dict) -> torch.Tensor:
        if not tracing():
            return original(self, memo)
        if isinstance(self, FakeTensor):
            raise CaptureError("copy.deepcopy of a tensor inside a transform; use clone")
        with disable_current_modes():
            return original(self, memo)

    return method


def _as_written(original: Callable) -> Callable:
    """A function that `torch.compile` gave runs as it is: what it does is recorded with the rest."""

    def callback(given: object) -> object:
        return original(given) if recording() is None else None

    return callback


def _by_steps(original: Callable) -> Callable:
    """oneDNN's LSTM is one operator without rules: its gradient's sizes cannot be told, nor is there one of a batch."""

    def forward(*args: Any, **kwargs: Any) -> object:
        if recording() is None:
            return original(*args, **kwargs)
        onednn, was = torch.backends.mkldnn, torch.backends.mkldnn.enabled
        onednn.enabled = False
        try:
            return original(*args, **kwargs)
        finally:
            onednn.enabled = was

    return forward


WATCHED += [(torch.Tensor, name, _refused(name)) for name in ("requires_grad_", "retain_grad")]
WATCHED.append((torch.Tensor, "data", watched_data))
WATCHED += [(owner, "__deepcopy__", _deepcopy) for owner in (torch.Tensor, torch.nn.Parameter)]
WATCHED += [(torch.nn.LSTM, "forward", _by_steps), (torch, "lstm", _by_steps)]
WATCHED.append((*COMPILED_CALL, _as_written))


def mode_for(leaves: Sequence[object]) -> FakeTensorMode:
    """The mode the program's tensors already live in, if any: symbols of one recording stay in it."""
    recorder = recording()
    if recorder is not None:
        return recorder.builder.mode
    return detect_fake_mode([x for x in leaves if isinstance(x, torch.Tensor)]) or fake.default_mode()


def _close(
    trace: Trace, mode: FakeTensorMode, everything: bool, fakes_known: bool
) -> tuple[Trace, tuple[torch.Tensor, ...]]:
    """Make inputs of the constants that belong to a surrounding recording."""
    outer = {
        v: t for v, t in trace.constants.items() if everything or (isinstance(t, FakeTensor) and t.fake_mode is mode)
    }
    leaked = [v for v, t in trace.constants.items() if isinstance(t, FakeTensor)]
    if leaked and recording() is None and not fakes_known:
        raise CaptureError(
            f"the function uses a tensor ({leaked[0].type}) that was made inside another traced function and kept "
            "after it ended; return it from that function instead of storing it"
        )
    constants = {v: t for v, t in trace.constants.items() if v not in outer}
    return trace.with_(inputs=(*trace.inputs, *outer), constants=constants), tuple(outer.values())


def _type(x: object, index: int) -> TensorType:
    assert isinstance(x, torch.Tensor)
    if is_traceable_wrapper_subclass(x):
        raise CaptureError(
            f"argument {index} is a {type(x).__name__}, a tensor subclass that runs its own code; pass plain tensors"
        )
    return type_of(x)  # type: ignore[return-value]


def argument_names(fn: Callable, args: tuple, kwargs: dict) -> list[str]:
    """A name for every leaf of the arguments: the parameter's own, or the keys of the dicts that hold the leaf."""
    positional = _positional(fn)
    paths, _ = pytree.tree_flatten_with_path((args, kwargs))
    return [_leaf_name(path, positional, index) for index, (path, _) in enumerate(paths)]


def _leaf_name(path: tuple, positional: Sequence[str], index: int) -> str:
    keys = [str(key.key) for key in path[1:] if isinstance(key, pytree.MappingKey) and isinstance(key.key, str)]
    keys += [key.name for key in path[1:] if isinstance(key, pytree.GetAttrKey)]
    if keys:
        return "_".join(keys).replace(".", "_")
    numbers = [key.idx for key in path[1:] if isinstance(key, pytree.SequenceKey)]
    if not numbers or numbers[0] >= len(positional):
        return f"x{index}"
    return "_".join([positional[numbers[0]], *map(str, numbers[1:])])


def _positional(fn: Callable) -> list[str]:
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):  # built in C, no signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


_KEEPS = (
    "In place of cross_entropy(x[mask], labels[mask]) write cross_entropy(x, labels.where(mask, -100)), of "
    "x[mask].mean() write x.where(mask, 0).sum() / mask.sum()."
)
_ASKS = (
    "the program asks for the value of a tensor (.item(), bool(), a Python `if` on it, how many rows x[mask] has) "
    "while it is being traced. Choose with torch.where or torch.cond, or pass that number as a Python argument. "
    f"{_KEEPS}"
)
AUTOGRAD = "does not require grad and does not have a grad_fn"
_DIFFERENTIATES = (
    "backward() or autograd.grad is called while the program is being traced, where autograd is not at work. Give the "
    "loss back to whoever differentiates it, or call tessera.grad or torch.func.grad there."
)
UNKNOWN_LINE = "an unknown line"


def error_line(error: Exception) -> str:
    """The user's line that an error passed through."""
    hidden = (torch.__path__[0], PACKAGE, "<")
    line, frame = UNKNOWN_LINE, error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if not code.co_filename.startswith(hidden):
            line = f"{code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return line


def autocast_state() -> list[tuple[str, torch.dtype]]:
    """Which devices the user casts for: `alone` switches that off, inside the function it holds."""
    return [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
