"""`jit(frontend="functional")`: capture by running the function once, dispatch by the types of the arguments.

No bytecode and no guards on Python state, as in JAX: the function is taken to be pure, and what it reads from
closures and globals is fixed when it is traced (tensors closed over are kept by reference, so writes to them
are seen, the function's own too). A call costs one key, one dictionary look-up and the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tessera.frontends.captured import Captured, capture
from tessera.frontends.functional import checks  # noqa: F401  (torch._check becomes part of the program)
from tessera.frontends.functional.trace import ASKS_A_VALUE, argument_names, value_needed, watching
from tessera.frontends.requires_grad import requires_grad_known
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.record import recording
from tessera.ops.custom import is_float
from tessera.ops.op import keep_whole
from tessera.pipeline.compilation import Compilation, compile_captured
from tessera.pipeline.options import Options
from tessera.torch_internals import pytree
from tessera.torch_internals.dispatch import is_any_autocast_enabled
from tessera.torch_internals.dynamo import compile_lock
from tessera.torch_internals.fake import FakeTensor, FakeTensorMode
from tessera.util.errors import InputError

Entry = Callable[..., object]


class Dispatcher:
    """The compiled forms of one function, by the types of its arguments."""

    def __init__(self, fn: Callable, name: str, options: Options) -> None:
        self.fn, self.name, self.options = fn, name, options
        self.entries: dict[object, Entry] = {}
        self.compilations: list[Compilation] = []

    def compile(self, key: object, args: tuple, kwargs: dict) -> Entry:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(x, FakeTensor) for x in leaves):  # the user's own: there is nothing that a kernel could read
            return lambda args, kwargs: self.fn(*args, **kwargs)
        captured, lifted, given = self.capture(leaves, spec)
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

        def eager(*tensors: torch.Tensor) -> tuple:
            full = list(leaves)
            for place, x in zip(places, tensors, strict=False):
                full[place] = x
            inner, named = pytree.tree_unflatten(full, spec)
            return given.different(pytree.tree_leaves(self.fn(*inner, **named)))

        name = f"{self.name}_{len(self.compilations)}"
        call, compilation = compile_captured(captured, eager, name, self.options)
        self.compilations.append(compilation)
        entry = self.entries[key] = self.while_without_gradients(
            _entry(call, spec, places, lifted, given, len(args) if not kwargs else None), key, lifted
        )
        return entry

    def while_without_gradients(self, entry: Entry, key: object, lifted: tuple[torch.Tensor, ...]) -> Entry:
        """A tensor closed over that has no gradient may come to have one: the function itself may write it."""
        without = [x for x in lifted if torch.is_grad_enabled() and not x.requires_grad and is_float(x)]
        if not without:
            return entry

        def call(args: tuple, kwargs: dict) -> object:
            for x in without:
                if x.requires_grad:
                    with compile_lock:
                        now = self.compile(key, args, kwargs)
                    return now(args, kwargs)
            return entry(args, kwargs)

        return call

    def capture(self, leaves: list[object], spec: pytree.TreeSpec) -> tuple[Captured, tuple, Given]:
        """The trace with every tensor closed over as a further input, so that parameters can be trained."""
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        mode = fake.default_mode()
        given: list[Given] = []

        def run(*fakes: torch.Tensor) -> object:
            full = list(leaves)
            for place, x in zip(places, fakes, strict=True):
                full[place] = x
            args, kwargs = pytree.tree_unflatten(full, spec)
            different, once = Given.of(self.fn(*args, **kwargs))
            given.append(once)
            return different

        every = argument_names(self.fn, *pytree.tree_unflatten(leaves, spec))

        def record(enables: bool = False) -> tuple[Captured, bool]:
            fakes: list[object] = [_fake_of_its_own(leaves[i], mode) for i in places]  # type: ignore[arg-type]
            builder = Builder(self.name, mode)
            try:
                with watching(builder), requires_grad_known(builder, fakes):
                    names = [every[i] for i in places]
                    captured = capture(run, fakes, names, keep_whole, builder, close=True, enables_grad=enables)
                    return captured, builder.enables_grad
            except ASKS_A_VALUE as error:
                raise value_needed(error) from error

        captured, enables = record()
        if enables:
            with torch.enable_grad():
                captured, _ = record(enables)
        lifted = tuple(captured.trace.constants.values())
        trace = captured.trace.with_(inputs=(*captured.trace.inputs, *captured.trace.constants), constants={})
        grads = tuple(x.requires_grad for x in (*(leaves[i] for i in places), *lifted))  # type: ignore[attr-defined]
        return replace(captured, trace=trace, requires_grad=grads), lifted, given[-1]


def _fake_of_its_own(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A mode gives a tensor one fake. But two arguments that are one tensor now may be two at the next call, and so may
    an argument and a tensor closed over."""
    return mode.from_tensor(x.detach().requires_grad_(x.requires_grad), static_shapes=True)


@dataclass(frozen=True)
class Given:
    """The structure of what a function gives. A tensor given twice is one result of the program, at two places."""

    spec: pytree.TreeSpec
    order: tuple[int, ...]  # the result behind each leaf

    @staticmethod
    def of(out: object) -> tuple[list[object], Given]:
        """The leaves that are different objects, and how they make up `out`."""
        leaves, spec = pytree.tree_flatten(out)
        places: dict[int, int] = {}
        order = tuple(places.setdefault(id(x), len(places)) for x in leaves)
        return list({id(x): x for x in leaves}.values()), Given(spec, order)

    def different(self, leaves: Sequence[object]) -> tuple[object, ...]:
        """Of all leaves those that `pack` takes."""
        return tuple(dict(zip(self.order, leaves, strict=True)).values())

    def pack(self, out: Sequence[object]) -> object:
        return pytree.tree_unflatten([out[i] for i in self.order], self.spec)


def _entry(
    call: Callable, spec: pytree.TreeSpec, places: list[int], lifted: tuple, given: Given, flat: int | None
) -> Entry:
    """The shortest way from arguments to results for this structure."""
    single = given.spec.is_leaf()
    plain = flat is not None and places == list(range(flat)) == list(range(spec.num_leaves))
    if plain and not lifted and single:
        return lambda args, kwargs: call(*args)[0]

    def general(args: tuple, kwargs: dict) -> object:
        leaves = pytree.tree_leaves((args, kwargs))
        out = call(*[leaves[i] for i in places], *lifted)
        return given.pack(out)

    return general


def build(dispatcher: Dispatcher) -> Callable:
    """The function a caller sees."""
    entries, fn = dispatcher.entries, dispatcher.fn
    grad_mode, casting = torch.is_grad_enabled, is_any_autocast_enabled
    tensor, parameter = torch.Tensor, torch.nn.Parameter

    def call(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        key: list = [grad_mode(), casting()]
        for x in args:
            kind = type(x)
            if kind is tensor or kind is parameter:
                key += (x.shape, x.dtype, x.stride(), x.device, x.requires_grad)
            else:
                key = _slow_key(args, kwargs)
                break
        else:
            if kwargs or key[1]:
                key = _slow_key(args, kwargs)
        name = tuple(key)
        entry = entries.get(name)
        if entry is None:
            if recording() is not None:  # inside a transform: be traced as the plain function
                return fn(*args, **kwargs)
            with compile_lock:  # TorchDynamo's own: one thread compiles at a time, whichever way it came
                entry = entries.get(name) or dispatcher.compile(name, args, kwargs)
        return entry(args, kwargs)

    return call


def _slow_key(args: tuple, kwargs: dict) -> list:
    """Structure, types of tensors, values of everything else."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    casts = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    key: list = [torch.is_grad_enabled(), tuple(casts), spec]
    for x in leaves:
        if isinstance(x, torch.Tensor):
            strides = x.stride() if x.layout is torch.strided else None
            key += (type(x), x.shape, x.dtype, strides, x.device, x.requires_grad)
        elif x.__hash__ is None:
            raise InputError(
                f"expected arguments that are tensors or can be told apart by their values, got a {type(x).__name__}; "
                "pass a tuple or a frozenset, or use frontend='dynamo'"
            )
        else:
            key += (type(x), x)
    return key
