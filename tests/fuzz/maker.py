"""A program in the making: the statements so far, and the tensors that they would give.

`Maker.take` runs a statement by eager PyTorch as it is added and keeps it if it runs, so that the next steps know the
shapes and types at hand. A step that finds nothing to work on raises `Refused`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from .prelude import NAMES
from .text import Block, Node, render

LARGEST = 150  # elements of a tensor
ERRORS = (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError, AttributeError, ZeroDivisionError)


class Refused(Exception):
    """This step cannot be taken here."""


@dataclass
class Maker:
    rng: random.Random
    kind: str
    scope: dict[str, object] = field(default_factory=lambda: dict(NAMES))
    pool: list[str] = field(default_factory=list)  # expressions that give tensors
    lines: list[Node] = field(default_factory=list)  # of the block that is being filled
    count: int = 0
    depth: int = 0

    # --- choosing ---

    def value(self, name: str) -> Tensor:
        found = eval(name, self.scope)  # noqa: S307
        if not isinstance(found, Tensor):
            raise Refused
        return found

    def any(self, test: Callable[[Tensor], bool] = lambda x: True) -> str:
        """Some tensor, rather a new one than an old one."""
        fitting = [n for n in self.pool if test(self.value(n))]
        if not fitting:
            raise Refused
        return self.rng.choices(fitting, [2 + i for i in range(len(fitting))])[0]

    def float(self, rank: int = 0) -> str:
        return self.any(lambda x: x.is_floating_point() and x.ndim >= rank)

    def beside(self, name: str, test: Callable[[Tensor], bool] = lambda x: True) -> str:
        """A tensor that can be expanded to the shape of another."""
        shape = self.value(name).shape

        def fits(x: Tensor) -> bool:
            pairs = zip(reversed(x.shape), reversed(shape), strict=False)
            return x.ndim <= len(shape) and all(m in (n, 1) for m, n in pairs) and test(x)

        return self.any(fits)

    def same(self, name: str) -> str:
        a = self.value(name)
        return self.any(lambda x: x.shape == a.shape and x.dtype == a.dtype)

    def dim(self, name: str, least: int = 0) -> int:
        shape = self.value(name).shape
        fitting = [d for d, n in enumerate(shape) if n >= least]
        if not fitting:
            raise Refused
        d = self.rng.choice(fitting)
        return d - len(shape) if self.rng.random() < 0.3 else d

    def number(self) -> float | int:
        return self.rng.choice([2, 3, 0.5, -1.5, 0.25, -1, 0.0, -0.0])

    def seed(self) -> int:
        return self.rng.randrange(1000)

    def places(self, size: int, count: int) -> str:
        """An index along a dimension of this size."""
        return f"torch.tensor({[self.rng.randrange(max(size, 1)) for _ in range(count)]})"

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    # --- taking steps ---

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def assign(self, expression: str) -> str:
        """A statement that names this expression."""
        name = self.new()
        self.take(f"{name} = {expression}", name)
        return name

    def take(self, line: Node, *names: str) -> None:
        """Run a statement and keep it; `names` are what it gives."""
        try:
            exec(render([line]), self.scope)
            for name in names:
                made = eval(name, self.scope)  # noqa: S307
                if not isinstance(made, Tensor) or made.numel() > LARGEST or made.ndim > 4:
                    raise Refused
        except ERRORS as error:
            raise Refused from error
        self.lines.append(line)
        self.pool += [n for n in names if n not in self.pool]

    @contextmanager
    def block(self, head: str, inside: object = None) -> Iterator[None]:
        """What is taken meanwhile stands under `head`, in the context `inside`; names may end with it."""
        outer, known = self.lines, list(self.pool)
        made = Block(head)
        self.lines, self.depth = made.body, self.depth + 1
        try:
            if inside is None:
                yield
            else:
                with inside:  # type: ignore[attr-defined]
                    yield
        finally:
            self.lines, self.depth = outer, self.depth - 1
        if made.body:
            outer.append(made)
        if head.startswith(("if", "else", "for", "while", "def")):
            self.pool = [n for n in self.pool if n in known]


Step = Callable[[Maker], None]


def attempt(m: Maker, step: Step) -> bool:
    """Take a step, if it can be taken. Of some views eager refuses to tell anything once their base was written."""
    try:
        step(m)
    except (Refused, RuntimeError):
        return False
    return True
