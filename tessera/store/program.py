"""Final programs and what joins them, to the cache on disk and back.

`save` writes the last traces of a compilation, the kernels of their regions as their executors save them, and what
else its caller hands over as data. `load` gives traces that run: every claimed operator is made again by its executor.
Anything that does not fit (another version, an operator or object file that is gone) is the same as nothing stored.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from tessera.executors.base import Executor
from tessera.executors.serial import Claimed, Claims
from tessera.frontends.captured import Aliased
from tessera.ir.serial import VERSION, Reader, Writer
from tessera.ir.trace import Trace
from tessera.runtime.autograd import Bridge
from tessera.runtime.call import Layout
from tessera.store.key import Key, facts_of, write_aliased
from tessera.util import disk as cache
from tessera.util.errors import Unserial

KIND, NOTE = "program", "program_note"
COUNTS = {"stored": 0, "loaded": 0}  # in this process, for tests and for whoever wonders
# What may go wrong with something that is stored: it is compiled anew then.
FAULTS = (Unserial, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OSError, zlib.error)


@dataclass(frozen=True)
class Part:
    """One program of a compilation."""

    name: str
    trace: Trace
    boxed: bool


@dataclass(frozen=True)
class Stored:
    parts: tuple[Part, ...]
    details: dict
    reader: Reader


def save(
    key: Key, executors: Iterable[str | Executor], parts: Sequence[Part], details: Callable[[Writer], dict]
) -> None:
    if facts_of(key.sizes) != key.facts:
        raise Unserial("compiling it found out something about its symbolic sizes, which guards must check")
    claimed = Claimed(executors)
    writer = Writer(key.places, key.held, claimed)
    programs = [[p.name, writer.trace(p.trace), p.boxed] for p in parts]
    data = {"version": VERSION, "programs": programs, "details": details(writer)}
    text = json.dumps({**data, "kernels": claimed.kernels, "tables": writer.tables()}, separators=(",", ":"))
    if not cache.store(KIND, key.text, zlib.compress(text.encode(), 1)):
        raise Unserial(f"{cache.folder()} cannot be written")
    COUNTS["stored"] += 1


def load(key: Key, executors: Iterable[str | Executor]) -> Stored | None:
    """What was stored, or None; raises one of `FAULTS` where it does not fit."""
    data = cache.load(KIND, key.text)
    return None if data is None else _read(json.loads(zlib.decompress(data)), key, executors)


def _read(data: dict, key: Key, executors: Iterable[str | Executor]) -> Stored:
    if data["version"] != VERSION:
        raise Unserial(f"expected version {VERSION}, got {data['version']}")
    reader = Reader(data["tables"], key.places, key.held, key.sizes, Claims(executors, data["kernels"]))
    parts = tuple(Part(name, reader.trace(number), boxed) for name, number, boxed in data["programs"])
    return Stored(parts, data["details"], reader)


# --- what is found out on the way ---


def save_note(key: Key, note: list[int]) -> None:
    cache.store(NOTE, key.text, json.dumps(note).encode())


def load_note(key: Key) -> list[int] | None:
    data = cache.load(NOTE, key.text)
    return None if data is None else json.loads(data)


# --- what stands around programs ---


def write_layout(layout: Layout, writer: Writer) -> dict:
    def part(p: object) -> list:
        if isinstance(p, int):
            return ["result", p]
        if isinstance(p, Aliased):
            return ["alias", write_aliased(p, writer)]
        assert isinstance(p, tuple)
        return ["constant", writer.arg(p[1])]

    fields = ("write_back", "written", "counted", "fixed", "viewed")
    placed = [[position, write_aliased(alias, writer)] for position, alias in layout.placed]
    plain = {name: getattr(layout, name) for name in fields}
    return {"outputs": [part(p) for p in layout.outputs], "placed": placed, **plain}


def read_layout(data: dict, reader: Reader) -> Layout:
    def part(p: list) -> object:
        kind, what = p
        if kind == "result":
            return what
        if kind == "constant":
            return ("constant", reader.arg(what))
        return _read_aliased(what, reader)

    back = tuple((source, position) for source, position in data["write_back"])
    written, counted, viewed = (tuple(data[name]) for name in ("written", "counted", "viewed"))
    placed = tuple((position, _read_aliased(alias, reader)) for position, alias in data["placed"])
    return Layout(tuple(map(part, data["outputs"])), back, written, counted, data["fixed"], placed, viewed)


def _read_aliased(data: list, reader: Reader) -> Aliased:
    source, of_output, steps, same = data
    made = tuple((*map(reader.arg, (op, args, kwargs)), index, off) for op, args, kwargs, index, off in steps)
    return Aliased(source, made, of_output, same)  # type: ignore[arg-type]


def write_bridge(bridge: Bridge | None) -> dict | None:
    return None if bridge is None else asdict(bridge)


def read_bridge(data: dict | None) -> Bridge | None:
    return None if data is None else Bridge(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
