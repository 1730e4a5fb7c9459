"""The families of steps that move data: views, joins and shifts, woven into each other and into arithmetic.

Programs of these are what index arithmetic is wrong about: slices with steps and ends counted from the back, parts of
one tensor joined again in another order, dimensions flattened across such joins, windows, pads that cut, scans over
what lies apart in memory. Sizes are taken from the values themselves wherever that can be said, so that the same text
holds at several sizes.
"""

from __future__ import annotations

from collections.abc import Callable

from region_maker import Known, Maker, Refused, Step
from region_steps import arithmetic, cast, choose, compare, gather, masked, norm, reduce, scan, unary, view

from tessera.ir.types import overlaps_itself

SPANS = ["1:", ":-1", "1:-1", "::2", "1::2", "::3", "2::3", "-3:", ":-2:2", "-5:-1", "1:-1:2", "-4::2", ":2", "-2:-1"]
SPANS += ["-7:", "-20:-1", "::8"]  # some of which begin before the beginning, or hold one element


def _at(a: Known, d: int, span: str) -> str:
    """A part of a value along one dimension."""
    d %= a.now.ndim
    return f"{a.name}[{', '.join([':'] * d + [span])}]"


def _wide(m: Maker, least: int = 2) -> tuple[Known, int]:
    """A value, and a dimension of it that has some elements."""
    a = m.any(lambda k: any(n >= least for n in k.shape))
    return a, m.rng.choice([d for d, n in enumerate(a.shape) if n >= least])


def _changed(m: Maker, a: Known, text: str) -> str:
    """The text, or some arithmetic of it that keeps the dtype."""
    if a.logic:
        return m.rng.choice([text, text, f"~{text}"])
    number = m.rng.choice([2, 3, -1])
    return m.rng.choice([text, text, f"({text} * {number})", f"({text} - {number})", f"(-{text})"])


def cut(m: Maker) -> Step:
    a, d = _wide(m)
    spans = [":"] * a.now.ndim
    spans[d] = m.rng.choice(SPANS)
    if m.rng.random() < 0.3:
        spans[m.rng.randrange(a.now.ndim)] = m.rng.choice(SPANS)
    match m.rng.randrange(7):
        case 3:
            b = m.any(lambda k: any(n >= 2 for n in k.shape))
            size = f"{b.name}.shape[{m.rng.choice([e for e, n in enumerate(b.shape) if n >= 2])}]"
            spans[d] = m.rng.choice([f"-{size}:", f":-{size}", f"{size} // 2:", f":{size} - 1", f":{size}:2"])
            return Step(f"{a.name}[{', '.join(spans)}]", a.sure)
        case 0:
            start = m.rng.randrange(a.shape[d])
            return Step(f"{a.name}.narrow({d}, {start}, {m.rng.randint(1, a.shape[d] - start)})", a.sure)
        case 1:
            return Step(f"{a.name}.{m.rng.choice(['chunk', 'split'])}(2, {d})[{m.rng.choice([0, -1])}]", a.sure)
        case 2:
            spans[m.rng.randrange(a.now.ndim)] = m.rng.choice(["0", "-1", "None", "1", "None, 1:"])
            return Step(f"{a.name}[{', '.join(spans)}]", a.sure)
        case _:
            return Step(f"{a.name}[{', '.join(spans)}]", a.sure)


def weave(m: Maker) -> Step:
    """Parts of one value, some of them changed, joined in another order."""
    a, d = _wide(m, 3)
    n, rank = a.shape[d], a.now.ndim
    even, odd = _changed(m, a, _at(a, d, "::2")), _changed(m, a, _at(a, d, "1::2"))
    if n % 2:
        even = _changed(m, a, _at(a, d, m.rng.choice([":-1:2", "2::2"])))
    k = m.rng.choice([1, 2, n // 2])
    head, tail = _changed(m, a, _at(a, d, f":{k}")), _changed(m, a, _at(a, d, f"{k}:"))
    match m.rng.randrange(8):
        case 0 | 1:
            text = f"torch.stack([{even}, {odd}], {d + 1}).flatten({d}, {d + 1})"
        case 2:
            text = f"torch.cat([{odd}, {even}], {d}).unflatten({d}, (2, -1)).transpose({d}, {d + 1})"
            text += m.rng.choice(["", f".flatten({d}, {d + 1})", f".reshape({a.name}[:1].numel(), -1)"])
        case 3:
            text = f"torch.cat([{tail}, {head}], {d})"
        case 4:
            text = f"torch.cat([{_at(a, d, f':{k}')}, {_at(a, d, f'{k}:')} * 2 - {_at(a, d, f':-{k}')}], {d})"
            if a.logic:
                raise Refused
        case 5:
            parts = [_changed(m, a, _at(a, d, m.rng.choice(SPANS))) for _ in range(m.rng.randint(2, 4))]
            text = f"torch.cat([{', '.join(parts)}], {d})"
        case 6:
            text = f"torch.stack([{a.name}, {_changed(m, a, f'{a.name}.flip({d})')}], {m.rng.randint(0, rank)})"
            text += m.rng.choice(["", ".flatten()", f".flatten({d}, {d + 1})"])
        case _:
            text = f"torch.stack([{even}, {odd}], {m.rng.randint(0, rank)}).sum({d}, dtype={a.name}.dtype)"
            if a.logic:
                raise Refused
            return Step(text)
    return Step(text)


def shift(m: Maker) -> Step:
    """The same elements elsewhere: turned round, rolled, swapped, some of it twice."""
    a, d = _wide(m)
    e = m.rng.randrange(a.now.ndim)
    by, again = m.rng.choice([1, -1, 2, 3, -5, 7]), m.rng.choice([1, -2, 4])
    return Step(
        m.rng.choice(
            (
                f"{a.name}.flip({d})",
                f"{a.name}.flip(({d}, {e}))" if d != e else f"{a.name}.flip({d}).roll({by}, {d})",
                f"{a.name}.roll({by}, {d})",
                f"{a.name}.roll(({by}, {again}), ({d}, {e}))",
                f"{a.name}.roll({by})",
                f"{a.name}.flip({d}).roll({by}, {d})",
                f"{a.name}.roll({by}, {d}).flip({e}).roll({again}, {e})",
                f"torch.rot90({a.name}, {m.rng.choice([1, 2, 3])}, ({d}, {e}))",
                f"{a.name}.movedim({d}, {e})",
                f"{a.name}.transpose({d}, {e}).contiguous()",
            )
        ),
        a.sure,
    )


def grow(m: Maker) -> Step:
    """Elements that stand in several places."""
    a, d = _wide(m)
    many, rank = m.rng.choice([2, 3]), a.now.ndim
    copies = tuple(many if k == d else m.rng.choice([1, 1, 1, 2]) for k in range(rank))
    own = f"{a.name}.unsqueeze({d + 1}).expand({', '.join([*['-1'] * (d + 1), str(many), *['-1'] * (rank - d - 1)])})"
    texts = [
        f"{a.name}.repeat({copies})",
        f"{a.name}.repeat({(2, *copies)})",
        f"{a.name}.repeat_interleave({many}, {d})",
        f"{a.name}.repeat_interleave({many}, {d})[{', '.join([':'] * d + ['1::2'])}]",
        f"{own}.flatten({d}, {d + 1})",
        f"{own}.transpose({d}, {d + 1}).reshape({a.name}.shape[0], -1)",
        f"{a.name}.tile({copies})",
    ]
    if a.floats and rank in (3, 4):
        scale = m.rng.choice(["2", "3", "1.5"])
        texts += [f"F.interpolate({a.name}, scale_factor={scale})"] * 2
        texts += [f"F.interpolate({a.name}, size={tuple(m.rng.choice([3, 5, 8]) for _ in range(rank - 2))})"]
    return Step(m.rng.choice(texts), a.sure)


def pads(m: Maker) -> Step:
    """A border around, of a number or of the value's own elements, or less than nothing of one."""
    a = m.any(lambda k: k.now.ndim > 0 and not k.logic)
    rank = a.now.ndim
    sides = [m.rng.choice([0, 1, 2, 3, -1, -2]) for _ in range(2 * m.rng.randint(1, min(rank, 3)))]
    value = m.rng.choice([0, 1.5 if a.floats else 3])
    if rank in (2, 3, 4) and a.floats and m.rng.random() < 0.5:
        own = [abs(s) for s in sides][: 2 * max(rank - 2, 1)]
        mode = m.rng.choice(["reflect", "replicate", "circular"])
        return Step(f"F.pad({a.name}, {tuple(own * (max(rank - 2, 1) * 2 // len(own)))}, mode='{mode}')", a.sure)
    own, less = f"F.pad({a.name}, {tuple(sides)}, value={value})", _at(a, rank - 1, ":-1")
    if m.rng.random() < 0.3 and a.shape[-1] > 1:
        return Step(f"{a.name} + F.pad({less}, (1, 0), value={value})")
    return Step(own, a.sure)


def regroup(m: Maker) -> Step:
    """Dimensions joined and cut, not where they were cut before."""
    a = m.any(lambda k: k.now.ndim > 0)
    rank, d = a.now.ndim, m.dim(a) % a.now.ndim
    parts = [p for p in (2, 3, 4, 5) if a.shape[d] and a.shape[d] % p == 0]
    texts = [f"{a.name}.flatten()", f"{a.name}.unsqueeze({d})"]
    if rank > 1:
        e = m.rng.choice([k for k in range(rank) if k != d])
        low, high = sorted((d, e))
        texts += [
            f"{a.name}.flatten({low}, {high})",
            f"{a.name}.transpose({d}, {e}).flatten({low}, {high})",
            f"{a.name}.transpose({d}, {e}).reshape({a.name}.shape[{d}], -1)",
            f"{a.name}.reshape({a.name}.shape[{d}], -1)",
        ]
    if parts:
        p = m.rng.choice(parts)
        texts += [
            f"{a.name}.unflatten({d}, ({p}, -1))",
            f"{a.name}.unflatten({d}, (-1, {p}))",
            f"{a.name}.unflatten({d}, ({p}, -1)).transpose({d}, {d + 1}).flatten({d}, {d + 1})",
            f"{a.name}.flatten().unflatten(0, (-1, {p})).flip(1)",
            f"{a.name}.unflatten({d}, (-1, {p})).sum({d + 1}, dtype={a.name}.dtype)" if not a.logic else texts[0],
        ]
    if rank >= 3 and a.now.numel() and a.shape[-3] % 4 == 0:
        texts += [f"F.pixel_shuffle({a.name}, 2)"] * 2
    if rank >= 3 and a.now.numel() and a.shape[-1] % 2 == 0 and a.shape[-2] % 2 == 0:
        texts += [f"F.pixel_unshuffle({a.name}, 2)"] * 2
    if rank == 4 and a.shape[1] % 2 == 0:
        texts += [f"F.channel_shuffle({a.name}, 2)"]
    text = m.rng.choice(texts)
    return Step(text, a.sure and "sum(" not in text)


def windows(m: Maker) -> Step:
    a, d = _wide(m)
    size, step = m.rng.choice([1, 2, 3]), m.rng.choice([1, 2, 3])
    seen = f"{a.name}.unfold({d}, {size}, {step})"
    texts = [seen, f"{seen}.flatten({d})", f"{seen}.transpose({d}, -1).flatten({d})", f"{seen}[..., ::2]"]
    if not a.logic:
        texts.append(f"{seen}.amax(-1)")
    if a.now.ndim > 1:
        e = m.rng.choice([k for k in range(a.now.ndim) if k != d])
        offset = m.rng.choice([0, 1, -1, 2])
        texts += [f"{a.name}.diagonal({offset}, {d}, {e})"] * 2
        texts += [f"{a.name}.{m.rng.choice(['tril', 'triu'])}({offset})"] * 2
    if a.now.ndim < 4:
        texts += [f"torch.diag_embed({a.name}, {m.rng.choice([0, 1, -2])})"]
    if a.now.ndim == 4 and a.floats:
        texts += [f"F.unfold({a.name}, 2, stride={step})", f"F.unfold({a.name}, (3, 2), padding=1, dilation=2)"]
    return Step(m.rng.choice(texts), a.sure)


def write(m: Maker) -> Step:
    """A part written over: what in-place updates of views become."""
    a, d = _wide(m)
    if any(overlaps_itself(now.shape, now.stride()) for now, _ in a.all):
        raise Refused  # PyTorch keeps the layout, and writes one element of windows in several places
    n = a.shape[d]
    start, stop, step = m.rng.choice([("None", "None", 2), (1, "None", 2), (1, -1, 1), (-3, "None", 1), (2, n, 3)])
    span = f"{'' if start == 'None' else start}:{'' if stop == 'None' else stop}:{step}"
    part = _changed(m, a, _at(a, d, span))
    at = m.rng.randrange(-n, n)
    texts = [
        f"torch.slice_scatter({a.name}, {part}, {d}, {start}, {stop}, {step})",
        f"torch.slice_scatter({a.name}, {part}.flip({d}), {d}, {start}, {stop}, {step})",
        f"torch.select_scatter({a.name}, {_changed(m, a, f'{a.name}.select({d}, {m.rng.randrange(n)})')}, {d}, {at})",
    ]
    if stop == "None" and start != -3:
        given = 0 if start == "None" else start
        texts.append(f"torch.ops.aten.slice_backward({part}, {a.name}.shape, {d}, {given}, 2**63 - 1, {step})")
    if a.now.ndim > 1 and not a.logic:
        texts.append(f"torch.diagonal_scatter({a.name}, -{a.name}.diagonal(1), 1)")
    text = m.rng.choice(texts)
    return Step(text)


def running(m: Maker) -> Step:
    """Sums along what lies apart in memory, from the end, or over parts; differences of neighbours."""
    a = m.any(lambda k: any(n >= 2 for n in k.shape) and not k.logic)
    d = m.rng.choice([d for d, n in enumerate(a.shape) if n >= 2])
    part = _at(a, d, m.rng.choice(SPANS))
    texts = (
        f"{part}.cumsum({d})",
        f"{a.name}.flip({d}).cumsum({d}).flip({d})",
        f"{a.name}.diff(dim={d})",
        f"{a.name}.cumsum({d}).roll(1, {d})",
        f"torch.cat([{part}.cumsum({d}, dtype={a.name}.dtype), {_at(a, d, '::2')}], {d})",
        f"{a.name}.cumsum({d}) - {a.name}.flip({d})",
        f"{a.name}.flatten().cumsum(0)",
        f"{a.name}.transpose(0, {d}).cumsum(0)",
        f"torch.stack([{a.name}, -{a.name}], {d + 1}).flatten({d}, {d + 1}).cumsum({d})",
    )
    return Step(m.rng.choice(texts))


MOVES: dict[Callable[[Maker], Step], float] = {
    cut: 4, weave: 6, shift: 3, grow: 2.5, pads: 2.5, regroup: 5, windows: 2, write: 2.5, running: 2,
}  # fmt: skip
AMONG: dict[Callable[[Maker], Step], float] = {
    unary: 1.5, arithmetic: 5, compare: 0.5, choose: 1.5, cast: 0.7, view: 2, reduce: 2, norm: 1, masked: 0.4,
    scan: 0.5, gather: 0.5,
}  # fmt: skip
