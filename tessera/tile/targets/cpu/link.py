"""Object files as images that need no linker: positions are resolved here, symbols of the process when they are mapped.

In: an ELF object of ours, for x86-64 or AArch64, with its entry called `entry`. Out: an `Image`. Sections that are
loaded lie behind each other; behind them stand a stub for every function of the process, which jumps to the address in
its second half, and a slot for every object of the process. Unwinding tables are left out: nothing here throws.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tessera.tile.targets.cpu.image import PAGE, SLOT, Image

X86_64, AARCH64 = 62, 183  # ELF's numbers of machines
ALLOCATED, NOBITS, RELA, SYMTAB = 0x2, 8, 4, 2
LEFT_OUT = (".eh_frame",)
STUB = 16
# jmp *[rip + 2] · ldr x16, [pc + 8]; br x16: the address follows at 8
JUMP = {X86_64: bytes.fromhex("ff25020000006690"), AARCH64: bytes.fromhex("5000005800021fd6")}


@dataclass
class _Section:
    name: str
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    at: int | None = None  # its place in the image


@dataclass
class _Linker:
    data: bytes
    machine: int
    sections: list[_Section]
    symbols: list[tuple[str, int, int]]  # name, section, value
    code: bytearray = field(default_factory=bytearray)
    stubs: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)

    def lay_out(self) -> None:
        for section in self.sections:
            if section.flags & ALLOCATED and section.name not in LEFT_OUT:
                self._align(max(section.align, 1))
                section.at = len(self.code)
                end = section.offset + section.size
                self.code += bytes(section.size) if section.kind == NOBITS else self.data[section.offset : end]

    def _align(self, to: int) -> None:
        self.code += bytes(-len(self.code) % to)

    def relocate(self) -> None:
        for section in self.sections:
            home = self.sections[section.info].at if section.kind == RELA else None
            if home is None:
                continue
            for at in range(section.offset, section.offset + section.size, 24):
                offset, info, addend = struct.unpack_from("<QQq", self.data, at)
                apply = RELOCATIONS[self.machine].get(info & 0xFFFFFFFF)
                if apply is None:
                    raise NotImplementedError(f"relocation {info & 0xFFFFFFFF} of ELF machine {self.machine}")
                apply(self, home + offset, info >> 32, addend)

    # --- where things are ---

    def place(self, symbol: int) -> int:
        """Of a symbol in the image; of a function of the process, its stub."""
        name, section, value = self.symbols[symbol]
        if section == 0:
            return self._outside(self.stubs, name, JUMP[self.machine])
        at = self.sections[section].at
        assert at is not None, f"{name} stands in a section that is not loaded"
        return at + value

    def slot(self, symbol: int) -> int:
        """Where the address of an object of the process will stand."""
        name, section, _ = self.symbols[symbol]
        assert section == 0, f"{name} is the image's own"
        return self._outside(self.slots, name, b"")

    def _outside(self, table: dict[str, int], name: str, before: bytes) -> int:
        if name not in table:
            self._align(STUB)
            table[name] = len(self.code)
            self.code += before + bytes(SLOT)
        return table[name]

    # --- writing ---

    def word(self, at: int) -> int:
        return struct.unpack_from("<I", self.code, at)[0]

    def put(self, at: int, number: int, form: str = "<I") -> None:
        struct.pack_into(form, self.code, at, number)


Apply = Callable[[_Linker, int, int, int], None]


def _distance(form: str) -> Apply:
    return lambda link, at, symbol, addend: link.put(at, link.place(symbol) + addend - at, form)


def _slot_distance(link: _Linker, at: int, symbol: int, addend: int) -> None:
    link.put(at, link.slot(symbol) + addend - at, "<i")


def _branch(link: _Linker, at: int, symbol: int, addend: int) -> None:
    steps = (link.place(symbol) + addend - at) >> 2
    link.put(at, link.word(at) & 0xFC000000 | steps & 0x03FFFFFF)


def _pages(link: _Linker, at: int, target: int) -> None:
    pages = target // PAGE - at // PAGE
    link.put(at, link.word(at) & 0x9F00001F | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)


def _low(scale: int) -> Apply:
    def apply(link: _Linker, at: int, symbol: int, addend: int) -> None:
        _put_low(link, at, link.place(symbol) + addend, scale)

    return apply


def _put_low(link: _Linker, at: int, target: int, scale: int) -> None:
    low = target % PAGE
    assert low % scale == 0, "data that is not aligned as its instruction wants it"
    link.put(at, link.word(at) & 0xFFC003FF | low // scale << 10)


RELOCATIONS: dict[int, dict[int, Apply]] = {
    X86_64: {
        2: _distance("<i"),  # PC32
        4: _distance("<i"),  # PLT32
        24: _distance("<q"),  # PC64
        9: _slot_distance,  # GOTPCREL
        41: _slot_distance,  # GOTPCRELX
        42: _slot_distance,  # REX_GOTPCRELX
    },
    AARCH64: {
        260: _distance("<q"),  # PREL64
        261: _distance("<i"),  # PREL32
        275: lambda link, at, symbol, addend: _pages(link, at, link.place(symbol) + addend),  # ADR_PREL_PG_HI21
        277: _low(1),  # ADD_ABS_LO12_NC
        278: _low(1),  # LDST8
        284: _low(2),  # LDST16
        285: _low(4),  # LDST32
        286: _low(8),  # LDST64
        299: _low(16),  # LDST128
        282: _branch,  # JUMP26
        283: _branch,  # CALL26
        311: lambda link, at, symbol, addend: _pages(link, at, link.slot(symbol) + addend),  # ADR_GOT_PAGE
        312: lambda link, at, symbol, addend: _put_low(link, at, link.slot(symbol) + addend, 8),  # LD64_GOT_LO12_NC
    },
}


def image_of(code: bytes, name: str) -> Image:
    """The image of an object file; `NotImplementedError` where it is of another kind than the two known ones."""
    if code[:6] != b"\x7fELF\x02\x01" or (machine := struct.unpack_from("<H", code, 18)[0]) not in RELOCATIONS:
        raise NotImplementedError("images are made of ELF objects for x86-64 and AArch64")
    sections = _sections(code)
    linker = _Linker(code, machine, sections, _symbols(code, sections))
    linker.lay_out()
    linker.relocate()
    entry = next(linker.place(i) for i, (symbol, _, _) in enumerate(linker.symbols) if symbol == "entry")
    imports = [(at + len(JUMP[machine]), symbol) for symbol, at in linker.stubs.items()]
    imports += [(at, symbol) for symbol, at in linker.slots.items()]
    return Image(name, bytes(linker.code), entry, tuple(sorted(imports)))


def _sections(code: bytes) -> list[_Section]:
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    texts = heads[names][4]
    return [_Section(_text(code, texts + h[0]), h[1], h[2], h[4], h[5], h[6], h[7], h[8]) for h in heads]


def _symbols(code: bytes, sections: list[_Section]) -> list[tuple[str, int, int]]:
    table = next(s for s in sections if s.kind == SYMTAB)
    texts = sections[table.link].offset
    symbols = []
    for at in range(table.offset, table.offset + table.size, 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", code, at)
        symbols.append((_text(code, texts + name), section, value))
    return symbols


def _text(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()
