"""The arguments of a program: how each is made, as text over sizes that a later call may change."""

from __future__ import annotations

import random
from dataclasses import dataclass

SHAPES = ["{A}, {B}"] * 6 + ["{B}", "{B}", "", "{B}, {B}", "{A}, {C}, {B}", "{A}", "{B}, {A}"]
LAYOUTS = ["t({B}, {A}, seed={s}).t()", "t({A}, 2 * {B}, seed={s})[:, ::2]", "t({B}, seed={s}).expand({A}, {B})"]
ALIASES = ["x0", "x0.detach()", "x0[0]", "x0.view_as(x0)", "x0.t()", "x0[1:]", "x0.flatten()"]


@dataclass(frozen=True)
class Input:
    """A line that makes an argument, in which sizes and the seed stand open."""

    name: str
    form: str

    def line(self, sizes: dict[str, int], seed: int) -> str:
        return f"{self.name} = {self.form.format(**sizes, s=seed)}"


def sizes(rng: random.Random) -> dict[str, int]:
    return {"A": rng.choice([2, 3, 3, 4]), "B": rng.choice([2, 3, 4]), "C": rng.choice([1, 2, 3])}


def plain(rng: random.Random, name: str, grad: float = 0.6, dtypes: bool = True) -> Input:
    shape = rng.choice(SHAPES)
    comma = ", " if shape else ""
    other = rng.choices(["", "f32", "i64", "b", "bf16", "c128"], [30, 2, 2, 2, 0.7, 1])[0] if dtypes else ""
    dtype = f", dtype={other}" if other else ""
    special = ", special=True" if not other and rng.random() < 0.08 else ""
    made = f"t({shape}{comma}seed={{s}}{dtype}{special})"
    if not other and rng.random() < 0.12:
        made = rng.choice(LAYOUTS)
    if other in ("i64", "b") or rng.random() > grad:
        return Input(name, made)
    # A leaf that requires grad cannot be written; the result of an operator, or a view of one, can.
    how = rng.choice([".requires_grad_()"] * 5 + [".requires_grad_() * 1"] * 3 + [".requires_grad_()[:]"])
    if made in LAYOUTS and how.endswith("[:]"):  # eager asks the base of a leaf that is a view itself
        how = ".requires_grad_() * 1"
    return Input(name, made + how)


def arguments(rng: random.Random, aliased: float = 0.2, **options: object) -> list[Input]:
    made = [plain(rng, "x0", **options)]  # type: ignore[arg-type]
    for i in range(1, rng.randint(1, 3)):
        if rng.random() < aliased:
            made.append(Input(f"x{i}", rng.choice(ALIASES)))
        else:
            made.append(plain(rng, f"x{i}", **options))  # type: ignore[arg-type]
    return made
