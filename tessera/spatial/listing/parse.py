"""Listings read: one regular expression a line.

In: text. Out: a `Listing`, or a `ListingError` with the line and what was expected. What a line does not say in one of
the forms of docs/machine.md is refused; nothing is executed. Equal columns are parsed once: pages repeat themselves.
A page that shares the text of another one is read from that text, its own values in the holes (`shared.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn, TypeVar

from tessera.machines.spatial import Core
from tessera.spatial.listing.expression import NAME, Unread, read_ref, read_tree
from tessera.spatial.listing.host import read_call
from tessera.spatial.listing.shared import HOLES, LONGEST_LINE, MOST_SHARED, VALUES, Filling
from tessera.spatial.listing.text import HEAD, NO_PORT
from tessera.spatial.listing.types import (
    SIZES,
    Action,
    Buffer,
    Copy,
    CorePage,
    Dram,
    Expression,
    FromHost,
    Instruction,
    Listing,
    Load,
    Product,
    Recv,
    Route,
    Send,
    Store,
    TensorType,
    ToHost,
)
from tessera.util.errors import ListingError

LONGEST = 1 << 31  # characters
LARGEST = 10**15  # cycles, bytes, addresses
_T = TypeVar("_T")
_Text = TypeVar("_Text", str, list[str])
_Line = TypeVar("_Line", Buffer, Instruction)

_CELL = r"[^\s#]+(?: [^\s#]+)*"
_INSTRUCTION = re.compile(
    rf"  @([0-9]{{1,15}})  +([a-z0-9+]+)  +({_CELL})  +([0-9]{{1,15}})(?: × ([0-9]{{1,15}}))?"
    rf"  +({_CELL})(?:  +({_CELL}))?(?:  +({_CELL}))? *"
)
_TYPE = r"([a-z0-9_]{1,20})\[([0-9, ]*)\]"
_DATA = rf"( state)?(?: = ({NAME}(?:\[[0-9:, ]*\])?))?"
_SRAM = re.compile(
    rf"  sram  +({NAME})  +{_TYPE}  +0x([0-9a-f]{{1,13}}) \+([0-9]{{1,15}})"
    rf"  +(?:(always)|([0-9]{{1,15}})\.\.([0-9]{{1,15}})(?: turns ([0-9]{{1,6}}))?){_DATA} *"
)
_DRAM = re.compile(rf"dram +({NAME}) +{_TYPE} +chip ([0-9]{{1,6}}){_DATA} *")
_PLACE = re.compile(rf"(input|output|host) +({NAME}) +{_TYPE} *")
_CORE = re.compile(r"(?:([0-9]{1,6}):)?([0-9]{1,6}),([0-9]{1,6})")
_NAMED = r"((?:[0-9]{1,6}:)?[0-9]{1,6},[0-9]{1,6})"
_PAGE = re.compile(rf"core {_NAMED} *(?:# ?(.*))?")
_SHARED = re.compile(rf"core {_NAMED} as {_NAMED}({VALUES}) *(?:# ?(.*))?")
_MACHINE = re.compile(r"machine ([\w.-]{1,100}) ([0-9a-f]{64}) *")
_END = re.compile(r"end ([0-9]{1,15})(?: every ([0-9]{1,15}))? *")
_SEND = re.compile(r"send (.+) to (.+)")
_RECV = re.compile(r"recv (.+?) (\+= )?from (.+)")
_LOAD = re.compile(r"load (.+) from dram\.(.+)")
_STORE = re.compile(r"store (.+) to dram\.(.+)")
_SOURCE = re.compile(r"\S*:[0-9]+")


def parse(text: str) -> Listing:
    return _Parser(text).listing()


class _Parser:
    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise _error(0, "the text of a listing", type(text).__name__)
        if len(text) > LONGEST:
            raise _error(0, f"a listing of at most {LONGEST} characters", f"{len(text)}")
        self.lines = text.split("\n")
        self.actions: dict[tuple[str, str], Action] = {}
        self.names: dict[str, tuple[tuple[str, ...], tuple[Route, ...]]] = {}
        self.units: dict[str, tuple[str, ...]] = {}
        self.types: dict[tuple[str, str], TensorType] = {}
        self.pages: list[CorePage] = []
        self.page: CorePage | None = None  # the one to which lines belong, and these lines
        self.buffers: list[Buffer] = []
        self.steps: list[Instruction] = []
        self.written: dict[Core, CorePage] = {}  # pages that other cores may share
        self.holes = Filling()  # of the page that is read
        self.pieces: dict[int, list[str]] = {}  # of lines with holes, by number
        self.characters = 0  # of lines that were filled, or stand for other cores
        self.number = 0

    def listing(self) -> Listing:
        machine = self.head()
        places: dict[str, list[tuple[str, TensorType]]] = {"input": [], "output": [], "host": []}
        drams: list[Dram] = []
        end: int | None = None
        every: int | None = None
        for number, line in enumerate(self.lines[2:], 3):
            self.number = number
            if len(line) > LONGEST_LINE:
                self.refuse(f"lines of at most {LONGEST_LINE} characters", line)
            if line.startswith("  @"):
                if self.page is None:
                    self.refuse("instructions between a line `core row,column` and `end`", line)
                self.steps.append(self.instruction(line))
            elif not (bare := line.partition("#")[0].rstrip()):
                continue
            elif end is not None:
                self.refuse("nothing after `end`", line)
            elif line.startswith("  sram"):
                if self.page is None or self.steps:
                    self.refuse("buffers between the line `core` and the first instruction", line)
                self.buffers.append(self.buffer(line))
            elif match := _PAGE.fullmatch(line):
                self.close()
                self.page = CorePage(read_core(match[1]), note=match[2] or "", line=number)
            elif match := _SHARED.fullmatch(line):
                self.close()
                self.pages.append(self.shared(*match.groups()))
            elif match := _END.fullmatch(bare):
                self.close()
                end, every = int(match[1]), None if match[2] is None else int(match[2])
            elif self.page or self.pages:
                self.refuse("`core`, `core … as …` and values, `sram`, `@cycle` or `end`", line)
            elif match := _PLACE.fullmatch(bare):
                places[match[1]].append((match[2], self.type(match[3], match[4], least=match[1] == "host")))
            elif match := _DRAM.fullmatch(bare):
                source = self.read(read_ref, match[6]) if match[6] else None
                of = self.type(match[2], match[3])
                drams.append(Dram(match[1], of, int(match[4]), match[5] is not None, source, number))
            else:
                self.refuse("`input`, `output`, `host`, `dram`, `core` or `end`", line)
        if end is None:
            raise _error(len(self.lines), "`end` and the program's duration; the file is cut off", "its end")
        inputs, outputs, hosted = map(tuple, places.values())
        return Listing(*machine, inputs, outputs, tuple(self.pages), end, tuple(drams), hosted, every)

    def head(self) -> tuple[str, str]:
        if self.lines[0].rstrip() != HEAD:
            raise _error(1, f"`{HEAD}`", self.lines[0])
        second = self.lines[1].partition("#")[0].rstrip() if len(self.lines) > 1 else ""
        if (match := _MACHINE.fullmatch(second)) is None:
            raise _error(2, "`machine`, its name and the SHA-256 of its file", second)
        return match[1], match[2]

    def close(self) -> None:
        """Put what was read into the page that it belongs to."""
        if self.page is not None:
            self.pages.append(replace(self.page, buffers=tuple(self.buffers), instructions=tuple(self.steps)))
            self.written[self.page.core] = self.pages[-1]
        self.page, self.buffers, self.steps = None, [], []

    def shared(self, core: str, other: str, told: str, note: str | None) -> CorePage:
        """The page of a core, from the text of another one's; without a word, its note is that as well."""
        if (first := self.written.get(read_core(other))) is None:
            self.refuse("the page of the other core to be written out before", f"core {core} as {other}")
        back = Core(*(there - here for there, here in zip(first.core, read_core(core), strict=True)))
        number, self.holes = self.number, self.read(lambda told: Filling(told, back), told)
        try:
            buffers = tuple(self.again(first.buffers, self.buffer))
            steps = tuple(self.again(first.instructions, self.instruction))
        except ListingError as error:
            raise ListingError(f"line {number}: core {core} as {other}: {error}") from None
        self.number = number
        if self.holes.left:
            self.refuse(f"values that the page of {other} has holes for", " ".join(sorted(self.holes.left)))
        self.holes = Filling()
        return CorePage(read_core(core), buffers, steps, first.note if note is None else note, number)

    def again(self, lines: tuple[_Line, ...], read: Callable[[str], _Line]) -> Iterator[_Line]:
        """What has no hole is the same on all cores."""
        for of in lines:
            self.number = of.line
            text = self.lines[of.line - 1]
            if "{" in text:
                yield read(text)
            else:
                self.count(text)
                yield of

    def filled(self, line: str) -> str:
        if (pieces := self.pieces.get(self.number)) is None:
            pieces = self.pieces[self.number] = HOLES.split(line)
        text = self.read(self.holes.line, pieces)
        self.count(text)
        return text

    def count(self, text: str) -> None:
        self.characters += len(text)
        if len(text) > LONGEST_LINE or self.characters > MOST_SHARED:
            self.refuse(f"lines of at most {LONGEST_LINE} characters, {MOST_SHARED} on pages that are shared", text)

    def instruction(self, line: str) -> Instruction:
        if "{" in line:
            line = self.filled(line)
        match = _INSTRUCTION.fullmatch(line) or _INSTRUCTION.fullmatch(line.partition("#")[0])
        if match is None:
            self.refuse(
                "columns two spaces apart: @cycle, unit, what it does, duration, ports (module, file:line)", line
            )
        start, units, action, duration, each, names, module, source = match.groups()
        times = 1 if each is None else int(duration)
        took = int(duration) if each is None else times * int(each)
        if not 1 <= took <= LARGEST:
            self.refuse(f"a duration of 1 to {LARGEST} cycles", line)
        if module is not None and source is None and _SOURCE.fullmatch(module):
            module, source = None, module
        if (unit := self.units.get(units)) is None:
            unit = self.units[units] = tuple(units.split("+"))
        if (named := self.names.get(names)) is None:
            named = self.names[names] = self.read(read_names, names)
        kind = unit[0].rstrip("0123456789")
        if (does := self.actions.get((kind, action))) is None:
            does = self.actions[kind, action] = self.read(lambda text: read_action(kind, text), action)
        return Instruction(
            int(start), unit, does, took, named[0], named[1], times, module or "", source or "", self.number
        )

    def buffer(self, line: str) -> Buffer:
        if "{" in line:
            line = self.filled(line)
        if (match := _SRAM.fullmatch(line) or _SRAM.fullmatch(line.partition("#")[0])) is None:
            self.refuse("`sram  name  type[shape]  0xADDRESS +size  from..to` or `always`, ` = tensor[slices]`", line)
        name, dtype, shape, address, size, always, begin, end, turns, state, source = match.groups()
        lifetime = None if always else (int(begin), int(end))
        if lifetime is not None and (state or source):
            self.refuse("`always` for a buffer that is state or holds data before cycle 0", line)
        if lifetime is None and not (state or source):
            self.refuse("` state`, or ` = ` and the tensor whose bytes it holds, after `always`", line)
        of = self.read(read_ref, source) if source else None
        return Buffer(
            name, self.type(dtype, shape), int(address, 16), int(size), lifetime, state is not None, of,
            1 if turns is None else int(turns), self.number,
        )  # fmt: skip

    def type(self, dtype: str, shape: str, least: int = 1) -> TensorType:
        """At least so many bytes: what lies in memory has some, an input may have none."""
        if (known := self.types.get((dtype, shape))) is None:
            if dtype not in SIZES:
                near = difflib.get_close_matches(dtype, SIZES, 1)
                self.refuse(f"a type out of {', '.join(SIZES)}{f'; did you mean {near[0]}?' if near else ''}", dtype)
            sizes = (
                tuple(int(part) for part in shape.split(","))
                if re.fullmatch(r"[0-9]{1,15}(, ?[0-9]{1,15})*", shape)
                else ()
            )
            if (shape and not sizes) or len(sizes) > 8 or TensorType(dtype, sizes).bytes > LARGEST:
                self.refuse(f"at most 8 sizes, {LARGEST} bytes in all", f"[{shape}]"[:100])
            known = self.types[dtype, shape] = TensorType(dtype, sizes)
        if known.bytes < least:
            self.refuse("sizes that are each 1 or more", f"[{shape}]"[:100])
        return known

    def read(self, reader: Callable[[_Text], _T], text: _Text) -> _T:
        try:
            return reader(text)
        except Unread as error:
            raise ListingError(f"line {self.number}: {error}{self.cut_off}") from None

    def refuse(self, expected: str, got: str) -> NoReturn:
        raise ListingError(f"{_error(self.number, expected, got)}{self.cut_off}")

    @property
    def cut_off(self) -> str:
        """What is added of the last line: `end` and a new line stand behind all others."""
        return "; the file is cut off" if self.number == len(self.lines) else ""


def _error(line: int, expected: str, got: str) -> ListingError:
    return ListingError(f"line {line}: expected {expected}; got {got.strip()[:100]!r}")


def read_core(text: str) -> Core:
    if (match := _CORE.fullmatch(text)) is None:
        raise Unread(f"expected a core, row,column or chip:row,column; got {text[:100]!r}")
    return Core(int(match[1] or 0), int(match[2]), int(match[3]))


def read_names(text: str) -> tuple[tuple[str, ...], tuple[Route, ...]]:
    """The ports, and the routes behind `link`."""
    ports, _, routes = f"{text} ".partition("link ")
    names = tuple(ports.split()) if ports.strip() != NO_PORT else ()
    for name in names:
        if not re.fullmatch(r"sram\.[rw][0-9]{1,4}", name):
            raise Unread(f"expected ports, sram.r0 or sram.w0, then `link` and routes; got {name[:100]!r}")
    ways = tuple(tuple(map(read_core, route.split(">"))) for route in routes.split())
    return names, ways


def read_action(kind: str, text: str) -> Action:
    match kind:
        case "matrix":
            target, add, x, w = _split(text, r"(.+?) (\+?=) (.+) · (.+)", "`y = x · w` or `y += x · w`")
            return Product(read_ref(target), read_ref(x), read_ref(w), add == "+=")
        case "vector":
            target, tree = _split(text, r"(.+?) = (.+)", "`y = an expression`")
            return Expression(read_ref(target), read_tree(tree))
        case "copy":
            target, source = _split(text, r"(.+?) = (.+)", "`b = a`, `b = a^T`, `b = table[rows]` or `b[rows] = a`")
            return Copy(read_ref(target), read_ref(source))
        case "dram":
            if match := _LOAD.fullmatch(text):
                return Load(read_ref(match[1]), read_ref(match[2]))
            value, place = _split(text, _STORE.pattern, "`load v from dram.name[…]` or `store v to dram.name[…]`")
            return Store(read_ref(value), read_ref(place))
        case "host":
            if match := re.fullmatch(r"recv (.+) from host\.(.+)", text):
                return FromHost(read_ref(match[1]), read_ref(match[2]))
            value, place = _split(
                text, r"send (.+) to host\.(.+)", "`recv v from host.name[…]` or `send v to host.name[…]`"
            )
            return ToHost(read_ref(value), read_ref(place))
        case "call":
            return read_call(text)
        case "north" | "east" | "south" | "west" | "chip":
            if match := _SEND.fullmatch(text):
                return Send(read_ref(match[1]), tuple(map(read_core, match[2].split())))
            target, add, source = _split(text, _RECV.pattern, "`send v to core` or `recv v from core`")
            return Recv(read_ref(target), read_core(source), add is not None)
    known = "matrix, vector, copy0, north, east, south, west, chip0, dram, host, call"
    raise Unread(f"expected a unit out of {known}; got {kind!r}")


def _split(text: str, pattern: str, expected: str) -> tuple[str, ...]:
    if (match := re.fullmatch(pattern, text)) is None:
        raise Unread(f"expected {expected}; got {text[:100]!r}")
    return match.groups()
