"""A random program from a seed: a function or a module, and a scenario of calls, gradients and changes of state.

`make(seed, kind)` gives a `Program`, whose text defines `scenario()`. It names `compiled`, `see` and `T`, which the
runner provides: eager PyTorch's and Tessera's.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass

import torch

from . import modules, steps_math, steps_modes, steps_views, steps_writes
from .inputs import Input, arguments, sizes
from .maker import Maker, Refused, attempt
from .scenarios import scenario
from .text import Block, Node, render

KINDS = {"jit": 38, "tile": 10, "backend": 7, "functional": 30, "transform": 10, "train": 5}
OPTIONAL = ("second", "between")  # kinds that are run only when they are named


@dataclass(frozen=True)
class Program:
    seed: int
    kind: str
    nodes: list[Node]

    @property
    def text(self) -> str:
        return render(self.nodes)


def kind_of(seed: int) -> str:
    return random.Random(f"kind {seed}").choices(list(KINDS), list(KINDS.values()))[0]


def make(seed: int, kind: str) -> Program:
    rng = random.Random(f"{kind} {seed}")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        while True:
            nodes = _draft(rng, kind)
            if nodes is not None:
                return Program(seed, kind, nodes)


def _draft(rng: random.Random, kind: str) -> list[Node] | None:
    m = Maker(rng, kind)
    module = kind == "train" or kind != "transform" and rng.random() < (0.15 if kind == "functional" else 0.4)
    given, dims = _arguments(m, kind), sizes(rng)
    flag = rng.random() < 0.3 and kind not in ("transform", "train")
    init: list[Node] = []
    if module:
        init = list(modules.held(m, dims))
        exec(render([_class(init, [], [])]), m.scope)
        m.scope["self"] = m.scope["M"]()  # type: ignore[operator]
    for x in given:
        try:
            exec(x.line(dims, rng.randrange(1000)), m.scope)
        except (RuntimeError, IndexError, AttributeError):
            return None
    m.pool += [x.name for x in given]
    if flag:
        m.scope["flag"] = True
    _fill(m, kind)
    names = [x.name for x in given] + ["flag"] * flag
    body = [*m.lines, f"return {_result(m, kind)}"]
    if module:
        program: Node = _class(init, names, body)
    else:
        program = Block(f"def program({', '.join(names)}):", body)
    return [program, Block("def scenario():", scenario(m, kind, given, dims, module, flag))]


def _arguments(m: Maker, kind: str) -> list[Input]:
    if kind in ("transform", "train"):
        return arguments(m.rng, aliased=0.0, grad=0.0, dtypes=False)
    return arguments(m.rng, aliased=0.05 if kind == "functional" else 0.2)


def _class(init: list[Node], names: list[str], body: list[Node]) -> Block:
    forward = Block(f"def forward({', '.join(['self', *names])}):", body)
    return Block("class M(nn.Module):", [Block("def __init__(self):", init), forward])


def _families(kind: str) -> dict:
    found = steps_math.STEPS | steps_views.STEPS | steps_writes.STEPS | steps_modes.STEPS | steps_modes.BLOCKS
    found |= modules.STEPS | steps_math.DRAWS
    if kind in ("functional", "transform"):
        for step in (
            steps_modes.hook,
            steps_modes.inner_grad,
            steps_modes.new_leaf,
            modules.attribute,
            steps_views.data,
        ):
            found.pop(step)
    if kind == "transform":
        for step in (steps_math.draw, steps_modes.autocast, steps_writes.shape_in_place):
            found.pop(step)
    return found


def _fill(m: Maker, kind: str) -> None:
    if kind == "transform":  # what a transform is given may not be written
        m.pool = [m.assign(f"{x} * 1") for x in list(m.pool)]
    families = _families(kind)
    steps, weights = list(families), list(families.values())

    def one(m: Maker) -> None:
        for _ in range(12):
            step = m.rng.choices(steps, weights)[0]
            if step in steps_modes.BLOCKS:
                if m.depth >= 2:
                    continue
                done = attempt(m, lambda m, step=step: step(m, one))
            else:
                done = attempt(m, step)
            if done:
                return

    for _ in range(m.rng.randint(3, 9)):
        one(m)


def _result(m: Maker, kind: str) -> str:
    last = m.pool[-4:]
    chosen = [m.rng.choice(last) for _ in range(m.rng.randint(1, 3))] + [m.any() for _ in range(m.rng.randint(0, 2))]
    if kind in ("transform", "train"):
        floating = [n for n in m.pool if m.value(n).is_floating_point()]
        return f"({m.rng.choice(floating[-3:])}, {', '.join(chosen)},)"
    if m.chance(0.1):
        chosen.append(m.rng.choice(["None", "1.5", "'name'", "True"]))
    form = m.rng.choice(["one", "tuple", "tuple", "tuple", "list", "dict"])
    if form == "one":
        return chosen[0]
    if form == "dict":
        return "{" + ", ".join(f"'k{i}': {c}" for i, c in enumerate(chosen)) + "}"
    return f"[{', '.join(chosen)}]" if form == "list" else f"({', '.join(chosen)},)"


__all__ = ["KINDS", "OPTIONAL", "Program", "Refused", "kind_of", "make"]
