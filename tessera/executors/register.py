"""A user's own operators and executors, in a few lines.

`register_operator` makes an operator of a Python function: it stays whole in traces, and its rules (type,
vjp, jvp, batching) are plain functions over tensors that are traced where they are used.
`register_executor` makes a function run operators that exist already.

    @functools.partial(tessera.register_operator, "swish", vjp=swish_backward)
    def swish(x, beta=1.0):
        return x * torch.sigmoid(beta * x)

    tessera.register_executor("mine", {"aten.gelu": my_gelu})
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping

import torch

from tessera.executors.base import OperatorExecutor, register, unregister
from tessera.ir import fake as fakes
from tessera.ir.builder import Builder
from tessera.ir.equation import ACTIVE, Arg, Equation, map_values, values_in
from tessera.ir.record import record
from tessera.ops import op as ops
from tessera.ops.op import Rules, declare, keep_whole, registry
from tessera.torch_internals import pytree
from tessera.torch_internals.operators import OpOverload, op_name, overload_name
from tessera.util.errors import OptionError, RuleError

NAMESPACE = "tessera_user"
Fake = Callable[..., object]

# --- operators --------------------------------------------------------------------------------------


def register_operator(
    name: str,
    fn: Callable,
    *,
    fake: Fake | None = None,
    vjp: Callable | None = None,
    jvp: Callable | None = None,
    batch: Callable | None = None,
    like: int | str | None = None,
) -> Callable:
    """Make an operator called `name` ("swish", or "mine::swish") of a function over tensors and numbers.

        def swish(x, beta=1.0):
            return kernels.swish(x, beta)           # anything: a kernel, NumPy, another library

        def swish_vjp(ct, y, x, beta):              # cotangent, result, arguments -> one gradient an argument
            s = torch.sigmoid(beta * x)
            return ct * (s + beta * x * s * (1 - s)), None

        swish = tessera.register_operator("swish", swish, like=0, vjp=swish_vjp)

    The type of the result comes from `fake(*args)`, a function that only makes empty results; from `like`,
    the number of the argument it resembles or the name of an operator with the same result ("aten.gelu");
    or from running `fn` itself on fake tensors. `jvp(tangents, y, *args)` gives the tangent of the result and
    `batch(size, on, *args)` the result for arguments that carry a batch at dimension 0 where `on` says so.
    Parameters without annotation are tensors, or of the kind of their default. Gives the operator.
    """
    qualified = name if "::" in name else f"{NAMESPACE}::{name}"
    namespace, short = qualified.split("::")
    declared = f"{namespace}.{short}"
    if declared in registry():
        raise OptionError(f"an operator called {qualified} is registered already")
    operator = torch.library.custom_op(qualified, fn, mutates_args=(), schema=schema_text(fn))
    operator.register_fake(_fake_rule(qualified, fn, fake, like))
    if vjp is not None:
        operator.register_autograd(_autograd(vjp), setup_context=_remember)
    rules = {
        kind: _traced(rule, kind) for kind, rule in (("vjp", vjp), ("jvp", jvp), ("batch", batch)) if rule is not None
    }
    declare(declared, "user", where=_place(fn), real=False, **rules)
    overload: OpOverload = getattr(getattr(torch.ops, namespace), short).default
    return overload


_KINDS = {torch.Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}


def schema_text(fn: Callable) -> str:
    """The operator schema of a function: parameters as annotations and defaults say, the others tensors."""
    hints = typing.get_type_hints(fn)
    parts = []
    for p in inspect.signature(fn).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise OptionError(f"an operator has a fixed list of parameters; {fn.__name__} takes *{p.name}")
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        optional = p.default is not p.empty
        if p.name in hints:
            kind = _kind(hints[p.name], p.name)
        elif optional and p.default is not None:
            kind = _kind(type(p.default), p.name)
        else:
            kind = "Tensor?" if optional else "Tensor"
        parts.append(f"{kind} {p.name}" + (f"={_literal(p.default)}" if optional else ""))
    return f"({', '.join(parts)}) -> {_result(hints.get('return', torch.Tensor))}"


def _kind(hint: object, name: str) -> str:
    if hint in _KINDS:
        return _KINDS[hint]  # type: ignore[index]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in args and len(args) == 2:
        return _kind(next(a for a in args if a is not type(None)), name) + "?"
    if origin in (list, tuple) and args:
        return f"{_kind(args[0], name)}[]"
    raise OptionError(f"parameter {name}: expected a tensor, int, float, bool, str or list of them, got {hint!r}")


def _result(hint: object) -> str:
    if hint is torch.Tensor:
        return "Tensor"
    args = typing.get_args(hint)
    if args and all(a is torch.Tensor for a in args):
        return f"({', '.join('Tensor' for _ in args)})"
    raise OptionError(f"an operator gives a tensor or a tuple of tensors; its return annotation is {hint!r}")


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _place(fn: Callable) -> str:
    code = getattr(fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _fake_rule(name: str, fn: Callable, fake: Fake | None, like: int | str | None) -> Fake:
    if fake is not None:
        return fake
    if isinstance(like, int):
        return lambda *args, **kwargs: torch.empty_like(args[like])
    if isinstance(like, str):
        namespace, short = like.split(".", 1)
        model = getattr(getattr(torch.ops, namespace), short)
        tensors = sum(kind.startswith("Tensor") for kind in schema_text(fn).strip("(").split(", "))
        return lambda *args, **kwargs: model(*args[: max(1, tensors)])

    def by_running(*args: object, **kwargs: object) -> object:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            raise OptionError(
                f"the result type of {name} could not be found by running it on fake tensors "
                f"({type(error).__name__}: {error}); register it with fake= or like="
            ) from error

    return by_running


# --- rules written over plain tensors ---


def _remember(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.args, ctx.output = inputs, output


def _gradients(result: object, arguments: int) -> list:
    """What a vjp gave, as a list: at most one gradient an argument; those left out are None."""
    grads = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(grads) > arguments:
        raise RuleError(f"expected the vjp to give {arguments} gradients, one an argument, got {len(grads)}")
    return grads


def _autograd(vjp: Callable) -> Callable:
    """The same vjp for eager autograd, so that the operator trains outside compiled code too."""

    def backward(ctx, *cts):  # noqa: ANN001, ANN202
        grads = _gradients(
            vjp(cts if isinstance(ctx.output, (tuple, list)) else cts[0], ctx.output, *ctx.args), len(ctx.args)
        )
        return (*grads, *([None] * (len(ctx.args) - len(grads))))

    return backward


def _traced(rule: Callable, kind: str) -> Callable:
    """A rule over Values that records a rule over tensors and inlines what it does."""

    def over_values(*args: Arg, **kwargs: Arg) -> object:
        builder = ACTIVE[-1]
        assert isinstance(builder, Builder)
        values = list(dict.fromkeys(values_in((args, kwargs))))

        def run(*tensors: torch.Tensor) -> object:
            env = dict(zip(values, tensors, strict=True))
            positional, named = map_values((args, kwargs), env.__getitem__)  # type: ignore[misc]
            if kind != "vjp":
                return rule(*positional, **named)
            ct, y, *rest = positional
            if isinstance(ct, list):  # a result nobody differentiates has a cotangent of zeros
                ct = [torch.zeros_like(r) if c is None and r is not None else c for c, r in zip(ct, y, strict=True)]
            return _gradients(rule(ct, y, *rest, **named), len(rest) + len(named))

        inner = Builder(f"{kind}_rule", builder.mode)
        tensors = [fakes.fake_of(v.tensor, builder.mode) for v in values]
        names = [v.name for v in values]
        trace, spec = record(run, list(tensors), names, keep_whole, inner, locate=False)
        if trace.mutations:
            raise RuleError(f"the {kind} rule writes into one of its arguments; return new tensors instead")
        return pytree.tree_unflatten(builder.inline(trace, tuple(values)), spec)

    return over_values


# --- executors --------------------------------------------------------------------------------------


def register_executor(
    name: str,
    claims: dict[str, Callable],
    *,
    priority: int = 0,
    before: str | None = None,
    vjp: dict[str, Callable] | None = None,
) -> None:
    """Run operators by functions of your own, in everything compiled from now on.

        tessera.register_executor("mine", {"aten.gelu": my_gelu})
        tessera.register_executor("rows", {"aten.gelu": lambda eqn: my_gelu if small(eqn) else None})

    A key names an operator, or one overload of it ("aten.sum.dim_IntList"). A value is a function that takes
    what the operator takes, or a function of one parameter called `eqn` that looks at the equation and gives
    such a function, or None to leave it to the next executor. Executors registered here are asked first,
    those of higher `priority` earlier; `before="aten"` puts one right in front of another. `vjp` gives an
    operator another derivative, `vjp(ct, y, *args) -> one gradient an argument` over tensors.
    """
    if not isinstance(name, str) or not name:
        raise OptionError(f"name: expected a name such as 'mine', got {name!r}")
    for option, table in (("claims", claims), ("vjp", vjp or {})):
        if not isinstance(table, Mapping):
            raise OptionError(f"{option}: expected operators and functions such as {{'aten.gelu': fn}}, got {table!r}")
    for key, fn in {**claims, **(vjp or {})}.items():
        if "." not in key or not callable(fn):
            raise OptionError(f"expected an operator name such as 'aten.gelu' and a function, got {key!r}: {fn!r}")
        namespace, short, *_ = key.split(".")
        if namespace == "aten" and not hasattr(torch.ops.aten, short):  # another library's may be loaded later
            raise OptionError(f"PyTorch has no operator {key!r}")
    operators = tuple({**claims, **(vjp or {})})
    askers = {key: fn if _asks(fn) else (lambda eqn, fn=fn: fn) for key, fn in claims.items()}

    def claim(eqn: Equation) -> Callable | None:
        op = eqn.op
        assert isinstance(op, OpOverload)
        packet = f"{op.namespace}.{op_name(op)}"
        ask = askers.get(f"{packet}.{overload_name(op)}") or askers.get(packet)
        return ask(eqn) if ask is not None else None

    register(OperatorExecutor(name, claim, operators=operators), always=True, priority=priority, before=before)
    _replaced[name] = {}
    for key, rule in (vjp or {}).items():
        _replaced[name][key] = registry().get(key)
        base = registry().get(key) or Rules(key, "user")
        # whole: capture must hand the operator over in one piece for the executor to see it
        registry()[key] = dataclasses.replace(
            base, vjp=_traced(rule, "vjp"), forward=None, zero=False, whole=True, where=_place(rule)
        )
    _forget_found_rules()


def unregister_executor(name: str) -> None:
    """Take back what `register_executor` did."""
    unregister(name)
    for key, before in _replaced.pop(name, {}).items():
        if before is None:
            del registry()[key]
        else:
            registry()[key] = before
    _forget_found_rules()


_replaced: dict[str, dict[str, Rules | None]] = {}


def _asks(fn: Callable) -> bool:
    try:
        return list(inspect.signature(fn).parameters) == ["eqn"]
    except (TypeError, ValueError):  # built in, no signature: it runs the operator
        return False


def _forget_found_rules() -> None:
    """What was found before a rule was replaced no longer holds."""
    ops._found.clear()
