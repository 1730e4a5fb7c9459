"""What a random program is, when a result of it is right, and how one is made step by step.

`Program` is the text of a function with its inputs. `wrong` judges a result against eager PyTorch and float64. `Maker`
holds a program in the making: values at hand, and `take`, which tries a step and keeps it if it is sound.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
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
DYNAMIC = 6  # a size that may change; no other dimension has it
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
    grown: int = 0  # what the size that may change is then

    @property
    def woven(self) -> bool:
        """Most of its steps move data."""
        return "woven" in self.families

    @property
    def empty(self) -> bool:
        """Some input has no elements: there is nothing to compile."""
        return "empty" in self.families

    @property
    def coarse(self) -> bool:
        """Some numbers have fewer bits than 64, whatever they are turned into later."""
        given = any(x.dtype in TOLERANCE and x.dtype != torch.float64 for x in self.inputs)
        return given or re.search(r"\b(f32|f16|bf16)\b", self.text) is not None

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


def wrong(got: Tensor, eager: Tensor, reference: Tensor, coarse: bool = False) -> str:
    """What is wrong with a result, in words; empty if nothing is.

    Integers and truth values must be eager's own. A float may be as far from the reference as its dtype is coarse, in
    a `coarse` program as float32 at least, or a few times as far as eager is.
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
    grain = max(TOLERANCE[got.dtype], TOLERANCE[torch.float32] if coarse else 0.0)
    limit = grain * (1 + want.abs()) + 8 * (usual.max() if usual.numel() else 0)
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
    then: str = ""  # a second step of its result, which it calls {0}


class Refused(Exception):
    """This step cannot be taken here."""


@dataclass
class Maker:
    rng: random.Random
    pool: list[Known] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    newest: float = 0.0  # how often a step goes on with the newest value that fits

    # --- choosing ---

    def any(self, test: Callable[[Known], bool] = lambda k: True) -> Known:
        """Some value, rather a new one than an old one."""
        fitting = [k for k in self.pool if test(k)]
        if not fitting:
            raise Refused
        if self.newest and self.rng.random() < self.newest:
            return fitting[-1]
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
        if step.then:
            self.take(family, Step(step.then.format(name)))
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
