"""Pages that say the same but for some numbers and words share one text, which has holes for these.

`{59+n}` is 59 on the core whose page is written out, and 61 on one whose line says `n+2`. `{u=east}` is east, or what
a line says behind `u=`. `{@0,0>0,1}` moves with the core: two rows further down it is 2,0>2,1. Printing: from the pages
of some cores, the text that they share, and the values of each core. Reading: a line with its holes filled.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tessera.machines.spatial import Core
from tessera.spatial.listing.expression import Unread

LONGEST_LINE = 20_000
LONGEST_WORD = 1_000
MOST_SHARED = 1 << 28  # characters that are read of shared pages, for all cores together
_CORE = "[0-9]+(?::[0-9]+)?,[0-9]+"
_UNIT = "(?:north|east|south|west|chip[0-9]+)"
# What may differ: units of links, addresses, numbers, cores and routes. Columns are apart by tabs.
_TOKEN = re.compile(
    rf"((?<=\t){_UNIT}(?:\+{_UNIT})*(?=\t)|0x[0-9a-f]+|[0-9]+(?:(?::[0-9]+)?,[0-9]+(?:>{_CORE})*)?)", re.ASCII
)
_NUMBER = re.compile("0|[1-9][0-9]{0,14}")
_NAME = "[a-z][0-9]{0,4}"
_WORD = rf"[^\s{{}}#=]{{1,{LONGEST_WORD}}}"
_PLACE = "(?:[0-9]{1,6}:)?[0-9]{1,6},[0-9]{1,6}"
_ROUTE = re.compile(f"{_PLACE}(?:>{_PLACE})*")
HOLES = re.compile(rf"(\{{(?:[0-9]{{1,15}}\+{_NAME}|{_NAME}={_WORD}|@{_ROUTE.pattern})\}})")
_VALUE = re.compile(rf" +({_NAME})([+-][0-9]{{1,15}}|={_WORD})")
VALUES = rf"(?: +{_NAME}(?:[+-][0-9]{{1,15}}|={_WORD}))*"  # what a core's line says behind the other core
_HERE = Core(0, 0, 0)
_KINDS = "tnaur"  # a time, a number, an address, a unit, a route


def alike(pages: Mapping[int, str]) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Which pages could share their text, two or more, and their pieces: what may differ is every second one."""
    found: dict[str, tuple[list[int], list[list[str]]]] = {}
    for number, page in pages.items() if len(pages) > 1 else ():
        pieces = _TOKEN.split(page)
        numbers, group = found.setdefault("\0".join(pieces[::2]), ([], []))
        numbers.append(number)
        group.append(pieces)
    return ((numbers, group) for numbers, group in found.values() if len(numbers) > 1)


def _apart(route: str, core: Core) -> Iterator[Core]:
    """How many chips, rows and columns the cores of a route are from another one."""
    for of in route.split(">"):
        chip, _, place = of.rpartition(":")
        row, _, column = place.partition(",")
        yield Core(int(chip or 0) - core.chip, int(row) - core.row, int(column) - core.column)


def shared(group: Sequence[Sequence[str]], cores: Sequence[Core]) -> tuple[str, list[str]] | None:
    """The text of pages that are alike, with holes, and the values of each but the first; None if they are too long."""
    names: dict[tuple, str] = {}
    counts: Counter[str] = Counter()
    longest = 0
    text = list(group[0])
    for at in range(1, len(text), 2):
        column = [pieces[at] for pieces in group]
        if column.count(first := column[0]) == len(column):
            continue
        kind = _kind(text[at - 1], first, text[at + 1])
        if kind == "r" and _ROUTE.fullmatch(first):
            near = list(_apart(first, cores[0]))
            if all(list(_apart(of, core)) == near for of, core in zip(column, cores, strict=True)):
                text[at] = f"{{@{first}}}"
                continue
        longest = max(longest, *map(len, column))
        counted = all(map(_NUMBER.fullmatch, column))
        key = (kind, *((int(of) - int(first) for of in column) if counted else column))
        if (name := names.get(key)) is None:
            counts[kind] += 1
            name = names[key] = kind if counts[kind] == 1 else f"{kind}{counts[kind]}"
        text[at] = f"{{{first}+{name}}}" if counted else f"{{{name}={first}}}"
    if longest > LONGEST_WORD or max(counts.values(), default=0) > 9999:
        return None
    ordered = sorted(names.items(), key=lambda item: _KINDS.index(item[1][0]))
    return "".join(text), [" ".join(_values(ordered, number)) for number in range(2, len(group) + 1)]


def _kind(before: str, token: str, behind: str) -> str:
    if before.endswith(("@", "..")) or behind.startswith(".."):
        return "t"
    return "r" if "," in token else "u" if token[0].isalpha() else "a" if token.startswith("0x") else "n"


def _values(names: Sequence[tuple[tuple, str]], number: int) -> Iterator[str]:
    """Of a core, where they are others than the first one's."""
    for key, name in names:
        if (value := key[number]) != key[1]:
            yield f"{name}{value:+}" if isinstance(value, int) else f"{name}={value}"


@functools.lru_cache(1 << 14)
def _hole(text: str) -> tuple[int | None, str, str]:
    """The number of a hole or None, its name or none, and its word."""
    if text[1] == "@":
        return None, "", text[2:-1]
    if text[1].isalpha():
        name, _, word = text[1:-1].partition("=")
        return None, name, word
    number, _, name = text[1:-1].partition("+")
    return int(number), name, ""


class Filling(dict[str, str]):
    """What stands in each hole of a page, on a core whose line says `told`; `left` are values that found no hole.

    `back` is how far the core whose page is written out is from this one."""

    def __init__(self, told: str = "", back: Core = _HERE) -> None:
        super().__init__()
        found = _VALUE.findall(told)
        self.told, self.back = dict(found), back
        self.left = set(self.told)
        if len(self.left) < len(found):
            raise Unread(f"expected one value for each name; got {told.strip()[:100]!r}")

    def __missing__(self, hole: str) -> str:
        number, name, word = _hole(hole)
        told = self.told.get(name)
        if not name:
            cores = list(_apart(word, self.back))
            if min(map(min, cores)) < 0:
                raise Unread(f"expected cores of rows and columns of 0 or more in {hole[:100]}")
            filled = ">".join(map(str, cores))
        elif told is None:
            filled = word if number is None else str(number)
        elif told.startswith("=") != (number is None) or (number is not None and number + int(told) < 0):
            expected = "a word" if number is None else "a number of 0 or more"
            raise Unread(f"expected {expected} in {hole[:100]}; got {name}{told[:100]}")
        else:
            filled = told[1:] if number is None else str(number + int(told))
        self.left.discard(name)
        self[hole] = filled
        return filled

    def line(self, pieces: Sequence[str]) -> str:
        """Of a line, whose holes are every second piece."""
        filled = list(pieces)
        filled[1::2] = [self[hole] for hole in filled[1::2]]
        return "".join(filled)
