"""Small programs made at random from a seed: what a region of a trace may look like, and what it must compute.

`make(seed)` gives a `Program`: the text of a PyTorch function, its inputs, and the same computed in float64. Steps come
from families (pointwise, views, choices, reductions, norms, scans, gathers), over shapes with dimensions of 0, 1 and
odd sizes, inputs of every layout and dtype. One program in `WOVEN` is woven: most of its steps move data, each going on
with what the one before gave. A dynamic program has inputs of two sizes for the same text: dimensions of `DYNAMIC`
elements in the one have as many as the program says in the other. A step is kept only if its result is well
conditioned: nothing overflows, and no comparison, rounding or position hangs on the last bits, so that a wrong answer
is a bug and not bad luck.
"""

from __future__ import annotations

import math
import random
import re
import warnings

import torch
from region_maker import (
    DYNAMIC,
    FLOATS,
    LARGEST,
    NAMES,
    OTHERS,
    SIZES,
    WEIGHTS,
    Known,
    Maker,
    Program,
    Refused,
    widened,
    wrong,
)
from region_moves import AMONG, MOVES
from region_steps import FAMILIES
from torch import Tensor

__all__ = ["DYNAMIC", "FAMILIES", "MOVES", "NAMES", "WOVEN", "Program", "make", "wrong"]

WOVEN = 3
LENGTHS = [2, 3, 4, 5, 7, 8, 9, 10, 12, 15, 16, 17] * 3 + [24, 33, 64]  # of a woven program: some divide each other

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


def _shapes(rng: random.Random, dynamic: bool, woven: bool) -> list[tuple[int, ...]]:
    """A shape, and others that broadcast with it."""
    rank = rng.choice([1, 2, 2, 3, 3, 4] if woven else [0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4])
    shape = [rng.choice(LENGTHS if woven else SIZES) for _ in range(rank)]
    if dynamic:
        shape[:1] = [DYNAMIC]
        rank = len(shape)
    while math.prod(shape) > LARGEST // (6 if woven else 3):
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
    woven = seed % WOVEN == WOVEN - 1
    m = Maker(rng, newest=0.5 if woven else 0.0)
    larger = rng.choice([8, 12, 15]) if woven else 11
    odd = rng.random() < 0.1
    main = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    for shape in _shapes(rng, dynamic, woven):
        name = main if rng.random() < 0.6 else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        own = rng.randrange(2**31)  # the same layout at both sizes
        grown = tuple(larger if n == DYNAMIC else n for n in shape)
        found = [
            _input(random.Random(own), s, (FLOATS | OTHERS)[name], odd)
            for s in ([shape, grown] if dynamic else [shape])
        ]
        m.pool.append(Known(f"x{len(m.pool)}", [(x, widened(x)) for x in found], True))
    inputs = [k.now for k in m.pool]
    others = [k.all[1][0] for k in m.pool] if dynamic else None
    chosen = MOVES | AMONG if woven else FAMILIES
    families, weights = list(chosen), list(chosen.values())
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
    marks = {"empty"} if any(not now.numel() for k in m.pool for now, _ in k.all) else set()
    if woven:
        marks.add("woven")
    return Program(seed, text + "\n", inputs, frozenset(m.used | marks), others, larger if dynamic else 0)
