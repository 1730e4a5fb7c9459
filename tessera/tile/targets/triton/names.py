"""Names and expressions in emitted Python: no two things share a name, and an index expression reads as one."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable

from tessera.tile.dialect.index import Index, Name, Quotient

_TAKEN = {
    "tl",
    "triton",
    "libdevice",
    "pid",
    "range",
    "float",
    "grid",
    "launch",
    "descriptors",
    "True",
    "False",
    "None",
}


class Namer:
    def __init__(self) -> None:
        self.taken = set(_TAKEN)

    def fresh(self, wanted: str) -> str:
        """`wanted`, made an identifier and changed if something has it already."""
        base = re.sub(r"\W", "_", wanted) or "x"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"x_{base}"
        text, turn = base, 1
        while text in self.taken:
            turn += 1
            text = f"{base}_{turn}"
        self.taken.add(text)
        return text

    def release(self, names: Iterable[str]) -> None:
        """These may be used again: what had them is gone."""
        self.taken -= set(names)


def _never(name: str) -> bool:
    return False


def render(
    expr: Index,
    look: Callable[[str], str],
    late: Callable[[str], bool] = _never,
    rank: Callable[[str], int] | None = None,
) -> str:
    """An index expression as Python.

    Factors for which `late` holds (sizes) come after the others: positions may be wider integers than sizes are, and
    a product is as wide as what it starts with. Terms go by the `rank` of their names: what varies least comes first.
    """
    parts: list[str] = []
    terms = expr.terms
    if rank is not None:
        terms = tuple(sorted(terms, key=lambda t: max((rank(n) for n in Index((t,)).names()), default=0)))
    for product, factor in terms:
        atoms = sorted(product, key=lambda a: isinstance(a, Name) and late(a.name))
        factors = [_atom(a, look, late) for a in atoms]
        if abs(factor) != 1 or not factors:
            factors.append(str(abs(factor)))
        text = " * ".join(factors)
        if parts:
            parts.append((" - " if factor < 0 else " + ") + text)
        else:
            parts.append(("-" if factor < 0 else "") + text)
    return "".join(parts) or "0"


def _atom(atom: Name | Quotient, look: Callable[[str], str], late: Callable[[str], bool]) -> str:
    if isinstance(atom, Name):
        return look(atom.name)
    return f"({grouped(atom.left, look, late)} {atom.kind} {grouped(atom.right, look, late)})"


def grouped(expr: Index, look: Callable[[str], str], late: Callable[[str], bool] = _never) -> str:
    """The same, in parentheses unless it is one name or number."""
    text = render(expr, look, late)
    return text if re.fullmatch(r"\w+", text) else f"({text})"
