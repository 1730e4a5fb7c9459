"""Final programs and what joins them, to the cache on disk and back.

`save` writes the last traces of a compilation, the kernels of their regions as their executors save them, and what
else its caller hands over as data. `load` gives traces that run: every claimed operator is made again by its executor.
Anything that does not fit (another version, an operator or object file that is gone) is the same as nothing stored.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from tessera.executors.base import Executor
from tessera.executors.serial import Claimed, Claims
from tessera.ir.serial import VERSION, Reader, Writer
from tessera.ir.trace import Trace
from tessera.runtime.autograd import Bridge
from tessera.store.key import Key, facts_of
from tessera.store.layout import read_aliased, write_aliased
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


def save_note(key: Key, note: list) -> None:
    cache.store(NOTE, key.text, json.dumps(note).encode())


def load_note(key: Key) -> list | None:
    data = cache.load(NOTE, key.text)
    return None if data is None else json.loads(data)


# --- what stands around programs ---


def write_bridge(bridge: Bridge | None, writer: Writer) -> dict | None:
    if bridge is None:
        return None
    return asdict(replace(bridge, views=())) | {"views": [write_aliased(view, writer) for view in bridge.views]}


def read_bridge(data: dict | None, reader: Reader) -> Bridge | None:
    if data is None:
        return None
    data = data | {"views": [read_aliased(view, reader) for view in data["views"]]}
    return Bridge(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
