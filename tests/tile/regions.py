"""Small programs made at random from a seed: what a region of a trace may look like, and what it must compute.

`make(seed)` gives a `Program`: the text of a PyTorch function, its inputs, and the same computed in float64. Steps come
from families (pointwise, views, choices, reductions, norms, scans, gathers), over shapes with dimensions of 0, 1 and
odd sizes, inputs of every layout and dtype. A dynamic program has inputs of two sizes for the same text: dimensions of
`DYNAMIC[0]` elements in the one are of `DYNAMIC[1]` in the other. A step is kept only if its result is well conditioned: nothing overflows,
and no comparison, rounding or position hangs on the last bits, so that a wrong answer is a bug and not bad luck.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
OTHERS = {
    "i32": torch.int32,
    "i64": torch.int64,
    "b": torch.bool,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in (FLOATS | OTHERS).items()}
WEIGHTS = {"f32": 10, "f64": 3, "f16": 4, "bf16": 4, "i32": 2, "i64": 3, "b": 2, "i16": 0.3, "i8": 0.3, "u8": 0.3}
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33] * 3 + [65, 130, 257, 1031]
LARGEST = 6000  # elements of a value
DYNAMIC = (6, 11)  # a size that may change and what it becomes; no other dimension has it
GAP = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-9}

SCOPE: dict[str, object] = {"torch": torch, "F": F, "inf": math.inf, "nan": math.nan, **FLOATS, **OTHERS}
WIDE = SCOPE | dict.fromkeys(FLOATS, torch.float64)


@dataclass(frozen=True)
class Program:
    """A function of tensors as text, and tensors to call it with."""

    seed: int
    text: str
    inputs: list[Tensor]
    families: frozenset[str]
    others: list[Tensor] | None = None  # inputs of the other size, if the program is dynamic

    @property
    def empty(self) -> bool:
        """Some input has no elements: there is nothing to compile."""
        return "empty" in self.families

    def function(self, scope: dict[str, object] = SCOPE) -> Callable[..., tuple[Tensor, ...]]:
        found: dict[str, object] = {}
        exec(compile(self.text, f"<program {self.seed}>", "exec"), dict(scope), found)
        return found["program"]  # type: ignore[return-value]

    def reference(self, inputs: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """The results with every float in float64."""
        with wide_default():
            return self.function(WIDE)(*map(widened, self.inputs if inputs is None else inputs))

    def __str__(self) -> str:
        listed = [f"  x{i}: {NAMES[x.dtype]} {tuple(x.shape)} strides {x.stride()}" for i, x in enumerate(self.inputs)]
        return "\n".join([f"program {self.seed}", *listed, self.text])


@contextlib.contextmanager
def wide_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


# --- are results right? -----------------------------------------------------------------------------------

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5, torch.float64: 1e-11}


def wrong(got: Tensor, eager: Tensor, reference: Tensor) -> str:
    """What is wrong with a result, in words; empty if nothing is.

    Integers and truth values must be eager's own. A float may be as far from the reference as its dtype is coarse, or
    a few times as far as eager is.
    """
    if got.dtype != eager.dtype or got.shape != eager.shape:
        return f"expected {eager.dtype} {tuple(eager.shape)}, got {got.dtype} {tuple(got.shape)}"
    if not got.is_floating_point():
        return "" if torch.equal(got, eager) else f"expected\n{eager}\ngot\n{got}"
    finite = reference.isfinite() & eager.isfinite()
    if not torch.equal(got.nan_to_num(0, 1, 2)[~finite], eager.nan_to_num(0, 1, 2)[~finite]):
        return f"expected NaN and infinities as in\n{eager}\ngot\n{got}"
    if not bool(got[finite].isfinite().all()):
        return f"expected finite numbers as in\n{eager}\ngot\n{got}"
    want = reference[finite]
    off, usual = (got[finite].double() - want).abs(), (eager[finite].double() - want).abs()
    limit = TOLERANCE[got.dtype] * (1 + want.abs()) + 8 * (usual.max() if usual.numel() else 0)
    worst = (off / limit).max().item() if off.numel() else 0.0
    return "" if worst <= 1 else f"{worst:.3g} times the tolerance off; expected\n{eager}\ngot\n{got}"


# --- making one -------------------------------------------------------------------------------------------


@dataclass
class Known:
    """A value of the program being made, as it is and in float64, for each of the sizes.

    `sure`: its bits are the same however it is computed.
    """

    name: str
    all: list[tuple[Tensor, Tensor]]
    sure: bool

    @property
    def now(self) -> Tensor:
        return self.all[0][0]

    @property
    def wides(self) -> list[Tensor]:
        return [wide for _, wide in self.all]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.now.shape)

    @property
    def floats(self) -> bool:
        return self.now.is_floating_point()

    @property
    def logic(self) -> bool:
        return self.now.dtype is torch.bool

    def near(self, levels: Callable[[Tensor], Tensor | float]) -> bool:
        """Some element is so near to one of these that rounding could carry it across."""
        if self.sure or not self.floats:
            return False
        gap = GAP[self.now.dtype]
        return any(bool(((x - levels(x)).abs() <= gap * (1 + x.abs())).any()) for x in self.wides)


@dataclass
class Step:
    """A candidate: an expression over names, and whether its result has the same bits however it is computed."""

    text: str
    sure: bool = False


class Refused(Exception):
    """This step cannot be taken here."""


@dataclass
class Maker:
    rng: random.Random
    pool: list[Known] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    # --- choosing ---

    def any(self, test: Callable[[Known], bool] = lambda k: True) -> Known:
        """Some value, rather a new one than an old one."""
        fitting = [k for k in self.pool if test(k)]
        if not fitting:
            raise Refused
        return self.rng.choices(fitting, [1 + i for i in range(len(fitting))])[0]

    def float(self, rank: int = 0) -> Known:
        return self.any(lambda k: k.floats and k.now.ndim >= rank)

    def beside(self, a: Known, test: Callable[[Known], bool] = lambda k: True) -> Known:
        """A value that broadcasts with another."""

        def fits(k: Known) -> bool:
            pairs = zip(reversed(k.shape), reversed(a.shape), strict=False)
            return test(k) and all(m == n or 1 in (m, n) for m, n in pairs)

        return self.any(fits)

    def dim(self, a: Known) -> int:
        if not a.now.ndim:
            raise Refused
        d = self.rng.choice([a.now.ndim - 1, self.rng.randrange(a.now.ndim)])
        return d - a.now.ndim if self.rng.random() < 0.5 else d

    def dims(self, a: Known) -> str:
        """Dimensions to reduce: the last, the first, some, or all of them."""
        n = a.now.ndim
        if not n:
            raise Refused
        listed = self.rng.choice([[n - 1], [n - 1], [0], list(range(n)), [n - 2, n - 1][-n:], [self.rng.randrange(n)]])
        return str(tuple(listed)) if len(listed) > 1 else str(listed[0])

    def number(self) -> float:
        return self.rng.choice([0.5, 2.0, -1.5, 0.25, 3.0, -0.75])

    # --- taking a step ---

    def take(self, family: str, step: Step) -> bool:
        made = []
        for k in range(len(self.pool[0].all)):
            try:
                now = eval(step.text, dict(SCOPE), {x.name: x.all[k][0] for x in self.pool})  # noqa: S307
                with wide_default():
                    wide = eval(step.text, dict(WIDE), {x.name: x.all[k][1] for x in self.pool})  # noqa: S307
            except (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError):
                return False
            if not _sound(now, wide):
                return False
            made.append((now, wide))
        if len({now.ndim for now, _ in made}) > 1:
            return False
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {step.text}")
        self.pool.append(Known(name, made, step.sure or not made[0][0].is_floating_point()))
        self.used.add(family)
        return True


def _sound(now: object, wide: object) -> bool:
    """The result is small, of one of our dtypes, and eager agrees with the reference."""
    if not isinstance(now, Tensor) or not isinstance(wide, Tensor) or now.dtype not in NAMES:
        return False
    if now.shape != wide.shape or now.numel() > LARGEST or now.ndim > 5:
        return False
    if not now.is_floating_point():
        return torch.equal(now, wide) and (now.dtype is torch.bool or not now.numel() or int(now.abs().max()) < 10**6)
    finite = wide.isfinite()
    if not torch.equal(finite, now.isfinite()):
        return False
    if not bool(finite.any()):
        return True
    off = (now.double() - wide).abs()[finite] / (1 + wide.abs()[finite])
    allowed = 2e-4 if now.dtype is torch.float32 else 0.1
    return float(wide.abs()[finite].max()) < 1000 and float(off.max()) < allowed


# --- families ---------------------------------------------------------------------------------------------

UNARY = ["exp", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "atan", "neg", "abs", "square", "relu", "sinh", "cosh"]
POSITIVE = ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"]
ROUNDING = ["floor", "ceil", "trunc", "round", "sign", "frac"]
SAME_BITS = {"neg", "abs", "relu", "maximum", "minimum"}


def unary(m: Maker) -> Step:
    a = m.float()
    match m.rng.randrange(8):
        case 0:
            return Step(f"torch.{m.rng.choice(POSITIVE)}({a.name}.abs() + 0.5)")
        case 1:
            fn = m.rng.choice(ROUNDING)
            if a.near(lambda x: (x * 2).round() / 2):  # round is sharp at the halves, the others at whole numbers
                raise Refused
            return Step(f"torch.{fn}({a.name})", a.sure and fn != "frac")
        case 2:
            fn = m.rng.choice(
                ["gelu", "silu", "softplus", "elu", "leaky_relu", "hardswish", "relu6", "mish", "logsigmoid"]
            )
            tail = ", approximate='tanh'" if fn == "gelu" and m.rng.random() < 0.5 else ""
            return Step(f"F.{fn}({a.name}{tail})")
        case 3:
            return (
                Step(f"{a.name} ** {m.rng.choice([2, 3, 0.5, -1, -0.5]) if a.sure else 2}")
                if not _negative(a)
                else Step(f"{a.name} ** 2")
            )
        case _:
            fn = m.rng.choice(UNARY)
            return Step(f"torch.{fn}({a.name})", a.sure and fn in SAME_BITS)


def _negative(a: Known) -> bool:
    return not all(bool((x > 0.1).all()) for x in a.wides)


def arithmetic(m: Maker) -> Step:
    a = m.any(lambda k: not k.logic)
    match m.rng.randrange(9):
        case 0 | 1 | 2:
            b = m.beside(a, lambda k: not k.logic)
            return Step(f"{a.name} {m.rng.choice('+-*')} {b.name}")
        case 3:
            b = m.beside(a)
            return Step(f"{a.name} / ({b.name}.abs() + 1)" if not b.logic else f"{a.name} * {b.name}")
        case 4:
            fn = m.rng.choice(["maximum", "minimum"])
            b = m.beside(a, lambda k: not k.logic)
            same = a.now.dtype == b.now.dtype
            return Step(f"torch.{fn}({a.name}, {b.name})", a.sure and b.sure and same)
        case 5:
            number = m.number() if a.floats or m.rng.random() < 0.3 else m.rng.choice([2, 3, -1])
            return Step(
                m.rng.choice(
                    [f"{a.name} + {number}", f"{number} - {a.name}", f"{a.name} * {number}", f"{a.name} / {number}"]
                )
            )
        case 6:
            b, c = m.beside(a, lambda k: k.floats), m.beside(a, lambda k: k.floats)
            return Step(f"torch.addcmul({a.name}, {b.name}, {c.name}, value={m.number()})")
        case 7:
            b = m.beside(a, lambda k: k.floats)
            return Step(f"torch.add({a.name}, {b.name}, alpha={m.rng.choice([2, -3])})")
        case _:
            b = m.beside(a, lambda k: k.floats)
            return Step(f"torch.lerp({a.name}, {b.name}, {m.rng.choice([0.25, 0.75])})")


def integers(m: Maker) -> Step:
    a = m.any(lambda k: not k.floats and not k.logic)
    if m.rng.random() < 0.5:
        number = m.rng.choice([2, 3, 5, -3])
        return Step(
            m.rng.choice(
                [
                    f"{a.name} // {number}",
                    f"{a.name} % {number}",
                    f"{a.name} & 7",
                    f"{a.name} << 1",
                    f"{a.name} >> 2",
                    f"~{a.name}",
                ]
            )
        )
    b = m.beside(a, lambda k: not k.floats and not k.logic)
    return Step(
        m.rng.choice(
            [
                f"{a.name} // (abs({b.name}) + 1)",
                f"{a.name} % (abs({b.name}) + 2)",
                f"{a.name} ^ {b.name}",
                f"{a.name} | {b.name}",
            ]
        )
    )


def compare(m: Maker) -> Step:
    a = m.any()
    op = m.rng.choice(["<", "<=", ">", ">=", "==", "!="])
    if m.rng.random() < 0.5:
        level = m.rng.choice([0, 0.5, -1, 2])
        if a.near(lambda _: level):
            raise Refused
        return Step(f"{a.name} {op} {level}", True)
    b = m.beside(a)
    gap = max(GAP.get(k.now.dtype, 0.0) for k in (a, b))
    if a.sure and b.sure:
        gap = 0.1 if a.now.dtype != b.now.dtype else -1.0  # in which dtype they are compared decides the last bits
    for x, y in zip(a.wides, b.wides, strict=True):
        if bool(((x.double() - y.double()).abs() <= gap * (1 + x.double().abs())).any()):
            raise Refused
    return Step(f"{a.name} {op} {b.name}", True)


def logic(m: Maker) -> Step:
    a = m.any(lambda k: k.logic)
    if m.rng.random() < 0.3:
        return Step(m.rng.choice([f"~{a.name}", f"torch.logical_not({a.name})"]))
    b = m.beside(a, lambda k: k.logic)
    return Step(f"{a.name} {m.rng.choice('&|^')} {b.name}")


def choose(m: Maker) -> Step:
    a = m.any(lambda k: not k.logic)
    match m.rng.randrange(5):
        case 0:
            c = m.beside(a, lambda k: k.logic)
            b = m.beside(a, lambda k: not k.logic)
            return Step(f"torch.where({c.name}, {a.name}, {b.name})", a.sure and b.sure and a.now.dtype == b.now.dtype)
        case 1:
            c = m.beside(a, lambda k: k.logic)
            value = m.rng.choice(["0.0", "-inf", "2.5"]) if a.floats else "3"
            return Step(f"{a.name}.masked_fill({c.name}, {value})", a.sure)
        case 2:
            low, high = sorted(m.rng.sample([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0], 2))
            return Step(f"{a.name}.clamp({low}, {high})" if a.floats else f"{a.name}.clamp(-2, 5)", a.sure)
        case 3:
            return Step(m.rng.choice([f"{a.name}.clamp_min(0)", f"torch.clamp({a.name}, max=1)"]), a.sure)
        case _:
            if a.now.ndim < 2:
                raise Refused
            return Step(f"{a.name}.{m.rng.choice(['tril', 'triu'])}({m.rng.choice([-1, 0, 1])})", a.sure)


def cast(m: Maker) -> Step:
    a = m.any()
    to = m.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    narrow = to in OTHERS and to != "b"
    if a.floats and narrow and (a.near(torch.round) or not all(bool((x.abs() < 100).all()) for x in a.wides)):
        raise Refused
    if a.floats and to == "u8" and any(bool((x < 0).any()) for x in a.wides):
        raise Refused
    if a.floats and to == "b" and a.near(lambda _: 0.0):
        raise Refused
    wider = a.floats and to in FLOATS and torch.promote_types(a.now.dtype, FLOATS[to]) == FLOATS[to]
    return Step(f"{a.name}.to({to})", (a.sure and wider) or not a.floats)


def view(m: Maker) -> Step:
    a = m.any()
    n, shape = a.now.ndim, a.shape
    match m.rng.randrange(10):
        case 0:
            return Step(f"{a.name}.transpose({m.dim(a)}, {m.dim(a)})", a.sure)
        case 1:
            order = list(range(n))
            m.rng.shuffle(order)
            return Step(f"{a.name}.permute({tuple(order)})", a.sure)
        case 2:
            d = m.dim(a)
            start = m.rng.randrange(max(shape[d], 1))
            stop = m.rng.choice(["", str(shape[d] - m.rng.randint(0, 1))])
            step = m.rng.choice(["", "", ":2", ":3"])
            index = ", ".join([":"] * (d % n) + [f"{start}:{stop}{step}"])
            return Step(f"{a.name}[{index}]", a.sure)
        case 3:
            d = m.dim(a)
            at = m.rng.randrange(-shape[d], shape[d]) if shape[d] else 0
            return Step(f"{a.name}.select({d}, {at})", a.sure)
        case 4:
            return Step(f"{a.name}.reshape({_reshaped(m.rng, shape)})", a.sure)
        case 5:
            return Step(f"{a.name}.unsqueeze({m.rng.randint(0, n)})", a.sure)
        case 6:
            return Step(m.rng.choice([f"{a.name}.squeeze()", f"{a.name}.flatten()", f"{a.name}.contiguous()"]), a.sure)
        case 7:
            grown = [m.rng.choice([2, 3, 5]) if s == 1 else s for s in shape]
            return Step(f"{a.name}.expand({tuple([m.rng.choice([2, 4]), *grown])})", a.sure)
        case 8:
            return Step(
                m.rng.choice([f"{a.name}.flip({m.dim(a)})", f"{a.name}.roll({m.rng.choice([1, 2, -1])}, {m.dim(a)})"]),
                a.sure,
            )
        case _:
            return Step(f"{a.name}.repeat({tuple([2] + [1] * (n - 1)) if n else (2,)})", a.sure)


def _reshaped(rng: random.Random, shape: Sequence[int]) -> tuple[int, ...]:
    """Another shape with as many elements: neighbours joined, or one dimension cut."""
    new = list(shape)
    for _ in range(rng.randint(1, 2)):
        if len(new) > 1 and rng.random() < 0.5:
            i = rng.randrange(len(new) - 1)
            new[i : i + 2] = [new[i] * new[i + 1]]
        elif new:
            i = rng.randrange(len(new))
            parts = [p for p in (2, 3, 4, 5, 7) if new[i] and new[i] % p == 0]
            if parts:
                p = rng.choice(parts)
                new[i : i + 1] = rng.choice([[p, new[i] // p], [new[i] // p, p]])
    return tuple(new)


def join(m: Maker) -> Step:
    a = m.any(lambda k: k.now.ndim > 0)
    d = m.dim(a) % a.now.ndim

    def fits(k: Known) -> bool:
        same = [k.shape[i] == n for i, n in enumerate(a.shape) if i != d] if k.now.ndim == a.now.ndim else [False]
        return k.now.dtype == a.now.dtype and all(same)

    match m.rng.randrange(4):
        case 0 | 1:
            b = m.any(fits)
            return Step(f"torch.cat([{a.name}, {b.name}], {d})", a.sure and b.sure)
        case 2:
            b = m.any(lambda k: k.shape == a.shape and k.now.dtype == a.now.dtype)
            return Step(f"torch.stack([{a.name}, {b.name}], {d})", a.sure and b.sure)
        case _:
            pad = (m.rng.randint(0, 2), m.rng.randint(0, 3))
            return Step(
                f"F.pad({a.name}, {pad}, value={0 if not a.floats else 1.5})" if not a.logic else f"~{a.name}", a.sure
            )


def reduce(m: Maker) -> Step:
    a = m.any()
    keep = m.rng.random() < 0.7
    dims = m.dims(a)
    match m.rng.randrange(9):
        case 0 | 1 | 2:
            fn = m.rng.choice(["sum", "mean"]) if a.floats else "sum"
            return Step(f"{a.name}.{fn}({dims}, keepdim={keep})")
        case 3:
            return Step(f"{a.name}.{m.rng.choice(['amax', 'amin'])}({dims}, keepdim={keep})", a.sure)
        case 4:
            correction = m.rng.choice([0, 1])
            return Step(
                f"torch.{m.rng.choice(['var', 'std'])}({a.name}, {dims}, correction={correction}, keepdim={keep})"
            )
        case 5:
            return Step(
                m.rng.choice(
                    [
                        f"torch.logsumexp({a.name}, {dims}, keepdim={keep})",
                        f"{a.name}.{m.rng.choice(['sum', 'amax'])}()",
                    ]
                )
            )
        case 6:
            return Step(f"torch.linalg.vector_norm({a.name}, {m.rng.choice([1, 2, 'inf'])}, {dims}, keepdim={keep})")
        case 7:
            if a.near(lambda _: 0.0):
                raise Refused
            return Step(f"{a.name}.{m.rng.choice(['any', 'all'])}({m.dim(a)}, keepdim={keep})", True)
        case _:
            d = m.dim(a)
            for x in a.wides:
                ordered = x.sort(d).values
                close = ordered.diff(dim=d).double() <= GAP.get(a.now.dtype, 0.0) * 4
                if bool(close.any()) or not bool(ordered.isfinite().all()):
                    raise Refused  # which of equals comes first is not promised
            fn = m.rng.choice(["argmax", "argmin", "max", "min"])
            part = m.rng.choice(["[0]", "[1]"]) if fn in ("max", "min") else ""
            return Step(f"{a.name}.{fn}({d}, keepdim={keep}){part}", a.sure or part != "[0]")


def norm(m: Maker) -> Step:
    a = m.float(1)
    d = m.dim(a)
    x, last = a.name, a.shape[-1]
    if not all((x.amax(d) - x.amin(d) > 0.05).all() for x in a.wides) and a.shape[d] > 1:
        raise Refused  # nearly constant rows: a norm of them is noise
    same = [k.name for k in m.pool if k.shape == (last,) and k.now.dtype == a.now.dtype]
    w = m.rng.choice([*same, "None"])
    whole = f"{tuple(a.shape[-2:])}" if m.rng.random() < 0.2 else f"({last},)"
    row_wise = (
        f"F.layer_norm({x}, {whole}, {w if whole == f'({last},)' else None})",
        f"F.rms_norm({x}, ({last},), {w})",
        f"F.layer_norm({x}, ({last},), {w}, {w}, 1e-3)",
        f"({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, keepdim=True, correction=0) + 1e-3)",
        f"{x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 1e-3)",
    )
    along = (
        f"F.softmax({x}, {d})",
        f"F.log_softmax({x}, {d})",
        f"torch.exp({x} - {x}.amax({d}, keepdim=True)) / torch.exp({x} - {x}.amax({d}, keepdim=True)).sum({d}, keepdim=True)",
        f"{x} - torch.logsumexp({x}, {d}, keepdim=True)",
        f"F.normalize({x} + 2, dim={d})",
        f"F.softmax({x}, {d}, dtype=f32)",
    )
    return Step(m.rng.choice(row_wise if m.rng.random() < 0.5 else along))


def backward(m: Maker) -> Step:
    """The shapes that gradients bring: sums of products along rows, and over all rows."""
    a = m.float(2)
    b = m.any(lambda k: k.shape == a.shape and k.now.dtype == a.now.dtype)
    x, g = a.name, b.name
    return Step(
        m.rng.choice(
            (
                f"{x} * ({g} - ({g} * {x}).sum(-1, keepdim=True))",
                f"{g} - torch.exp({x}.clamp(max=2)) * {g}.sum(-1, keepdim=True)",
                f"({g} * {x}).sum(0)",
                f"({g} * torch.sigmoid({x})).sum(tuple(range({x}.ndim - 1)))",
                f"{g} * torch.sigmoid({x}) * (1 + {x} * (1 - torch.sigmoid({x})))",
                f"({g} - {g}.mean(-1, keepdim=True) - {x} * ({g} * {x}).mean(-1, keepdim=True)) * 0.5",
            )
        )
    )


def scan(m: Maker) -> Step:
    a = m.any(lambda k: k.now.ndim > 0)
    return Step(f"{a.name}.{'cumprod' if a.floats and m.rng.random() < 0.1 else 'cumsum'}({m.dim(a)})")


def gather(m: Maker) -> Step:
    a = m.any(lambda k: k.now.ndim > 0 and k.now.numel() > 0)
    d = m.dim(a) % a.now.ndim
    size = a.shape[d]
    picks = m.any(lambda k: k.now.dtype == torch.int64 and k.now.numel() > 0 and k.now.ndim > 0)
    i = f"({picks.name} % {size})"
    match m.rng.randrange(5):
        case 0:
            return Step(f"F.embedding({i}, {a.name})" if a.now.ndim == 2 and a.floats else f"{a.name}[{i}]", a.sure)
        case 1:
            return Step(f"{a.name}.index_select({d}, {i}.flatten())", a.sure)
        case 2:
            shape = tuple(1 if k == d else n for k, n in enumerate(a.shape))
            return Step(f"{a.name}.gather({d}, {i}.flatten()[:1].expand({shape}))", a.sure)
        case 3:
            return Step(f"{a.name}[({picks.name} % {a.shape[0]})]", a.sure)
        case _:
            if a.now.ndim < 2:
                raise Refused
            return Step(f"{a.name}[{picks.name} % {a.shape[0]}, {picks.name} % {a.shape[1]}]", a.sure)


def source(m: Maker) -> Step:
    a = m.any()
    last = a.shape[-1] if a.shape else 3
    return Step(
        m.rng.choice([f"torch.arange({last})", f"torch.full({a.shape}, 2.5, dtype=f32)", f"torch.ones_like({a.name})"]),
        True,
    )


FAMILIES: dict[Callable[[Maker], Step], float] = {
    unary: 5, arithmetic: 7, integers: 1.5, compare: 2, logic: 0.7, choose: 2.5, cast: 2, view: 5, join: 1.5,
    reduce: 4, norm: 2.5, backward: 1.5, scan: 0.8, gather: 1, source: 0.5,
}  # fmt: skip


# --- inputs -----------------------------------------------------------------------------------------------


def _input(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, odd: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    layout = rng.choice(["plain"] * 5 + ["transposed", "strided", "offset", "expanded"])
    full = shape
    if layout == "transposed" and len(shape) > 1:
        full = shape[::-1]
    elif layout == "strided" and shape:
        full = (*shape[:-1], shape[-1] * 2)
    elif layout == "expanded" and shape:
        full = (1, *shape[1:])
    elif layout == "offset" and shape:
        full = (shape[0] + 2, *shape[1:])
    if dtype.is_floating_point:
        x = torch.randn(full, generator=generator, dtype=torch.float64).to(dtype)
        if odd and x.numel():
            flat = x.view(-1)
            for _ in range(2):
                flat[rng.randrange(x.numel())] = rng.choice([math.inf, -math.inf, math.nan, -0.0, 0.0])
    elif dtype is torch.bool:
        x = torch.rand(full, generator=generator) < 0.5
    else:
        x = torch.randint(0 if dtype is torch.uint8 else -9, 10, full, generator=generator).to(dtype)
    match layout:
        case "transposed" if len(shape) > 1:
            return x.permute(*reversed(range(len(shape))))
        case "strided" if shape:
            return x[..., ::2]
        case "expanded" if shape:
            return x.expand(shape)
        case "offset" if shape:
            return x[2:]
    return x


def _shapes(rng: random.Random, dynamic: bool) -> list[tuple[int, ...]]:
    """A shape, and others that broadcast with it."""
    rank = rng.choice([0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4])
    shape = [rng.choice(SIZES) for _ in range(rank)]
    if dynamic:
        shape[:1] = [DYNAMIC[0]]
        rank = len(shape)
    while math.prod(shape) > LARGEST // 3:
        shape[rng.randrange(dynamic, rank)] = rng.choice([1, 2, 3])
    if rank and not dynamic and rng.random() < 0.03:
        shape[rng.randrange(rank)] = 0
    found = [tuple(shape)]
    for _ in range(rng.randint(1, 3)):
        other = [1 if rng.random() < 0.2 else n for n in shape[rng.choice([0, 0, rng.randint(0, rank)]) :]]
        found.append(tuple(other))
    return found


def make(seed: int, dynamic: bool = False) -> Program:
    """The program of a seed: always the same one."""
    rng = random.Random(seed)
    m = Maker(rng)
    odd = rng.random() < 0.1
    main = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    for shape in _shapes(rng, dynamic):
        name = main if rng.random() < 0.6 else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        own = rng.randrange(2**31)  # the same layout at both sizes
        grown = tuple(DYNAMIC[1] if n == DYNAMIC[0] else n for n in shape)
        found = [
            _input(random.Random(own), s, (FLOATS | OTHERS)[name], odd)
            for s in ([shape, grown] if dynamic else [shape])
        ]
        m.pool.append(Known(f"x{len(m.pool)}", [(x, widened(x)) for x in found], True))
    inputs = [k.now for k in m.pool]
    others = [k.all[1][0] for k in m.pool] if dynamic else None
    families, weights = list(FAMILIES), list(FAMILIES.values())
    wanted = rng.randint(3, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12 * wanted):
            if len(m.lines) >= wanted:
                break
            family = rng.choices(families, weights)[0]
            try:
                step = family(m)
            except (Refused, RuntimeError, IndexError):
                continue
            m.take(family.__name__, step)
    made = m.pool[len(inputs) :]
    read = {name for line in m.lines for name in re.findall(r"v\d+", line.split(" = ", 1)[1])}
    shown = {k.name for k in made if k.name not in read or rng.random() < 0.1}  # nothing is computed in vain
    result = ", ".join(k.name for k in made if k.name in shown)
    text = "\n    ".join(
        [f"def program({', '.join(f'x{i}' for i in range(len(inputs)))}):", *m.lines, f"return {result},"]
    )
    empty = {"empty"} if any(not now.numel() for k in m.pool for now, _ in k.all) else set()
    return Program(seed, text + "\n", inputs, frozenset(m.used | empty), others)
