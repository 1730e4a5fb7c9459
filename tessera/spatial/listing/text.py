"""Listings printed. In: a `Listing`. Out: its text, in columns; `parse.parse` gives the same listing again.

Pages that are alike share their text where that makes the listing shorter (`shared.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tessera.machines.spatial.schema import INFIX
from tessera.spatial.listing.host import call_text
from tessera.spatial.listing.shared import LONGEST_LINE, MOST_SHARED, alike, shared
from tessera.spatial.listing.types import (
    Action,
    Buffer,
    Call,
    Copy,
    CorePage,
    Dram,
    Expression,
    FromHost,
    Hosted,
    Index,
    Instruction,
    Listing,
    Load,
    Product,
    Recv,
    Ref,
    Send,
    Span,
    Store,
    ToHost,
    Tree,
)

HEAD = "tessera spatial listing 1"
NO_PORT = "-"  # of what touches no memory of the core
_NUMBERED = re.compile(r":\d+$")
_LEVEL = {"add": 2, "sub": 2, "mul": 3, "div": 3}  # comparisons are 1


def print_listing(listing: Listing, share: bool = True) -> str:
    """With `share=False` every core has a page written out."""
    lines = [HEAD, f"machine {listing.machine} {listing.sha256}"]
    lines += [f"input   {name} {of}" for name, of in listing.inputs]
    lines += [f"output  {name} {of}" for name, of in listing.outputs]
    lines += [f"host    {name} {of}" for name, of in listing.hosted]
    lines += [f"dram    {_dram(of)}" for of in listing.drams]
    pages = _pages(listing.pages) if share else list(map(print_page, listing.pages))
    for before, page in zip(["\n", *pages], pages, strict=False):
        lines += [page] if "\n" not in before + page else ["", page]
    return "\n".join([*lines, f"end {listing.end}{every_text(listing.every)}", ""])


def _pages(pages: Sequence[CorePage]) -> list[str]:
    """The text of each; of one that shares the text of another, a line."""
    rows = [_rows(page) for page in pages]
    texts = [_text(page, of) for page, of in zip(pages, rows, strict=True)]
    kinds: dict[tuple, list[int]] = {}  # only pages of the same kind can be alike
    for number, page in enumerate(pages):
        kinds.setdefault((len(page.buffers), *(type(of.action) for of in page.instructions)), []).append(number)
    left = MOST_SHARED
    for kind in kinds.values():
        for numbers, group in alike({number: "\n".join(map("\t".join, rows[number])) for number in kind}):
            together = _shared([pages[number] for number in numbers], group)
            plain = sum(len(texts[number]) for number in numbers)
            much = plain + sum(len(together[0]) for _ in together)  # at most what is read for it
            if together and sum(map(len, together)) < plain and much <= left:
                left -= much
                for number, text in zip(numbers, together, strict=True):
                    texts[number] = text
    return texts


def _shared(pages: Sequence[CorePage], group: Sequence[Sequence[str]]) -> list[str]:
    """The page of the first core, and a line for each other one; nothing where a line is too long."""
    if (found := shared(group, [page.core for page in pages])) is None:
        return []
    body, values = found
    first, *others = pages
    texts = [_text(first, [row.split("\t") for row in body.split("\n")])]
    for page, of in zip(others, values, strict=True):
        note = "" if page.note == first.note else f"  # {page.note}"
        texts.append(f"core {page.core} as {first.core}  {of}".rstrip() + note)
    return texts if max(len(line) for text in texts for line in text.split("\n")) <= LONGEST_LINE else []


def every_text(every: int | None) -> str:
    return "" if every is None else f" every {every}"


def print_page(page: CorePage) -> str:
    return _text(page, _rows(page))


def _rows(page: CorePage) -> list[Sequence[str]]:
    return [*map(_buffer, page.buffers), *map(_instruction, page.instructions)]


def _text(page: CorePage, rows: Sequence[Sequence[str]]) -> str:
    note = f"  # {page.note}" if page.note else ""
    sram = [f"  sram  {line}" for line in _columns(rows[: len(page.buffers)])]
    return "\n".join([f"core {page.core}{note}", *sram, *(f"  {line}" for line in _columns(rows[len(page.buffers) :]))])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip() for row in rows
    ]


def _buffer(buffer: Buffer) -> tuple[str, ...]:
    alive = "always" if buffer.lifetime is None else f"{buffer.lifetime[0]}..{buffer.lifetime[1]}"
    alive += f" turns {buffer.turns}" if buffer.turns > 1 else ""
    return (
        buffer.name,
        str(buffer.type),
        f"0x{buffer.address:04x} +{buffer.size}",
        alive + _data(buffer.state, buffer.source),
    )


def _dram(of: Dram) -> str:
    return f"{of.name}  {of.type}  chip {of.chip}{_data(of.state, of.source)}"


def _data(state: bool, source: Ref | None) -> str:
    return (" state" if state else "") + (f" = {ref_text(source)}" if source else "")


def _instruction(of: Instruction) -> tuple[str, ...]:
    took = f"{of.times} × {of.duration // of.times}" if of.times > 1 else str(of.duration)
    routes = " ".join(">".join(map(str, route)) for route in of.routes)
    names = " ".join([*of.ports, *(["link", routes] if routes else [])]) or NO_PORT
    last = _word(of.source) if _NUMBERED.search(of.source) else ""
    return f"@{of.start}", "+".join(of.units), action_text(of.action), took, names, _word(of.module), last


@functools.lru_cache(1 << 12)
def _word(text: str) -> str:
    return re.sub(r"[\s#{}\0]+", "_", text)


def action_text(action: Action) -> str:
    match action:
        case Product(y, x, w, add):
            return f"{ref_text(y)} {'+=' if add else '='} {ref_text(x)} · {ref_text(w)}"
        case Expression(y, tree):
            return f"{ref_text(y)} = {tree_text(tree)}"
        case Copy(y, x):
            return f"{ref_text(y)} = {ref_text(x)}"
        case Send(x, targets):
            return f"send {ref_text(x)} to {' '.join(map(str, targets))}"
        case Recv(y, source, add):
            return f"recv {ref_text(y)} {'+= ' if add else ''}from {source}"
        case FromHost(y, place):
            return f"recv {ref_text(y)} from host.{ref_text(place)}"
        case ToHost(x, place):
            return f"send {ref_text(x)} to host.{ref_text(place)}"
        case Load(y, place):
            return f"load {ref_text(y)} from dram.{ref_text(place)}"
        case Store(x, place):
            return f"store {ref_text(x)} to dram.{ref_text(place)}"
        case Hosted():
            return call_text(action)


def ref_text(ref: Ref) -> str:
    index = f"[{', '.join(map(_index, ref.index))}]" if ref.index else ""
    return f"{ref.name}{index}{'^T' if ref.transposed else ''}"


def _index(index: Index) -> str:
    match index:
        case None:
            return ":"
        case Span(start, stop, step):
            return f"{start}:{stop}" + (f":{step}" if step != 1 else "")
    return str(index)


def tree_text(tree: Tree, level: int = 0) -> str:
    match tree:
        case Call("neg", (operand,)):
            return f"neg({tree_text(operand)})"
        case Call(name, (left, right)) if name in INFIX:
            mine = _LEVEL.get(name, 1)
            # Sums and products group to the left; comparisons do not group.
            text = f"{tree_text(left, mine if mine > 1 else 2)} {INFIX[name]} {tree_text(right, mine + 1)}"
            return f"({text})" if mine < level else text
        case Call(name, operands):
            return f"{name}({', '.join(map(tree_text, operands))})"
        case Ref():
            return ref_text(tree)
    return repr(tree)
