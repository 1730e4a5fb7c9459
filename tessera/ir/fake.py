"""Runs operators on fake tensors to learn the types of their results.

PyTorch's own meta kernels are the type rule of every operator; results are remembered by the operator and
the types of its arguments, so that a hundred equal layers ask once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from tessera.ir import size_rules
from tessera.ir.equation import Arg, Equation, Operator, Special, Value, map_values, values_in
from tessera.ir.index_put import index_put
from tessera.ir.recurrent import RECURRENT
from tessera.ir.schema import is_pointwise, is_view
from tessera.ir.types import SYMBOLIC, Size, TensorType, number_text, size_hint, type_of
from tessera.ir.views import MAY_COPY
from tessera.torch_internals import shapes
from tessera.torch_internals.autograd import lazy_conj, lazy_neg
from tessera.torch_internals.dispatch import (
    BelowAutograd,
    DisableAutocast,
    DispatchKey,
    ForceKeys,
    disable_current_modes,
    enable_python_dispatcher,
    excluded_keys,
    included_keys,
    no_python_dispatcher,
)
from tessera.torch_internals.fake import FakeTensor, FakeTensorMode, without_cache
from tessera.torch_internals.memory import lazy_clone, storage_id
from tessera.torch_internals.operators import OpOverload, op_name, op_schema, suggest_memory_format
from tessera.util.errors import CaptureError
from tessera.util.names import names


def _statistics(op: OpOverload, params: slice, running: slice = slice(0)) -> Callable:
    """A norm's rule as the kernels have it. On the CPU statistics are of float32 where parameters are, whatever the
    input is, and new running statistics have the dtype of the old ones; PyTorch's rule says otherwise."""

    def rule(x: torch.Tensor, *args: object, **kwargs: object) -> list[torch.Tensor]:
        out, mean, rstd, *rest = op(x, *args, **kwargs)
        if x.device.type == "cpu":
            if any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args[params]):
                mean, rstd = (s.new_empty(s.shape, dtype=torch.float32) for s in (mean, rstd))
            rest = [new.new_empty(new.shape, dtype=old.dtype) for new, old in zip(rest, args[running], strict=True)]  # type: ignore[attr-defined]
        return [out, mean, rstd, *rest]

    return rule


def _batch_norm(type_rule: Callable) -> Callable:
    """A batch norm's kernel on the CPU keeps channels last, and makes anything else contiguous."""

    def rule(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        given = type_rule(x, *args, **kwargs)
        if x.device.type != "cpu":
            return given
        out, *rest = [given] if isinstance(given, torch.Tensor) else given
        out = torch.empty_like(out, memory_format=suggest_memory_format(x))
        return out if isinstance(given, torch.Tensor) else [out, *rest]

    return rule


def _group_backward(ct: torch.Tensor, x: torch.Tensor, *args: object, **kwargs: object) -> list[torch.Tensor | None]:
    """The gradient of the input has the input's dtype."""
    dx, *rest = torch.ops.aten.native_group_norm_backward.default(ct, x, *args, **kwargs)
    return [dx if dx is None else dx.new_empty(dx.shape, dtype=x.dtype), *rest]


def _resampled(ct: torch.Tensor, _: object, shape: Sequence[Size], *__: object) -> torch.Tensor:
    """The gradient of an interpolation: what went in, laid out as the cotangent is."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(ct.ndim)
    last = channels_last is not None and not ct.is_contiguous() and ct.is_contiguous(memory_format=channels_last)
    return torch.empty(shape, dtype=ct.dtype, device=ct.device, memory_format=channels_last if last else None)


def _of_nothing(op: OpOverload) -> Callable:
    """The rule of a loss's gradient where there are no elements: PyTorch's divides by their number."""

    def rule(ct: torch.Tensor, x: torch.Tensor, *args: object) -> torch.Tensor:
        nothing = any(type(n) is int and n == 0 for n in x.shape)
        return torch.empty_like(x) if nothing else op(ct, x, *args)

    return rule


def _split(self: torch.Tensor, split_size: Size, dim: int = 0) -> list[torch.Tensor]:
    """Nothing, split, is one piece; PyTorch's rule had an IndexError there before 2.12."""
    length = self.shape[dim]
    nothing = type(length) is int and length == 0
    return list(_aten.split_with_sizes(self, [0], dim) if nothing else _aten.split.Tensor(self, split_size, dim))


def _laid_as_product(op: OpOverload) -> Callable:
    """The rule of an elementwise operator of two tensors that PyTorch computes from others, which lie otherwise."""

    def rule(x: torch.Tensor, y: torch.Tensor, **kwargs: object) -> torch.Tensor:
        out, like = op(x, y, **kwargs), rule_of(torch.ops.aten.mul.Tensor)(x, y)
        return torch.empty_strided(out.shape, like.stride(), dtype=out.dtype, device=out.device)

    return rule


def _pow_scalar(base: float, x: torch.Tensor) -> torch.Tensor:
    """The kernel gives rows however its argument lies; PyTorch's rule has them lie as the argument does."""
    out = _aten.pow.Scalar(base, x)
    return out.new_empty(out.shape)


def _ldexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return rule_of(_aten.mul.Tensor)(x, _pow_scalar(2.0, y))


def _bags(op: OpOverload) -> Callable:
    """Sums of bags. On the CPU the kernel of bfloat16 keeps as little for backward as that of float16; PyTorch's rule
    knows of float16 alone."""

    def as_half(x: object) -> object:
        return x.half() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 else x

    def rule(weight: torch.Tensor, *args: object, **kwargs: object) -> object:
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            return op(weight, *args, **kwargs)
        named = {name: as_half(x) for name, x in kwargs.items()}
        out, *rest = op(as_half(weight), *map(as_half, args), **named)
        return [out.to(weight.dtype), *rest]

    return rule


_aten = torch.ops.aten
_BAGS = (_aten._embedding_bag, _aten._embedding_bag_forward_only, _aten.embedding_bag)
_DRAWN = ("cauchy", "exponential", "geometric", "log_normal")


def _efficient_backward(_: torch.Tensor, *args: object, **__: object) -> list[torch.Tensor | None]:
    """Memory-efficient attention's gradients: PyTorch's rule forgets an argument."""
    q, k, v, bias = args[:4]
    assert isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    if not isinstance(bias, torch.Tensor):
        return [*grads, None]
    *lead, last = bias.shape
    return [*grads, bias.new_empty((*lead, -(-last // 16) * 16))[..., :last]]


def _view(x: torch.Tensor, size: Sequence[Size]) -> torch.Tensor:
    """PyTorch's rule allows views that its kernels refuse, of rows that lie apart with a dimension of one between, and
    gives a dimension of one another stride than they do. Sizes that are symbols count as what they are now."""
    shape, stride, wanted = ([size_hint(n, -2) for n in sizes] for sizes in (x.shape, x.stride(), size))
    if -2 in (*shape, *stride, *wanted):
        return _aten.view.default(x, size)
    with disable_current_modes(), no_python_dispatcher():
        try:
            viewed = torch.empty_strided(shape, stride, dtype=x.dtype, device="meta").view(wanted)
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
    return x.as_strided(viewed.shape, viewed.stride()) if _are_numbers(x, size) else _aten.view.default(x, size)


def _are_numbers(x: torch.Tensor, size: Sequence[Size]) -> bool:
    return not any(isinstance(n, SYMBOLIC) for n in (*x.shape, *x.stride(), *size))


def _scattered(op: OpOverload) -> Callable:
    """Older PyTorch says that the result lies as what it is written into, also where that is expanded."""

    def rule(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = op(x, *args, **kwargs)
        expanded = any(type(step) is int and step == 0 for step in out.stride())
        return x.clone() if expanded else out

    return rule


def _vector_norm(
    x: torch.Tensor, order: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, **more: object
) -> torch.Tensor:
    """Older PyTorch keeps dimensions of one element."""
    out = _aten.linalg_vector_norm.default(x, order, dim, keepdim, **more)
    return out.squeeze(tuple(dim)) if dim and not keepdim and out.ndim == x.ndim else out


def _reshape(op: OpOverload) -> Callable:
    """A view where there is one."""

    def rule(x: torch.Tensor, size: Sequence[Size]) -> torch.Tensor:
        if (out := size_rules.reshaped(x, size)) is not None:
            return out
        try:
            return _view(x, size) if _are_numbers(x, size) else op(x, size)
        except CaptureError:
            return op(x, size)

    return rule


def _matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = size_rules.matmul(x, y)
    return _aten.matmul.default(x, y) if out is None else out


def _ctc_loss(
    logs: torch.Tensor, targets: object, lengths: object, wanted: object, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One loss a sequence; the sizes of what its kernel keeps are known only when it runs."""
    return logs.new_empty(logs.shape[1:2] if reduction == 0 and logs.ndim == 3 else ())


def _by_class(op: OpOverload) -> Callable:
    """Losses against classes. Of symbolic sizes PyTorch's rule takes the reduction for another argument, and says that
    the mean was asked for."""

    def rule(x: torch.Tensor, target: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out = op(x, target, *args, **kwargs)
        each = kwargs.get("reduction", args[1] if len(args) > 1 else 1) == 0
        return x.new_empty(target.shape) if each and not target.is_floating_point() else out  # or probabilities

    return rule


# Where PyTorch's own rule is wrong (2.11 takes the out_dtype of addmm.dtype for beta, and runs `_unique` on zeros), or
# knows no symbolic sizes.
_RULES: dict[object, Callable] = {
    **RECURRENT,
    _aten._efficient_attention_backward.default: _efficient_backward,
    # A layer's kernel for evaluation gives rows of a product; PyTorch's rule has them lie as the input does.
    _aten._transformer_encoder_layer_fwd.default: lambda x, *_, **__: x.new_empty(x.shape),
    **{op: _ctc_loss for op in (_aten.ctc_loss.Tensor, _aten.ctc_loss.IntList)},
    **{
        getattr(_aten, name).default: _by_class(getattr(_aten, name).default)
        for name in names("nll_loss nll_loss_nd nll_loss2d cross_entropy_loss")
    },
    _aten.matmul.default: _matmul,
    _aten.index_put.default: index_put,
    _aten.view.default: _view,
    **{op: _reshape(op) for op in (_aten.reshape.default, _aten._unsafe_view.default)},
    _aten.split.Tensor: _split,
    **{
        getattr(_aten, f"{name}_scatter").default: _scattered(getattr(_aten, f"{name}_scatter").default)
        for name in names("slice select diagonal")
    },
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.pow.Scalar: _pow_scalar,
    _aten.ldexp.Tensor: _ldexp,
    _aten._unique.default: lambda x, s=True, inverse=False: _aten._unique2.default(x, s, inverse)[:2],
    _aten.addmm.dtype: lambda x, a, b, dtype, **_: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype),
    _aten._native_batch_norm_legit_functional.default: _batch_norm(
        _statistics(_aten._native_batch_norm_legit_functional.default, slice(0, 4), slice(2, 4))
    ),
    _aten._native_batch_norm_legit.no_stats: _batch_norm(
        _statistics(_aten._native_batch_norm_legit.no_stats, slice(0, 2))
    ),
    _aten.native_batch_norm.default: _batch_norm(_statistics(_aten.native_batch_norm.default, slice(0, 4))),
    **{op: _batch_norm(op) for op in (_aten.batch_norm.default, _aten._native_batch_norm_legit_no_training.default)},
    _aten.native_group_norm.default: _statistics(_aten.native_group_norm.default, slice(0, 2)),
    _aten.native_group_norm_backward.default: _group_backward,
    **{
        getattr(_aten, f"{name}_backward").default: _of_nothing(getattr(_aten, f"{name}_backward").default)
        for name in names("mse_loss smooth_l1_loss huber_loss")
    },
    _aten.multilabel_margin_loss_backward.default: lambda ct, x, *_: torch.empty_like(x),
    _aten.softshrink_backward.default: lambda ct, x, width: ct * x,
    _aten.hardshrink_backward.default: lambda ct, x, width: ct * x,
    **{op: _bags(op) for op in (*(packet.default for packet in _BAGS), _aten.embedding_bag.padding_idx)},
    **{op: _laid_as_product(op) for op in (_aten.copysign.Tensor, _aten.div.Tensor_mode)},
    **{
        getattr(_aten, name).default: _laid_as_product(getattr(_aten, name).default)
        for name in names("floor_divide logaddexp logaddexp2 logical_and logical_or logical_xor heaviside")
    },
    # PyTorch's rules of these refuse generators
    **{getattr(_aten, name).default: lambda x, *_, **__: torch.empty_like(x) for name in (*_DRAWN, "uniform")},
    **{getattr(_aten, f"{name}_").default: lambda x, *_, **__: x for name in _DRAWN},
    **{
        getattr(_aten, f"{name}_backward").default: _resampled
        for name in names(
            """
            upsample_nearest1d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
            _upsample_bilinear2d_aa _upsample_bicubic2d_aa
            """
        )
    },
}
_memory: dict[tuple, object] = {}
_UNKNOWN = object()
_of_thread = threading.local()


def default_mode() -> FakeTensorMode:
    """The fake mode of programs that bring none of their own: one a thread, since a mode notes who has entered it."""
    if not hasattr(_of_thread, "mode"):
        _of_thread.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes.ShapeEnv())
    return _of_thread.mode


@contextmanager
def below_autograd() -> Iterator[None]:
    """Operators reach dispatch modes whole, before autograd takes composite ones apart."""
    with BelowAutograd():
        yield


@contextmanager
def symbolic_rules(needed: bool = True) -> Iterator[None]:
    """Where sizes are symbols: operators that PyTorch's own rules call in turn are found in Python, where symbols live.
    Without this they end in kernels that want numbers."""
    with enable_python_dispatcher() if needed else nullcontext():
        yield


@contextmanager
def alone() -> Iterator[None]:
    """No dispatch mode and no autocast from around, autograd in reach: a trace may be made and transformed
    here while another program is being recorded outside."""
    with disable_current_modes():
        exclude = excluded_keys()
        for key in _AUTOGRAD_KEYS:
            exclude = exclude.remove(key)
        include = included_keys()
        with ForceKeys(include, exclude), DisableAutocast():
            yield


_AUTOGRAD_KEYS = tuple(
    getattr(DispatchKey, name) for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor")
)


def fake_of(value_type: TensorType, mode: FakeTensorMode) -> FakeTensor:
    return fakes_of((value_type,), mode)[0]


def fakes_of(types: Iterable[TensorType], mode: FakeTensorMode) -> list[FakeTensor]:
    """Plain ones are made without asking the mode, in a fifth of the time where sizes are known."""
    with disable_current_modes(), BelowAutograd(), no_python_dispatcher():
        return [
            FakeTensor(mode, _empty(t, mode.shape_env), t.device)
            if t.layout is torch.strided and t.bits == (False, False)
            else _fake_by_mode(t, mode)
            for t in types
        ]


def _empty(t: TensorType, env: shapes.ShapeEnv | None) -> torch.Tensor:
    """A tensor that holds nothing. What PyTorch works out of symbolic sizes, in half a millisecond, it copies from
    the first of the type."""
    if env is None or not t.is_symbolic:
        return torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device="meta")
    firsts, key = shapes.notes(env, "empty"), t.key()
    if key not in firsts:
        firsts[key] = torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device="meta")
    return lazy_clone(firsts[key])


def _fake_by_mode(t: TensorType, mode: FakeTensorMode) -> FakeTensor:
    with mode:
        if t.layout is not torch.strided:
            return torch.empty(t.shape, dtype=t.dtype, layout=t.layout, device=t.device)  # type: ignore[return-value]
        fake = torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device)
        fake = lazy_conj(fake) if t.bits[0] else fake
        return lazy_neg(fake) if t.bits[1] else fake  # type: ignore[return-value]


def argument_key(a: Arg | TensorType) -> object:
    """What an operator's types depend on; a value counts as its type."""
    if type(a) is Value:
        return a.type.key()
    if isinstance(a, (list, tuple)):
        return (type(a).__name__, *map(argument_key, a))
    if isinstance(a, dict):
        return tuple((k, argument_key(v)) for k, v in a.items())
    if isinstance(a, SYMBOLIC):
        return ("symbolic", number_text(a))
    if isinstance(a, float):
        return ("float", repr(a))
    if isinstance(a, TensorType):
        return a.key()
    return (type(a).__name__, a if a.__hash__ else id(a))


def has_symbols(x: object) -> bool:
    """A tensor with a symbol among its sizes, or a symbol; one that has been found to be a number counts too."""
    return isinstance(x, SYMBOLIC) or (
        isinstance(x, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in x.shape)
    )


def mentions_symbols(a: Arg | TensorType) -> bool:
    if isinstance(a, Value):
        a = a.type
    if isinstance(a, TensorType):
        return a.is_symbolic
    if isinstance(a, (list, tuple)):
        return any(map(mentions_symbols, a))
    if isinstance(a, dict):
        return any(map(mentions_symbols, a.values()))
    return isinstance(a, SYMBOLIC)


def infer(op: Operator, args: tuple, kwargs: dict, mode: FakeTensorMode) -> object:
    """The types of what `op` gives: a Type, or a list of them (None where a result is not there)."""
    key = call_key(op, args, kwargs)
    if (known := _memory.get(key, _UNKNOWN)) is not _UNKNOWN:
        return known
    memory = _memory
    if mentions_symbols((args, kwargs)) and mode.shape_env is not None:
        memory = shapes.notes(mode.shape_env, "types")
    if key not in memory:
        memory[key] = _run(op, args, kwargs, mode)
    return memory[key]


def call_key(op: Operator, args: tuple, kwargs: dict) -> tuple:
    return (op, argument_key(args), argument_key(kwargs), torch.get_default_dtype())


def rule_of(op: OpOverload) -> Callable:
    """What tells the types of an operator's results, on fake tensors."""
    if op in _RULES or not is_pointwise(op) or op_schema(op).is_mutable:
        return _RULES.get(op, op)
    return _as_wide(op)


@functools.cache
def _as_wide(op: OpOverload) -> Callable:
    """The rule of an elementwise operator, whose results lie as its arguments do. PyTorch makes arguments of half
    precision wider first, which unfolds expanded ones: what they say is true of the unfolded ones only."""

    def rule(*args: object, **kwargs: object) -> object:
        out = op(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or not any(map(_folded_half, args)):
            return out
        wide = op(*map(_widened, args), **kwargs)
        return torch.empty_strided(out.shape, wide.stride(), dtype=out.dtype, device=out.device)

    return rule


def _is_half(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)


def _folded_half(x: object) -> bool:
    return _is_half(x) and any(type(step) is int and step == 0 for step in x.stride())  # type: ignore[attr-defined]


def _widened(x: object) -> object:
    """The same sizes and strides in float32."""
    if not _is_half(x):
        return x
    assert isinstance(x, torch.Tensor)
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.float32, device=x.device)


def _run(op: Operator, args: tuple, kwargs: dict, mode: FakeTensorMode) -> object:
    fakes = iter(fakes_of([v.tensor for v in values_in((args, kwargs))], mode))
    fn: Callable = op.fn if isinstance(op, Special) else rule_of(op)
    symbolic = mentions_symbols((args, kwargs))
    args, kwargs = map_values((args, kwargs), lambda v: next(fakes))  # type: ignore[misc]
    with mode, without_cache(mode), below_autograd(), symbolic_rules(symbolic):  # `infer` has a cache of its own
        return types_of(fn(*args, **kwargs))


def shows_argument(eqn: Equation, mode: FakeTensorMode | None = None) -> bool:
    """Does its result show its argument's memory? Some operators make a view where they can, and a copy otherwise."""
    if not is_view(eqn.op) or op_name(eqn.op) not in MAY_COPY:  # type: ignore[arg-type]
        return is_view(eqn.op)
    mode = mode or default_mode()
    fakes = dict(zip(eqn.inputs(), fakes_of([v.tensor for v in eqn.inputs()], mode), strict=True))
    args, kwargs = map_values((eqn.args, eqn.kwargs), fakes.__getitem__)  # type: ignore[misc]
    with mode, below_autograd(), symbolic_rules(mentions_symbols((eqn.args, eqn.kwargs))):
        return storage_id(eqn.op(*args, **kwargs)) == storage_id(args[0])  # type: ignore[operator,arg-type]


def types_of(out: object) -> object:
    if isinstance(out, (tuple, list)):
        return [types_of(o) for o in out]
    return None if out is None else type_of(out)


def is_many(types: object) -> bool:
    return isinstance(types, list)
