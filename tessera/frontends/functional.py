"""Functional tracing: a Python function over tensors becomes a Trace, with no bytecode looked at.

In: a function and its arguments, any pytrees. Out: a `Traced`: the trace, whose inputs are the tensors among the
arguments and then the tensors of a surrounding recording that the function closes over (so that a nested
transform never takes an outer variable for a constant), and the structures of what goes in and comes out. Python
numbers are baked in; other tensors closed over, such as a module's parameters, become the trace's constants.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.equation import Value
from tessera.ir.record import record, recording
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, type_of
from tessera.ops.op import keep_whole
from tessera.util.errors import CaptureError, RuleError

Leaf = object


class ValueNeeded(CaptureError):
    """The user's own code asks for a number that only a run would give."""


# What a program that PyTorch can run may raise while it is traced.
UNTRACEABLE = (CaptureError, RuleError, DynamicOutputShapeException, UnsupportedOperatorException, UnsupportedFakeTensorException)

# What records a call of a torch.autograd.Function: `frontends/custom` puts its handler here.
FUNCTION_HANDLERS: list[Callable[[type, tuple], object]] = []
_tracing: list[Builder] = []


@dataclass(frozen=True)
class Traced:
    trace: Trace
    leaves: tuple[Leaf, ...]  # the arguments, flat; those at `places` are the trace's first inputs
    places: tuple[int, ...]
    captured: tuple[torch.Tensor, ...]  # tensors closed over that are the trace's last inputs
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    mode: FakeTensorMode

    @property
    def args(self) -> list[torch.Tensor]:
        """What the trace is called with to compute what the function computes."""
        return [*(self.leaves[i] for i in self.places), *self.captured]  # type: ignore[list-item]

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
) -> Traced:
    """Trace `fn(*args, **kwargs)`.

    `types[i]` replaces the type of the i-th flat argument (one example of a batch). With `close`, every tensor
    closed over becomes an input and the trace has no constants: what a sub-trace must be.
    """
    leaves, in_spec = pytree.tree_flatten((args, kwargs or {}))
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    mode = mode_for(leaves)
    names = _names(in_spec, places)
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

    autocast = _autocast_state()
    # A no_grad around the call says nothing about the function: only one inside it is part of the program.
    with fake.alone(), torch.enable_grad():
        fakes = [fake.fake_of((types or {}).get(i) or _type(leaves[i], i), mode) for i in places]
        try:
            with _watching_functions(builder):
                trace, out_spec = record(run, fakes, names, keep_whole, builder)
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
            line, own = _line(error)
            kind = CaptureError if own else ValueNeeded
            raise kind(
                f"{line}: the program asks for the value of a tensor (.item(), bool(), a Python `if` on it) "
                "while it is being traced. Choose with torch.where or torch.cond, or pass that number as a Python "
                "argument."
            ) from error
        trace, captured = _close(trace, mode, close, any(isinstance(x, FakeTensor) for x in leaves))
    return Traced(trace, tuple(leaves), places, captured, in_spec, out_spec, mode)


@contextmanager
def _watching_functions(builder: Builder) -> Iterator[None]:
    """While this function is traced, autograd.Functions are recorded with their own backward: autograd, which
    would call it, is not at work."""
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        recorder = recording()
        ours = recorder is not None and recorder.builder is _tracing[-1] and not retrieve_all_functorch_interpreters()
        if FUNCTION_HANDLERS and not kwargs and ours:
            return FUNCTION_HANDLERS[0](cls, args)
        return _apply.__func__(cls, *args, **kwargs)

    _tracing.append(builder)
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]
        _tracing.pop()


_apply = torch.autograd.Function.__dict__["apply"]


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
    leaked = [v for v, t in outer.items() if isinstance(t, FakeTensor)]
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


def _names(spec: pytree.TreeSpec, places: tuple[int, ...]) -> list[str]:
    """`x0`, `x1`, … for positional tensors; keys of dicts where there are any."""
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))[0]
    names = []
    for index, (path, _) in enumerate(paths):
        keys = [str(getattr(key, "key", "")) for key in path[1:] if isinstance(getattr(key, "key", None), str)]
        attributes = [key.name for key in path[1:] if isinstance(key, pytree.GetAttrKey)]
        names.append("_".join([*keys, *attributes]).replace(".", "_") or f"x{index}")
    return [names[i] for i in places]


def _line(error: Exception) -> tuple[str, bool]:
    """The user's line that an error passed through, and whether PyTorch's own Python asked, called from there."""
    hidden = (torch.__path__[0], __file__.rsplit("/frontends/", 1)[0] + "/", "<")
    own = False
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(hidden):
            return f"{frame.filename}:{frame.lineno}", own
        own = own or frame.filename.startswith(_LIBRARY)
    return "an unknown line", own


# PyTorch's functions in Python; its machinery (dispatch, fake tensors) stands elsewhere.
_LIBRARY = tuple(f"{torch.__path__[0]}/{part}" for part in ("nn/", "functional.py", "distributions/", "linalg", "_refs", "masked"))


def _autocast_state() -> list[tuple[str, torch.dtype]]:
    """Which devices the user casts for: `alone` switches that off, inside the function it holds."""
    return [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
