"""What emitted text is made of: tiles with named dimensions, index arithmetic, and lines with what goes before them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tile:
    """An expression for a tile and the axes of its dimensions, in order."""

    text: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """A matrix product: (m, k) by (k, n), the empty accumulator, and how (m, n) becomes a tile of these axes."""

    left: str
    right: str
    start: str
    axes: tuple[str, ...]
    whole: str

    def step(self, accumulator: str) -> str:
        return f"ct.mma({self.left}, {self.right}, {accumulator})"


@dataclass
class Text:
    """Python text under construction by the operators an `Index` needs."""

    text: str
    level: int = 0  # 0: binds tightest, 1: a product, 2: a sum

    def _at(self, level: int) -> str:
        return self.text if self.level <= level else f"({self.text})"

    def __add__(self, other: Text) -> Text:
        return Text(f"{self._at(2)} + {other._at(1)}", 2)

    def __mul__(self, other: Text) -> Text:
        return Text(f"{self._at(1)} * {other._at(0)}", 1)

    def __floordiv__(self, other: Text) -> Text:
        return Text(f"{self._at(1)} // {other._at(0)}", 1)

    def __mod__(self, other: Text) -> Text:
        return Text(f"{self._at(1)} % {other._at(0)}", 1)


@dataclass
class Scope:
    """Lines of one indentation; `head` is filled with what the body turns out to need."""

    indent: int
    head: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [" " * self.indent + line if line else line for line in (*self.head, *self.body)]
