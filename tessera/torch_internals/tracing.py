"""TorchDynamo while it traces: the call of a module, what stands for values, and guards of our own.

In: what is to be asked before a module's call is traced. Out: functions over Dynamo's variables, so that nobody else
names its classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tessera.torch_internals.lookup import missing, owner_of, symbol
from tessera.util.garbage import collection_paused

_BLOCKS = "tracing equal blocks of a model once"
_variables = "torch._dynamo.variables"
ModuleVariable = symbol(f"{_variables}.UnspecializedNNModuleVariable", _BLOCKS)
TensorVariable = symbol(f"{_variables}.TensorVariable", _BLOCKS)
TupleVariable = symbol(f"{_variables}.TupleVariable", _BLOCKS)
_Constant = symbol(f"{_variables}.ConstantVariable", _BLOCKS)
_Symbolic = symbol(f"{_variables}.SymNodeVariable", _BLOCKS)
_Containers = (
    symbol(f"{_variables}.ListVariable", _BLOCKS),
    symbol(f"{_variables}.ConstDictVariable", _BLOCKS),
    symbol(f"{_variables}.lists.DequeVariable", _BLOCKS),
)
_wrap_fx_proxy = symbol(f"{_variables}.builder.wrap_fx_proxy", _BLOCKS)
_module_stack = symbol(f"{_variables}.nn_module.record_nn_module_stack", _BLOCKS)
_SideEffects = symbol("torch._dynamo.side_effects.SideEffects", _BLOCKS)
_existing = (
    symbol(f"{_variables}.base.AttributeMutationExisting", _BLOCKS),
    symbol(f"{_variables}.base.ValueMutationExisting", _BLOCKS),
)
_install_guard = symbol("torch._dynamo.guards.install_guard", _BLOCKS)
_GuardBuilder = symbol("torch._dynamo.guards.GuardBuilder", _BLOCKS)
_Guard = symbol("torch._guards.Guard", _BLOCKS)
_HigherOrder = symbol("torch._ops.HigherOrderOperator", _BLOCKS)
_StateSource = symbol("torch._dynamo.source.GlobalStateSource", _BLOCKS)
_LocalSource = symbol("torch._dynamo.source.LocalSource", _BLOCKS)
_TensorGuards = symbol("torch._C._dynamo.guards.TensorGuards", _BLOCKS)
# Dictionaries that changed since have another number.
dict_version: Callable[[dict], int] = symbol("torch._C._dynamo.guards.dict_version", _BLOCKS)

_NEEDED = (
    ModuleVariable, TensorVariable, TupleVariable, _Constant, _Symbolic, *_Containers, _wrap_fx_proxy, _module_stack,
    _SideEffects, *_existing, _install_guard, _GuardBuilder, _Guard, _StateSource, _LocalSource, _TensorGuards,
    _HigherOrder, dict_version,
)  # fmt: skip

Tx = Any  # Dynamo's translator of one frame
Variable = Any

# --- calls of modules, and writes ---

Ask = Callable[[Tx, Variable, list, dict, Callable[[], Variable]], Variable]


def ask_at_module_calls(ask: Ask, wrote: Callable[[Any, bool], None]) -> None:
    """From now on, for all that Dynamo traces: `ask(tx, module, args, kwargs, trace)` gives the result of a module's
    call, and `wrote(output, may_be_module)` is told where the program writes to a Python object that was there before;
    it is a module, or a list or dictionary that may be one's, or surely none."""
    if any(map(missing, _NEEDED)):  # then every block is traced by itself
        return
    theirs, allowed = ModuleVariable.call_function, _SideEffects.check_allowed_side_effect
    if hasattr(theirs, "asks"):
        return

    @functools.wraps(theirs)
    def call_function(self: Variable, tx: Tx, args: list, kwargs: dict) -> Variable:
        return ask(tx, self, args, kwargs, lambda: theirs(self, tx, args, kwargs))

    @functools.wraps(allowed)
    def check_allowed_side_effect(self: Any, item: Variable) -> bool:
        if isinstance(item.mutation_type, _existing):
            wrote(self.output_graph_weakref(), isinstance(item, (ModuleVariable, *_Containers)))
        return allowed(self, item)

    call_function.asks = ask  # type: ignore[attr-defined]
    ModuleVariable.call_function = call_function
    _SideEffects.check_allowed_side_effect = check_allowed_side_effect


def trace_without_collection(kind: type) -> None:
    """From now on, the collector of garbage waits while Dynamo traces a frame for a backend of this kind. A trace makes
    many objects and drops few of them."""
    theirs = _frames._compile
    if hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def compile_frame(*args: object, **kwargs: object) -> object:
        if not isinstance(_given_backend(args[_BACKEND]), kind):
            return theirs(*args, **kwargs)
        with collection_paused():
            return theirs(*args, **kwargs)

    _frames._compile = compile_frame


_frames = owner_of("torch._dynamo.convert_frame._compile", "tracing without the collector of garbage")
_BACKEND = 5  # its place among the arguments


def backend_of(output: Any) -> object:
    """What was given to `torch.compile` as its backend, by what Dynamo traces for it."""
    return _given_backend(output.compiler_fn)


def _given_backend(backend: Any) -> object:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", backend)


def in_program(tx: Tx) -> bool:
    """What is traced goes to the program itself, not to the body of a higher-order operator."""
    return tx.output.current_tracer.parent is None and not tx.output.export


def is_argument(source: Any) -> bool:
    """What stands there is reached from an argument of the frame, which may be another at each call."""
    while source is not None and hasattr(source, "base"):
        source = source.base
    return source is None or (isinstance(source, _LocalSource) and not source.is_derefed_cell_contents)


def stack_path(module: Variable) -> str:
    """The module, as a node's `nn_module_stack` has it."""
    name = module.get_nn_module_stack_source().name
    return name if isinstance(name, str) else name()


def is_higher_order(target: object) -> bool:
    return isinstance(target, _HigherOrder)


# --- values ---


def realized(value: Variable) -> Variable:
    return value.realize() if hasattr(value, "realize") else value


def constant_of(value: Variable) -> tuple[bool, object]:
    """Whether a value is a constant of Python's, and which."""
    return (True, value.value) if type(value) is _Constant else (False, None)


def node_of(value: Variable) -> torch.fx.Node | None:
    """The node that computes a tensor or a symbolic number; None of anything else."""
    return value.as_proxy().node if type(value) in (TensorVariable, _Symbolic) else None


def items_of(value: Variable) -> list[Variable] | None:
    """Of a plain tuple."""
    return list(map(realized, value.items)) if type(value) is TupleVariable else None


def tuple_of(items: list[Variable | None]) -> Variable:
    return TupleVariable([_Constant.create(None) if x is None else x for x in items])


def emit(tx: Tx, module: Variable, call: Callable, operands: list[torch.fx.Node]) -> Variable:
    """One node that calls `call` inside the module; its results are what `call` gives for fake tensors."""
    graph, tracer = tx.output.graph, tx.output.current_tracer
    proxies = tuple(torch.fx.Proxy(n, tracer) for n in operands)
    assert all(n.graph is graph for n in operands)
    with _module_stack(str(id(module.value)), module.get_nn_module_stack_source(), tx, module.value):
        return _wrap_fx_proxy(tx, tx.output.create_proxy("call_function", call, proxies, {}))


def guarded_names(tx: Tx) -> Iterator[str]:
    """What Dynamo has guarded up to now, as it writes it."""
    for guard in tx.output.guards:
        yield guard.name


def has_new_attributes(tx: Tx, value: Variable) -> bool:
    """The program has set attributes of a tensor."""
    return type(value) is TensorVariable and tx.output.side_effects.has_pending_mutation(value)


def function_modes(tx: Tx) -> tuple:
    """The modes of torch functions that are on, and whether they are switched off."""
    state = tx.symbolic_torch_function_state
    modes = tuple(getattr(mode, "value", mode) for mode in map(realized, state.mode_stack))
    return *modes, state.torch_function_mode_enabled, state.torch_function_subclass_enabled


def random_calls(tx: Tx) -> int:
    """How many numbers the program has drawn from `random`."""
    return len(tx.output.random_calls)


def names_of_one(tx: Tx) -> set[str]:
    """Of objects that Dynamo has met under several names, these names."""
    same = [(g.name, g.create_fn.keywords["source_b"]) for g in tx.output.guards if _guards_one(g)]
    return {name for one, other in same for name in (one, other.name if isinstance(other.name, str) else other.name())}


def _guards_one(guard: Any) -> bool:
    return isinstance(guard.create_fn, functools.partial) and guard.create_fn.func is _GuardBuilder.DUPLICATE_INPUT


# --- guards ---


def guard_is(module: Variable) -> None:
    """The name that leads to the module goes on leading to this one."""
    _install_guard(module.source.make_guard(_GuardBuilder.ID_MATCH))


def guard_holds(check: Callable[[], bool], told: str) -> None:
    """A guard of our own, which is asked when all others hold."""
    _install_guard(_Guard(_StateSource(), functools.partial(_add_check, check=check, told=told)))


def _add_check(builder: Any, guard: Any, check: Callable[[], bool], told: str) -> None:
    builder.add_python_lambda_leaf_guard_to_root(["___tessera_check()"], [told], {"___tessera_check": check})


def tensor_guards(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A function that says of as many tensors whether each has the type, sizes, strides, dtype, device and
    `requires_grad` of the one that it is compared with. No tensor may be there twice."""
    sizes = [[None] * t.ndim for t in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=sizes).check
