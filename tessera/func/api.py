"""The functional transforms a user calls: grad, vjp, jvp, vmap and what is made of them.

Each traces its function on its inputs, transforms the trace and runs the result where it stands: on plain
tensors it computes; on tensors that require grad, eager autograd notes it, so results can be differentiated
further with `.backward()`; inside another transform, the enclosing recorder writes it down. That is all that
nesting is. Semantics are those of `torch.func`; under TorchDynamo or inside a `torch.func` transform, that is
what runs. Nothing is remembered between calls but per-operator formulas: what a function closes over may change.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable

import torch
import torch.utils.checkpoint

from tessera.frontends.functional import (
    averaged,  # noqa: F401 - tracing needs what these three enter
    collectives,  # noqa: F401
    control,
    picks,  # noqa: F401
)
from tessera.frontends.functional.bodies import record_function_call
from tessera.frontends.functional.custom import eager_custom_vjp, record_custom_vjp
from tessera.frontends.functional.trace import UNKNOWN_LINE, error_line
from tessera.func.batch import batched_call
from tessera.func.calls import Argnums, Call, Pullback, Pushforward, check_primals, or_zeros
from tessera.func.jacobian import forward_jacobian, reverse_jacobian
from tessera.ir import fake
from tessera.ir.call import CHECKPOINT
from tessera.ir.record import recording
from tessera.ir.replay import replay, sweep
from tessera.torch_internals import pytree
from tessera.torch_internals.functorch import functorch_interpreters
from tessera.torch_internals.higher_order import torch_scan, torch_while_loop
from tessera.transforms import jvp as forward_mode
from tessera.transforms import vjp as reverse_mode
from tessera.util.config import config
from tessera.util.errors import DoubleBackwardError, InputError, RuleError, TesseraError


def elsewhere() -> bool:
    """TorchDynamo or a torch.func transform is at work: its own functions know how to take part."""
    return torch.compiler.is_dynamo_compiling() or bool(functorch_interpreters())


def run(ours: Callable[[], object], theirs: Callable[[], object]) -> object:
    """Ours; where it fails, torch.func has the last word: it may know how, or refuse in the way its users know.

    What runs there has PyTorch's result, with a warning. Where both refuse, what we say comes first if a user's
    `except` takes it for what PyTorch raises. A gradient that may not be differentiated is refused here alone.
    """
    if elsewhere():
        return theirs()
    try:
        return ours()
    except DoubleBackwardError:
        raise
    except Exception as error:
        if recording() is not None or config.strict:
            raise
        try:
            out = theirs()
        except Exception as refusal:
            known = isinstance(error, RuleError)  # it names the operator that has no derivative
            if not known and not (isinstance(error, TesseraError) and isinstance(error, type(refusal))):
                raise refusal from error
            raise type(error)(f"{error}\n(torch.func: {refusal})") from refusal
        _warn(error)
        return out


_warned: set[str] = set()


def _warn(error: Exception) -> None:
    """Once for each place: the result is right, but nothing of the program was ours."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    line = error_line(error)
    reason = text if line == UNKNOWN_LINE else f"{line}: {text}"
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"Tessera cannot trace this function; torch.func ran it instead. {reason} (TESSERA_STRICT=1 raises this.)",
            stacklevel=4,
        )


def grad(func: Callable, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """A function that gives the gradient of `func`, a function with a scalar result.

    With `has_aux`, `func` gives (loss, anything), and the made function (gradient, anything).
    """

    @functools.wraps(func)
    def wrapper(*args: object, **kwargs: object) -> object:
        def ours() -> object:
            value, grads = _value_and_grad(func, argnums, has_aux, args, kwargs)
            return (grads, value[1]) if has_aux else grads  # type: ignore[index]

        return run(ours, lambda: torch.func.grad(func, argnums, has_aux)(*args, **kwargs))

    return wrapper


def value_and_grad(func: Callable, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """A function that gives (value, gradient); with `has_aux`, ((loss, anything), gradient)."""

    @functools.wraps(func)
    def wrapper(*args: object, **kwargs: object) -> object:
        def theirs() -> object:
            grads, value = torch.func.grad_and_value(func, argnums, has_aux)(*args, **kwargs)
            return value, grads

        return run(lambda: _value_and_grad(func, argnums, has_aux, args, kwargs), theirs)

    return wrapper


def grad_and_value(func: Callable, argnums: Argnums = 0, has_aux: bool = False) -> Callable:
    """A function that gives (gradient, value), the order of `torch.func.grad_and_value`."""
    both = value_and_grad(func, argnums, has_aux)

    @functools.wraps(func)
    def wrapper(*args: object, **kwargs: object) -> object:
        value, grads = both(*args, **kwargs)
        return grads, value

    return wrapper


def vjp(func: Callable, *primals: object, has_aux: bool = False) -> tuple:
    """`func(*primals)` and a function that pulls cotangents of its result back: a tuple, one entry a primal.

    The second may be called many times; what it needs was computed once. With `has_aux`, also gives the rest.
    """

    def ours() -> tuple:
        program = Pullback("vjp", func, primals, None, has_aux)
        return (program.value, program, program.aux) if has_aux else (program.value, program)

    return run(ours, lambda: torch.func.vjp(func, *primals, has_aux=has_aux))  # type: ignore[return-value]


def jvp(func: Callable, primals: tuple, tangents: tuple, *, strict: bool = False, has_aux: bool = False) -> tuple:
    """`func(*primals)` and how it moves when the primals move along the tangents."""
    return run(
        lambda: _jvp(func, primals, tangents, strict, has_aux),
        lambda: torch.func.jvp(func, primals, tangents, strict=strict, has_aux=has_aux),
    )  # type: ignore[return-value]


def _jvp(func: Callable, primals: tuple, tangents: tuple, strict: bool, has_aux: bool) -> tuple:
    check_primals("jvp", primals)
    call = Call("jvp", func, primals, {}, None, has_aux)
    moved = call.check_tangents(tangents)
    with fake.alone():
        pushed = sweep(forward_mode.jvp(call.trace, call.wrt, call.traced.mode))
    args = call.args()
    with call.traced.grad_mode():
        results = replay(pushed, [*args, *moved])
    outs, ts = results[: len(call.trace.outputs)], results[len(call.trace.outputs) :]
    value, aux = call.pack(outs)
    if strict and any(ts[i] is None for i in call.results):
        raise InputError("jvp: with strict, every output must depend on the primals; one does not")
    tangent = call.pack_results([or_zeros(ts[i], outs[i]) for i in call.results])
    return (value, tangent, aux) if has_aux else (value, tangent)


def linearize(func: Callable, *primals: object) -> tuple[object, Callable]:
    """`func(*primals)` and the linear function that maps tangents to tangents there, computed once."""

    def ours() -> tuple:
        program = Pushforward("linearize", func, primals, None, False)

        def push(*tangents: object) -> object:
            return program.call.pack_results(program.push(program.call.check_tangents(tangents)))

        return program.value, push

    return run(ours, lambda: torch.func.linearize(func, *primals))  # type: ignore[return-value]


def vmap(
    func: Callable,
    in_dims: object = 0,
    out_dims: object = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable:
    """A function that maps `func` over a dimension of its arguments, as one batched program.

    `in_dims` and `out_dims` say where the batch stands: an int, None (not batched), or a tree of them.
    `randomness` is "error", "different" (every example draws) or "same" (all share a draw). With `chunk_size`, at
    most that many examples are computed at once.
    """

    @functools.wraps(func)
    def wrapper(*args: object, **kwargs: object) -> object:
        return run(
            lambda: batched_call(func, args, kwargs, in_dims, out_dims, randomness, chunk_size),
            lambda: torch.func.vmap(func, in_dims, out_dims, randomness, chunk_size=chunk_size)(*args, **kwargs),
        )

    return wrapper


def jacrev(
    func: Callable,
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable:
    """A function that gives the Jacobian of `func`, by reverse mode: one row for each output element.

    At most `chunk_size` rows are computed at once. The last argument is `torch.func`'s: chunks are copied into the
    Jacobian as they come, which is then never held twice.
    """
    copied = _preallocate_and_copy

    @functools.wraps(func)
    def wrapper(*args: object) -> object:
        return run(
            lambda: reverse_jacobian(func, args, argnums, has_aux, chunk_size, copied),
            lambda: torch.func.jacrev(
                func, argnums, has_aux=has_aux, chunk_size=chunk_size, _preallocate_and_copy=copied
            )(*args),
        )

    return wrapper


def jacfwd(func: Callable, argnums: Argnums = 0, has_aux: bool = False, *, randomness: str = "error") -> Callable:
    """A function that gives the Jacobian of `func`, by forward mode: one column for each input element."""

    @functools.wraps(func)
    def wrapper(*args: object) -> object:
        return run(
            lambda: forward_jacobian(func, args, argnums, has_aux, randomness),
            lambda: torch.func.jacfwd(func, argnums, has_aux, randomness=randomness)(*args),
        )

    return wrapper


def hessian(func: Callable, argnums: Argnums = 0) -> Callable:
    """A function that gives the second derivatives of `func`: forward mode over reverse mode."""
    return jacfwd(jacrev(func, argnums), argnums)


def _value_and_grad(func: Callable, argnums: Argnums, has_aux: bool, args: tuple, kwargs: dict) -> tuple:
    call = Call("grad", func, args, kwargs, argnums, has_aux)
    loss = call.output(call.results[0]) if len(call.results) == 1 else None
    if loss is None or not call.result_spec.is_leaf() or loss.ndim != 0 or not loss.tensor.is_float:
        got = ", ".join(str(call.output(i).type) for i in call.results)
        raise InputError(
            f"grad: expected the function to give one real scalar, got {got or 'nothing'}; reduce it (sum, mean), or "
            "use vjp or jacrev"
        )
    with fake.alone():
        joint = reverse_mode.vjp(call.trace, call.wrt, call.traced.mode, pull=[loss], again=True)
        program = sweep(joint.trace)
    seeds = [torch.ones((), dtype=loss.dtype, device=loss.tensor.device) for _ in joint.pulled]
    results = replay(program, [*call.traced.args, *seeds])
    outs, grads = results[: len(call.trace.outputs)], results[len(call.trace.outputs) :]
    full = [or_zeros(g, x) for g, x in zip(grads, call.primals, strict=True)]
    value, aux = call.pack(outs)
    return (value, aux) if has_aux else value, pytree.tree_unflatten(full, call.wrt_spec)


# --- functions with a derivative of their own, recomputation --------------------------------------


class custom_vjp:  # noqa: N801 - a decorator
    """A function whose reverse derivative the user gives.

        @tessera.custom_vjp
        def f(x, y): ...

        f.defvjp(fwd, bwd)   # fwd(x, y) -> (f(x, y), residuals);  bwd(residuals, ct) -> (ct_x, ct_y)

    Undifferentiated, `f` itself runs. Differentiated twice, `fwd` and `bwd` are differentiated.
    """

    def __init__(self, func: Callable) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.fwd: Callable | None = None
        self.bwd: Callable | None = None

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        if self.fwd is None or self.bwd is None:
            raise InputError(f"custom_vjp: {self.func.__name__} has no derivative yet; call .defvjp(fwd, bwd) first")
        if kwargs:
            bound = inspect.signature(self.func).bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        recorder = None if elsewhere() else recording()
        if recorder is not None:
            return record_custom_vjp(self.func, self.fwd, self.bwd, args, recorder)
        return eager_custom_vjp(self.func, self.fwd, self.bwd, args)


def checkpoint(func: Callable) -> Callable:
    """The same function, whose intermediate results are computed again in backward instead of kept."""

    @functools.wraps(func)
    def wrapper(*args: object, **kwargs: object) -> object:
        recorder = None if elsewhere() else recording()
        if recorder is None:
            return torch.utils.checkpoint.checkpoint(func, *args, use_reentrant=False, **kwargs)
        return record_function_call(CHECKPOINT, recorder, func, args, kwargs)

    return wrapper


# --- control flow ---------------------------------------------------------------------------------


def cond(pred: object, true_fn: Callable, false_fn: Callable, operands: tuple = ()) -> object:
    """`true_fn(*operands)` if the one-element tensor `pred` holds, else `false_fn(*operands)`.

    Inside a transform or a compiled function both branches are part of the program; they give the same types.
    """
    if elsewhere():
        return torch.cond(pred, true_fn, false_fn, operands)
    return control.cond(pred, true_fn, false_fn, operands)


def while_loop(cond_fn: Callable, body_fn: Callable, carried_inputs: tuple) -> tuple:
    """`carry = body_fn(*carry)` while `cond_fn(*carry)` holds; gives the last carry. Not differentiable in reverse."""
    if elsewhere():
        return torch_while_loop(cond_fn, body_fn, carried_inputs)
    return control.while_loop(cond_fn, body_fn, carried_inputs)


def scan(combine_fn: Callable, init: object, xs: object, *, dim: int = 0, reverse: bool = False) -> tuple:
    """`carry, y = combine_fn(carry, x)` for every slice x of `xs` along `dim`; the last carry and all y, stacked."""
    if elsewhere():
        if control.empty(pytree.tree_leaves(xs), dim):  # which PyTorch refuses
            return control.over_nothing(combine_fn, init, xs, dim)
        return torch_scan(combine_fn, init, xs, dim=dim, reverse=reverse)
    return control.scan(combine_fn, init, xs, dim=dim, reverse=reverse)
