"""The families of steps that random programs are made of: each gives one candidate, as text over the values at hand.

A family refuses where the step would be ill conditioned: where rounding could decide a comparison, a position or a
whole number, or where rows are so nearly constant that a norm of them is noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from region_maker import FLOATS, GAP, OTHERS, WEIGHTS, Known, Maker, Refused, Step

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
        f"F.layer_norm({x}, ({last},), {w}, {w}, 0.1)",
        f"({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, keepdim=True, correction=0) + 1e-3)",
        f"{x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 1e-3)",
    )
    along = (
        f"F.softmax({x}, {d})",
        f"F.log_softmax({x}, {d})",
        f"torch.exp({x} - {x}.amax({d}, True)) / torch.exp({x} - {x}.amax({d}, True)).sum({d}, True)",
        f"{x} - torch.logsumexp({x}, {d}, keepdim=True)",
        f"F.normalize({x} + 2, dim={d})",
        f"F.softmax({x}, {d}, dtype=f32)",
    )
    return Step(m.rng.choice(row_wise if m.rng.random() < 0.5 else along))


def masked(m: Maker) -> Step:
    """Scores of which some count for nothing, and their softmax; a row of which none counts gives NaN."""
    a = m.float(1)
    d, x, n = m.dim(a), a.name, a.shape[-1]
    if not all(bool((wide.abs() < 50).all()) for wide in a.wides):
        raise Refused
    places = f"torch.arange({n})"
    causal = f"{places} > torch.arange({a.shape[-2]})[:, None] - {m.rng.choice([0, 1, 3])}" if a.now.ndim > 1 else ""
    known = [k.name for k in m.pool if k.logic and k.shape == a.shape]
    off = m.rng.choice([f for f in (*known, causal, f"{places} >= {m.rng.randint(0, n)}") if f])
    held = m.rng.choice([f"{x}.masked_fill({off}, -inf)", f"torch.where({off}, -inf, {x})"])
    return Step(
        m.rng.choice(
            (
                f"F.softmax({held}, {d})",
                f"F.log_softmax({held}, {d})",
                f"torch.logsumexp({held}, {d}, keepdim={m.rng.random() < 0.7})",
                f"F.softmax({held}, {d}, dtype=f32)",
                f"{held}.exp().sum({d}, keepdim=True) + {held}.amax({d}, keepdim=True)",
            )
        )
    )


def backward(m: Maker) -> Step:
    """The shapes that gradients bring: sums of products along rows, over all rows, and both from the same values."""
    a = m.float(2)
    b = m.any(lambda k: k.shape == a.shape and k.now.dtype == a.now.dtype)
    x, g = a.name, b.name
    over = f"tuple(range({x}.ndim - 1))"
    text, then = m.rng.choice(
        (
            (f"{x} * ({g} - ({g} * {x}).sum(-1, keepdim=True))", f"({{0}} + {g}).sum({over})"),
            (f"{g} - torch.exp({x}.clamp(max=2)) * {g}.sum(-1, keepdim=True)", f"({g} * {x}).mean({over})"),
            (f"({g} * {x}).sum(0)", ""),
            (f"({g} * torch.sigmoid({x})).sum({over})", ""),
            (f"{g} * torch.sigmoid({x}) * (1 + {x} * (1 - torch.sigmoid({x})))", ""),
            (
                f"({g} - {g}.mean(-1, keepdim=True) - {x} * ({g} * {x}).mean(-1, keepdim=True)) * 0.5",
                f"({g} * {x}).sum({over}, keepdim=True)",
            ),
        )
    )
    return Step(text, then=then)


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
    reduce: 4, norm: 2.5, masked: 1.2, backward: 1.5, scan: 0.8, gather: 1, source: 0.5,
}  # fmt: skip
