"""Programs of tiles as MLIR, and back.

In: `Tiles`. Out: a module, its text, and the same program from either. The text says everything but what held tensors
contain: these are given beside it.
"""

from __future__ import annotations

import os
import re

import torch
from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, Builtin, IntegerAttr, ModuleOp, StringAttr
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError, VerifyException

from tessera.ir.equation import NOWHERE, Source
from tessera.machines.spatial import Core
from tessera.spatial.dialect.ops import (
    AssembleOp,
    ComputeOp,
    GatherOp,
    GiveOp,
    HoldOp,
    LoadOp,
    MultiplyOp,
    ProgramOp,
    ReceiveOp,
    ScatterOp,
    Spatial,
    TileOp,
    TileType,
    read_part,
    read_place,
    tile_type,
)
from tessera.spatial.durations import dtype_name
from tessera.spatial.emit import tree as listing_tree
from tessera.spatial.errors import MapError
from tessera.spatial.graph import Apply, Number, Tree
from tessera.spatial.listing.expression import Unread, read_tree
from tessera.spatial.listing.host import call_text, read_call
from tessera.spatial.listing.parse import read_core
from tessera.spatial.listing.text import tree_text
from tessera.spatial.listing.types import SIZES, Call, Ref
from tessera.spatial.listing.types import Tree as ListingTree
from tessera.spatial.tiles import (
    Assembled,
    Box,
    Called,
    Computed,
    Gathered,
    Given,
    Held,
    Loaded,
    Multiplied,
    Part,
    Received,
    Scattered,
    Tile,
    Tiles,
)

_TENSOR = re.compile(r"(\S+) ([a-z0-9_]+)\[([\d, ]*)\]")
_SOURCE = re.compile(r"(?:(.+):(\d{1,9}) )?(.*)")


def to_module(tiles: Tiles) -> ModuleOp:
    block = Block()
    values: dict[Tile, SSAValue] = {}
    for tile in tiles.tiles:
        op = _operation(tile, values)
        block.add_op(op)
        values[tile] = op.results[0]
    for given in tiles.given:
        properties = {
            "tensor": StringAttr(given.tensor),
            "box": StringAttr(_box(given.box)),
            "parts": _parts([given.part]),
        }
        block.add_op(GiveOp.create(operands=[values[given.part.tile]], properties=properties))
    named: dict[str, Attribute] = {"label": StringAttr(tiles.name)}
    named["inputs"] = ArrayAttr([StringAttr(_tensor(*t)) for t in tiles.inputs])
    named["outputs"] = ArrayAttr([StringAttr(_tensor(*t)) for t in tiles.outputs])
    if tiles.calls:
        named["hosted"] = ArrayAttr([StringAttr(_tensor(*t)) for t in tiles.hosted])
        named["calls"] = ArrayAttr([StringAttr(f"{c.core} {call_text(c.action)}") for c in tiles.calls])
    return ModuleOp([ProgramOp.create(properties=named, regions=[Region(block)])])


def _operation(tile: Tile, values: dict[Tile, SSAValue]) -> Operation:
    parts = list(tile.parts())
    kind = StringAttr(f"{dtype_name(tile.dtype)}[{tile.rows}, {tile.columns}]")
    common: dict[str, Attribute] = {"label": StringAttr(tile.name), "source": StringAttr(_source(tile.source))}
    common |= {"home": StringAttr(tile.home)} if tile.home else {}
    common |= {"batch": IntegerAttr(tile.batch, 64)} if tile.batch else {}
    form = {"operands": [values[p.tile] for p in parts], "result_types": [TileType(kind, StringAttr(str(tile.core)))]}
    match tile:
        case Held() | Received() | Loaded():
            where = {"tensor": StringAttr(tile.tensor), "box": StringAttr(_box(tile.box))}
            if isinstance(tile, Received):
                return ReceiveOp.create(**form, properties=common | where)
            if isinstance(tile, Loaded):
                return LoadOp.create(**form, properties=common | where | {"dram": StringAttr(tile.dram)})
            kind = {"kind": StringAttr("state" if tile.state else "weight")}
            return HoldOp.create(**form, properties=common | where | kind)
        case Assembled():
            places = ArrayAttr([StringAttr(f"{row}, {column}") for _, row, column in tile.moves])
            return AssembleOp.create(**form, properties=common | {"parts": _parts(parts), "places": places})
        case Multiplied():
            return MultiplyOp.create(**form, properties=common | {"parts": _parts(parts)})
        case Computed():
            text = tree_text(listing_tree(tile.tree, [Ref(f"_{i}") for i in range(len(parts))]))
            does = {"parts": _parts(parts), "expression": StringAttr(text)}
            return ComputeOp.create(**form, properties=common | does)
        case Gathered():
            return GatherOp.create(**form, properties=common | {"parts": _parts(parts)})
        case Scattered():
            return ScatterOp.create(**form, properties=common | {"parts": _parts(parts)})
    raise MapError(f"{tile.name}: a {type(tile).__name__} tile has no form in the dialect")


def _box(box: Box, turned: bool = False) -> str:
    return f"[{box[0]}:{box[1]}, {box[2]}:{box[3]}]" + ("^T" if turned else "")


def _parts(parts: list[Part]) -> ArrayAttr[StringAttr]:
    return ArrayAttr([StringAttr(_box(p.box, p.turned)) for p in parts])


def _tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{name} {dtype_name(dtype)}[{', '.join(map(str, shape))}]"


def _source(source: Source) -> str:
    return f"{os.path.basename(source.file)}:{source.line} {source.module}" if source.file else source.module


def _read_source(text: str) -> Source:
    match = _SOURCE.fullmatch(text)
    return Source(match[1] or "", int(match[2] or 0), match[3]) if match else NOWHERE


def to_text(tiles: Tiles) -> str:
    return str(to_module(tiles))


def parse(text: str, tensors: dict[str, torch.Tensor]) -> Tiles:
    """The program that a text says, verified."""
    context = Context()
    context.load_dialect(Builtin)
    context.load_dialect(Spatial)
    try:
        module = Parser(context, text).parse_module()
        module.verify()
        programs = [op for op in module.ops if isinstance(op, ProgramOp)]
        if len(programs) != 1:
            raise MapError(f"expected one spatial.program, got {len(programs)}")
        return _Reader(programs[0], tensors).tiles()
    except (ParseError, VerifyException, Unread) as error:
        raise MapError(str(error).rstrip()) from None


class _Reader:
    def __init__(self, program: ProgramOp, tensors: dict[str, torch.Tensor]) -> None:
        self.program, self.tensors = program, tensors
        self.env: dict[SSAValue, Tile] = {}

    def tiles(self) -> Tiles:
        given: list[Given] = []
        for op in self.program.body.block.ops:
            if isinstance(op, GiveOp):
                given.append(Given(op.tensor.data, read_part(op.box.data)[0], self.parts(op)[0]))
            elif isinstance(op, TileOp):
                self.env[op.result] = self.tile(op)
            else:
                raise MapError(f"expected operations of the dialect spatial, got {op.name}")
        inputs = [_read_tensor(t.data) for t in self.program.inputs]
        outputs = [_read_tensor(t.data) for t in self.program.outputs]
        hosted = [_read_tensor(t.data) for t in self.program.hosted or ()]
        calls = [_read_call(t.data) for t in self.program.calls or ()]
        name, tiles = self.program.label.data, list(self.env.values())
        return Tiles(name, tiles, given, self.tensors, inputs, outputs, calls, hosted)

    def tile(self, op: TileOp) -> Tile:
        dtype, rows, columns = tile_type(op.result).parsed()
        core: Core = read_core(tile_type(op.result).core.data)
        head = (op.label.data, _read_dtype(dtype), rows, columns, core)
        kept = {
            "source": _read_source(op.source.data),
            "home": op.home.data if op.home else "",
            "batch": op.batch.value.data if op.batch else 0,
        }
        match op:
            case HoldOp() | LoadOp():
                if op.tensor.data not in self.tensors:
                    raise MapError(f"{op.label.data} holds {op.tensor.data}, which is not given beside the text")
                of = (op.tensor.data, read_part(op.box.data)[0])
                return (
                    Loaded(*head, *of, op.dram.data, **kept)
                    if isinstance(op, LoadOp)
                    else Held(*head, *of, op.kind.data == "state", **kept)
                )
            case ReceiveOp():
                return Received(*head, op.tensor.data, read_part(op.box.data)[0], **kept)
            case AssembleOp():
                places = [read_place(p.data) for p in op.places]
                return Assembled(*head, [(part, *at) for part, at in zip(self.parts(op), places, strict=True)], **kept)
            case MultiplyOp():
                parts = self.parts(op)
                return Multiplied(*head, list(zip(parts[::2], parts[1::2], strict=True)), **kept)
            case ComputeOp():
                return Computed(*head, _own_tree(read_tree(op.expression.data)), self.parts(op), **kept)
            case GatherOp():
                table, index = self.parts(op)
                return Gathered(*head, table, index, **kept)
            case ScatterOp():
                state, index, rows = self.parts(op)
                return Scattered(*head, state, index, rows, **kept)
        raise MapError(f"{op.name} is no operation that gives a tile")

    def parts(self, op: Operation) -> list[Part]:
        texts = op.parts  # type: ignore[attr-defined]
        return [Part(self.env[v], *read_part(t.data)) for v, t in zip(op.operands, texts, strict=True)]


def _own_tree(of: ListingTree) -> Tree:
    if isinstance(of, Ref):
        return int(of.name.removeprefix("_"))
    return Apply(of.function, tuple(map(_own_tree, of.operands))) if isinstance(of, Call) else Number(of)


def _read_call(text: str) -> Called:
    core, _, call = text.partition(" ")
    return Called(read_call(call), read_core(core))


def _read_dtype(name: str) -> torch.dtype:
    if name not in SIZES:
        raise Unread(f"expected a type out of {', '.join(SIZES)}; got {name!r}")
    return getattr(torch, name)


def _read_tensor(text: str) -> tuple[str, torch.dtype, tuple[int, ...]]:
    if (match := _TENSOR.fullmatch(text)) is None:
        raise MapError(f"expected a name and a type such as x float32[16, 64], got {text!r}")
    return match[1], _read_dtype(match[2]), tuple(int(n) for n in match[3].split(",") if n.strip())
