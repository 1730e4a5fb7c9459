"""Finds whole operators again: StableHLO has layers, norms, softmax, gelu and attention only as their arithmetic.

In: a Trace as it was recorded. Out: one that computes the same numbers up to rounding, in which `aten.linear`,
`aten.layer_norm`, `aten.softmax` and the like stand for what they are made of, so that it is short and fuses as a
PyTorch program does. First broadcasts that operators do themselves go, and equal equations become one: the tables see
one form of each.
"""

from __future__ import annotations

import functools
import math

import torch

from tessera.ir.builder import aten
from tessera.ir.equation import Arg, Value
from tessera.ir.interp import run
from tessera.ir.match import Match, P, Table, Var, rewrite
from tessera.ir.rewrite import needed
from tessera.ir.trace import Trace
from tessera.passes.clean.cse import cse
from tessera.passes.clean.dce import dce

x, y, u, w, b, m, n = (Var(name) for name in "xyuwbmn")
q, k, v, c, d, p, s = (Var(name) for name in "qkvcdps")

LARGEST = 1 << 24  # elements of a mask that is looked into


def whole_operators(trace: Trace) -> Trace:
    trace = rewrite(trace, PLAIN)
    trace = rewrite(cse(trace), PLAIN)
    for table in (PARTS, NORMS, LAYERS):
        trace = dce(rewrite(trace, table))
    return dce(rewrite(trace, attention(trace)))


# --- what an argument must be ---


def close_to(number: float) -> Var:
    return Var(f"_{number}", lambda a: isinstance(a, float) and math.isclose(a, number, rel_tol=1e-5))


def floating(*names: str):  # noqa: ANN201
    """These are tensors of floats, and as large as the result."""

    def test(match: Match) -> bool:
        values = [match.captures[name] for name in names]
        return all(isinstance(a, Value) and a.tensor.is_float for a in values)

    return test


def _last(value: Value, dims: Arg) -> bool:
    """Exactly the last dimension."""
    return isinstance(dims, (list, tuple)) and len(dims) == 1 and dims[0] % value.ndim == value.ndim - 1  # type: ignore[operator]


# --- one plain form ---

_SPREAD = ("add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "pow")


def _spread_rules() -> list:
    rules: list = []
    for name in _SPREAD:
        op = f"aten.{name}"
        rules.append((P(op, x, P("aten.expand", u, ...)), lambda x, u, op=name: getattr(aten, op)(x, u)))
        rules.append((P(op, P("aten.expand", u, ...), x), lambda x, u, op=name: getattr(aten, op)(u, x)))
    rules += [
        (P("aten.where", P("aten.expand", u, ...), x, y), lambda x, y, u: aten.where(u, x, y)),
        (P("aten.where", p, P("aten.expand", u, ...), y), lambda p, y, u: aten.where(p, u, y)),
        (P("aten.where", p, x, P("aten.expand", u, ...)), lambda p, x, u: aten.where(p, x, u)),
    ]
    return rules


def _kept(name: str):  # noqa: ANN202
    def rule(x: Value, d: list, n: int) -> Value | None:
        at = n % x.ndim  # type: ignore[operator]
        return getattr(aten, name)(x, d, True) if [e % x.ndim for e in d] == [at] else None

    return rule


def _average(x: Value, d: list, n: Arg) -> Value | None:
    """A sum over so many elements as it is divided by."""
    count = math.prod(x.shape[e] for e in d) if not x.tensor.is_symbolic else None
    return aten.mean(x, d, True) if x.tensor.is_float and n == count else None


PLAIN = Table(
    [
        *_spread_rules(),
        # max(x, -inf) -> x
        (P("aten.clamp", x, -math.inf), lambda x: x),
        (P("aten.unsqueeze", P("aten.sum", x, d, dtype=w), n), lambda x, d, n, w: _kept("sum")(x, d, n)),
        (P("aten.unsqueeze", P("aten.amax", x, d), n), _kept("amax")),
        (P("aten.unsqueeze", P("aten.clamp", P("aten.amax", x, d), -math.inf), n), _kept("amax")),
        (
            P("aten.unsqueeze", P("aten.div", P("aten.sum", x, d, dtype=w), b), n),
            lambda x, d, n, w, b: _mean_kept(x, d, n, b),
        ),
        (P("aten.div", P("aten.sum", x, d, True), n), _average),
    ]
)


def _mean_kept(x: Value, d: list, n: int, b: Arg) -> Value | None:
    at = n % x.ndim  # type: ignore[operator]
    return _average(x, d, b) if [e % x.ndim for e in d] == [at] else None


# --- softmax and functions of one tensor ---


def _softmax(x: Value, d: list) -> Value | None:
    return aten.softmax(x, d[0]) if len(d) == 1 and x.tensor.is_float else None


_SHIFTED = P("aten.sub", x, P("aten.amax", x, d, True))
_CUBIC = P("aten.add", x, P("aten.mul", P("aten.mul", P("aten.mul", x, x), x), close_to(0.044715)))
_TANH = P("aten.tanh", P("aten.mul", _CUBIC, close_to(math.sqrt(2 / math.pi))))


def _named(rule):  # noqa: ANN001, ANN202
    """A rule that does not want the numbers it was tested with."""
    return lambda **captures: rule(**{name: a for name, a in captures.items() if not name.startswith("_")})


_gelu_tanh = _named(lambda x: aten.gelu(x, approximate="tanh"))
_gelu = _named(lambda x: aten.gelu(x))
_half = close_to(0.5)
_root = close_to(math.sqrt(0.5))

PARTS = Table(
    [
        (P("aten.div", P("aten.exp", _SHIFTED), P("aten.sum", P("aten.exp", _SHIFTED), d, True)), _softmax),
        (P("aten.mul", x, P("aten.mul", P("aten.add", _TANH, 1.0), _half)), _gelu_tanh, floating("x")),
        (P("aten.mul", P("aten.mul", P("aten.add", _TANH, 1.0), _half), x), _gelu_tanh, floating("x")),
        (P("aten.mul", P("aten.mul", x, _half), P("aten.add", _TANH, 1.0)), _gelu_tanh, floating("x")),
        (P("aten.mul", P("aten.mul", x, _half), P("aten.erfc", P("aten.mul", P("aten.neg", x), _root))), _gelu,
        floating("x")), (P("aten.mul", P("aten.mul", x, _half), P("aten.add", P("aten.erf", P("aten.mul", x, _root)),
        1.0)), _gelu,
         floating("x")),
        (P("aten.mul", x, P("aten.sigmoid", x)), lambda x: aten.silu(x), floating("x")),
        (P("aten.mul", P("aten.sigmoid", x), x), lambda x: aten.silu(x), floating("x")),
        (P("aten.clamp", x, 0.0), lambda x: aten.relu(x), floating("x")),
    ]
)  # fmt: skip


# --- norms ---

_CENTRED = P("aten.sub", x, P("aten.mean", x, d, True))
_VARIANCE = P("aten.mean", P("aten.mul", _CENTRED, _CENTRED), d, True)
_SQUARES = P("aten.mean", P("aten.mul", x, x), d, True)
_eps = Var("e", lambda a: isinstance(a, float) and 0 < a < 1)


def _layer_norm(x: Value, d: list, e: float) -> Value | None:
    return aten.layer_norm(x, [x.shape[-1]], None, None, e) if _last(x, d) and x.tensor.is_float else None


def _rms_norm(x: Value, d: list, e: float) -> Value | None:
    return aten.rms_norm(x, [x.shape[-1]], None, e) if _last(x, d) and x.tensor.is_float else None


def _fits(value: Value, of: Value) -> bool:
    return value.ndim == 1 and str(value.shape[0]) == str(of.shape[-1]) and value.dtype == of.dtype


def _scaled(name: str):  # noqa: ANN202
    """A norm without a weight, times one."""

    def rule(x: Value, y: Arg, w: Value, n: Arg = None) -> Value | None:
        if not isinstance(w, Value) or not _fits(w, x):
            return None
        return aten.layer_norm(x, y, w, None, n) if name == "layer_norm" else aten.rms_norm(x, y, w, n)

    return rule


def _shifted(x: Value, y: Arg, w: Value, n: Arg, b: Value) -> Value | None:
    return aten.layer_norm(x, y, w, b, n) if isinstance(b, Value) and _fits(b, x) else None


_INVERSE = P("aten.rsqrt", P("aten.add", _VARIANCE, _eps))
_INVERSE_RMS = P("aten.rsqrt", P("aten.add", _SQUARES, _eps))
NORMS = Table(
    [
        (P("aten.mul", _CENTRED, _INVERSE), _layer_norm),
        (P("aten.div", _CENTRED, P("aten.sqrt", P("aten.add", _VARIANCE, _eps))), _layer_norm),
        (P("aten.mul", x, _INVERSE_RMS), _rms_norm),
        (P("aten.div", x, P("aten.sqrt", P("aten.add", _SQUARES, _eps))), _rms_norm),
        (P("aten.mul", P("aten.layer_norm", x, y, None, None, n), w), _scaled("layer_norm")),
        (P("aten.mul", w, P("aten.layer_norm", x, y, None, None, n)), _scaled("layer_norm")),
        (P("aten.add", P("aten.layer_norm", x, y, w, None, n), b), _shifted),
        (P("aten.mul", P("aten.rms_norm", x, y, None, n), w), _scaled("rms_norm")),
        (P("aten.mul", w, P("aten.rms_norm", x, y, None, n)), _scaled("rms_norm")),
    ]
)


# --- layers ---


def _layer(x: Value, w: Value, b: Value | None = None) -> Value | None:
    """A product with a matrix, and a bias for its columns."""
    if w.ndim != 2 or x.ndim < 2 or not x.tensor.is_float:
        return None
    if b is not None and not (isinstance(b, Value) and b.ndim == 1 and str(b.shape[0]) == str(w.shape[1])):
        return None
    return aten.linear(x, aten.t(w), b)


LAYERS = Table(
    [
        (P("aten.add", P("aten.matmul", x, w), b), _layer),
        (P("aten.add", b, P("aten.matmul", x, w)), _layer),
        (P("aten.add", P("aten.linear", x, w), b), lambda x, w, b: _biased(x, w, b)),
        (P("aten.add", b, P("aten.linear", x, w)), lambda x, w, b: _biased(x, w, b)),
        # (y + x @ w) + b -> y + (x @ w + b)
        (P("aten.add", P("aten.add", y, P("aten.linear", x, w)), b), lambda x, y, w, b: _and_more(x, y, w, b)),
        (P("aten.add", P("aten.add", P("aten.linear", x, w), y), b), lambda x, y, w, b: _and_more(x, y, w, b)),
        (P("aten.matmul", x, w), _layer),
    ]
)


def _and_more(x: Value, y: Value, w: Value, b: Value) -> Value | None:
    layer = _biased(x, w, b)
    return None if layer is None else aten.add(y, layer)


def _biased(x: Value, w: Value, b: Value) -> Value | None:
    good = isinstance(b, Value) and b.ndim == 1 and str(b.shape[0]) == str(w.shape[0])
    return aten.linear(x, w, b) if good else None


# --- attention ---


def attention(trace: Trace) -> Table:
    """softmax(q @ k * scale, masked) @ v. A mask counts where it is a constant that leaves every row an element: a
    row without one is not what PyTorch's operator gives."""

    @functools.cache
    def known(mask: Value) -> torch.Tensor | None:
        """What a mask holds, if no argument decides it."""
        equations = needed(trace.equations, [mask])
        given = {v for eqn in equations for v in eqn.inputs()} & set(trace.inputs)
        if given or mask in trace.inputs or mask.tensor.is_symbolic or mask.tensor.numel() > LARGEST:
            return None
        return run(trace.with_(inputs=(), equations=tuple(equations), outputs=(mask,), mutations={}, symbols={}))[0]

    def attend(q: Value, k: Value, v: Value, scale: float, mask: Value | None = None) -> Value | None:
        if not (q.ndim == k.ndim == v.ndim == 4) or not (q.dtype == k.dtype == v.dtype) or not q.tensor.is_float:
            return None
        keys = aten.transpose(k, -2, -1)
        if mask is None:
            return laid_out(q, keys, v, None, False, scale)
        held = known(mask) if isinstance(mask, Value) else None
        if held is None or held.dtype != torch.bool or not bool(held.any(-1).all()):
            return None
        rows, columns = held.shape[-2:]
        if (
            held.numel() == rows * columns
            and rows == columns == q.shape[-2]
            and bool((held == torch.ones_like(held).tril()).all())
        ):
            return laid_out(q, keys, v, None, True, scale)
        return laid_out(q, keys, v, mask, False, scale)

    def laid_out(q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: float) -> Value:
        """As a product lies; PyTorch's operator may give heads side by side."""
        return aten.contiguous(aten.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale))

    def low(a: Arg) -> bool:
        """A number that leaves nothing of a softmax's term."""
        return isinstance(a, float) and a <= -1e9

    product = P("aten.matmul", q, k)
    scaled = (
        (P("aten.div", product, Var("c", _number)), lambda c: 1 / c),
        (P("aten.mul", product, Var("c", _number)), lambda c: c),
        (product, lambda c=1.0: 1.0),
    )
    rules: list = []
    for scores, scale in scaled:
        masked = P("aten.where", m, scores, low)
        rules += [(P("aten.matmul", P("aten.softmax", s_, d), v), _attending(attend, scale)) for s_ in (masked, scores)]
    # Heads are put side by side again: where they lie so already, nothing is copied.
    rules.append((P("aten.reshape", P("aten.permute", P("aten.contiguous", x), d), n), lambda x, d, n: aten.reshape(
        aten.permute(x, d), n)))  # fmt: skip
    return Table(rules)


def _number(a: Arg) -> bool:
    return isinstance(a, float) and a > 0


def _attending(attend, scale):  # noqa: ANN001, ANN202
    def rule(q: Value, k: Value, v: Value, d: int, c: float | None = None, m: Value | None = None) -> Value | None:
        if d % v.ndim != v.ndim - 1:
            return None
        return attend(q, k, v, scale(c) if c is not None else 1.0, m)

    return rule
