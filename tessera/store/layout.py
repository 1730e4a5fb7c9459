"""How a caller's outputs line up with a program's, as data and back."""

from __future__ import annotations

from tessera.ir.aliased import Aliased
from tessera.ir.serial import Reader, Writer
from tessera.runtime.call import Layout


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
        return read_aliased(what, reader)

    back = tuple((source, position) for source, position in data["write_back"])
    written, counted, viewed = (tuple(data[name]) for name in ("written", "counted", "viewed"))
    placed = tuple((position, read_aliased(alias, reader)) for position, alias in data["placed"])
    return Layout(tuple(map(part, data["outputs"])), back, written, counted, data["fixed"], placed, viewed)


def read_aliased(data: list, reader: Reader) -> Aliased:
    source, of_output, steps, shared = data
    views = tuple((*map(reader.arg, (op, args, kwargs)), index, off) for op, args, kwargs, index, off in steps)
    if isinstance(shared, int):  # as it was written once: the whole object
        shared = shared, len(views)
    return Aliased(source, views, of_output, None if shared is None else tuple(shared))  # type: ignore[arg-type]


def write_aliased(alias: Aliased, writer: Writer) -> list:
    steps = [[*map(writer.arg, (op, args, kwargs)), index, off] for op, args, kwargs, index, off in alias.steps]
    return [alias.source, alias.of_output, steps, alias.shared]
