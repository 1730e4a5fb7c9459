"""Blocks and what concerns autograd: grad modes, autocast, branches, loops, checkpoints, custom functions, hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from . import steps_math
from .maker import Maker, Refused, attempt
from .text import render

Fill = Callable[[Maker], None]  # takes one step more of any kind


def _fill(m: Maker, fill: Fill, most: int = 3) -> None:
    for _ in range(m.rng.randint(1, most)):
        fill(m)


def grad_mode(m: Maker, fill: Fill) -> None:
    modes = {
        "torch.no_grad()": torch.no_grad,
        "torch.enable_grad()": torch.enable_grad,
        "torch.set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
        "torch.set_grad_enabled(True)": lambda: torch.set_grad_enabled(True),
    }
    head = m.rng.choices(list(modes), [6, 3, 1, 1])[0]
    before = torch.is_grad_enabled()
    with m.block(f"with {head}:", torch.set_grad_enabled("no" not in head and "False" not in head)):
        _fill(m, fill)
    torch.set_grad_enabled(before)


def autocast(m: Maker, fill: Fill) -> None:
    with m.block("with torch.autocast('cpu', dtype=bf16):", torch.autocast("cpu", dtype=torch.bfloat16)):
        _fill(m, fill, 2)


def branch(m: Maker, fill: Fill) -> None:
    """On a flag, on a size, or on data."""
    heads = ["if flag:", "if not flag:"] if "flag" in m.scope else []
    a = m.any()
    heads.append(f"if {a}.ndim > 1:")
    if m.value(a).ndim:
        heads.append(f"if {a}.shape[0] > 2:")
    if torch.is_grad_enabled():
        heads.append("if torch.is_grad_enabled():")
    heads.append(f"if {a}.requires_grad:")
    if m.kind in ("jit", "tile", "backend") and m.chance(0.3) and not m.value(a).is_complex():
        heads = [f"if {a}.sum() > 0:", f"if bool(({a} > 0).any()):"]
    with m.block(m.rng.choice(heads), nullcontext()):
        _fill(m, fill)
    if m.chance(0.4) and isinstance(m.lines[-1:], list) and m.lines and not isinstance(m.lines[-1], str):
        with m.block("else:", nullcontext()):
            _fill(m, fill, 2)


def loop(m: Maker, fill: Fill) -> None:
    with m.block(f"for i in range({m.rng.randint(1, 3)}):", nullcontext()):
        _fill(m, fill, 2)


def item(m: Maker) -> None:
    if m.kind not in ("jit", "tile", "backend"):
        raise Refused
    a, b = m.any(lambda x: x.numel() == 1 and not x.is_complex()), m.float()
    m.assign(f"{b} * {a}.item()")


def sized(m: Maker) -> None:
    """Numbers made of sizes."""
    a, b = m.any(lambda x: x.ndim > 0), m.float()
    forms = "{1} * {0}.shape[0]|{1} / {0}.numel()|{1} + len({0})|{1}.reshape({0}.shape)|{1} * {0}.stride(0)"
    m.assign(m.rng.choice(forms.split("|")).format(a, b))


def checkpointed(m: Maker) -> None:
    a = m.float()
    b = m.beside(a, lambda x: x.is_floating_point())
    bodies = [
        "z.sin() * {1}",
        "(z * {1}).exp()",
        "F.dropout(z, 0.5) + {1}",
        "z.sigmoid().mul_(2)",
        "torch.softmax(z + {1}, -1)",
    ]
    body = m.rng.choice(bodies).format(a, b)
    m.assign(f"checkpoint(lambda z: {body}, {a}, use_reentrant=False)")


def checkpoint_block(m: Maker, fill: Fill) -> None:
    """A function of several steps, which backward runs again: what it writes, if anything, it made itself."""
    a, body, made = m.float(), f"body{m.count}", f"z{m.count}"
    with m.block(f"def {body}({made}):", nullcontext()):
        m.scope[made] = m.value(a) * 1
        known, outside = list(m.pool), m.pool
        m.pool = [made, *(n for n in known if m.chance(0.3))]
        m.take(f"{made} = {made} * 1")
        for _ in range(m.rng.randint(1, 4)):
            attempt(m, m.rng.choice([*INSIDE, *INSIDE, custom, stop]))
        given = m.rng.choice([n for n in m.pool if n not in known])
        m.pool = outside
        m.lines.append(f"return {given}")
    try:
        exec(render(m.lines[-1:]), m.scope)
        m.assign(f"checkpoint({body}, {a}, use_reentrant=False)")
    except NameError as error:
        raise Refused from error


def custom(m: Maker) -> None:
    a = m.float()
    choice = m.rng.choice(["Scale", "Gate", "Cube", "Over"])
    if choice == "Scale":
        m.assign(f"Scale.apply({a}, {m.rng.choice([2.0, 0.5])})")
        return
    first, second = m.new(), m.new()
    args = a if choice == "Cube" else f"{a}, {m.same(a)}"
    if choice == "Over":
        args = f"{m.assign(f'{a} * 1')}, {m.same(a)}"
    m.take(f"{first}, {second} = {choice}.apply({args})", first, second)


def hook(m: Maker) -> None:
    a = m.any(lambda x: x.requires_grad and not x.is_leaf)
    if m.value(a)._is_view() and m.value(a)._version:
        raise Refused  # eager crashes at the first hook of a view whose base was written
    m.take(
        f"{a}.register_hook({m.rng.choice(['double', 'double', 'lambda g: g if g is None else g + 1', 'note_half'])})"
    )


def inner_grad(m: Maker) -> None:
    """A gradient asked for inside the program."""
    a = m.any(lambda x: x.is_floating_point() and x.requires_grad)
    leaf, made = m.new(), m.new()
    if m.chance(0.6) or not torch.is_grad_enabled():
        m.take(f"{leaf} = {a}.detach().requires_grad_()", leaf)
        m.assign(f"torch.autograd.grad(({leaf}.sin() * {leaf}).sum(), {leaf})[0]")
    else:
        kept = m.rng.choice(["", ", create_graph=True"])
        m.take(f"{made} = torch.autograd.grad({a}.square().sum(), {a}{kept})[0]", made)


def new_leaf(m: Maker) -> None:
    m.assign(f"{m.float()}.detach().requires_grad_()")


def stop(m: Maker) -> None:
    a = m.float()
    m.assign(f"{a}.detach() * {m.rng.choice(['2', a])}")


INSIDE = (steps_math.unary, steps_math.binary, steps_math.scalar, steps_math.norm, steps_math.draw)
BLOCKS = {grad_mode: 5, branch: 2, loop: 1, autocast: 0.3, checkpoint_block: 1}
STEPS = {sized: 1, item: 0.4, checkpointed: 0.6, custom: 1.5, hook: 0.5, inner_grad: 0.4, new_leaf: 0.3, stop: 1}
__all__ = ["BLOCKS", "STEPS", "attempt"]
