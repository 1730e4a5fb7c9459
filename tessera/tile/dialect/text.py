"""Tile kernels as MLIR text, both ways.

`parse` reads a module of kernels and verifies it; what is wrong is shown with its file, its line and a caret.
`to_text` prints what `parse` reads back as an equal module.
"""

from __future__ import annotations

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.ir import Operation
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError, VerifyException

from tessera.tile.dialect.ops import KernelOp, Tile
from tessera.util.errors import TesseraError


class TileTextError(TesseraError):
    """The text is not a module of tile kernels; the message shows where."""


def context() -> Context:
    """The dialects that tile text may use."""
    ctx = Context()
    ctx.load_dialect(Builtin)
    ctx.load_dialect(Tile)
    return ctx


def parse(text: str, name: str = "<text>") -> ModuleOp:
    """The module that `text` describes; a text without `builtin.module` around its kernels is given one."""
    if not text.strip():
        raise TileTextError(f"{name}: expected tile kernels, got an empty text")
    try:
        module = Parser(context(), text, name).parse_module()
    except ParseError as error:
        raise TileTextError(str(error).rstrip()) from None
    for op in module.ops:
        if not isinstance(op, KernelOp):
            raise TileTextError(f"{name}: expected a module of tile.kernel, got {op.name} in it")
        for inner in op.walk(region_first=True):  # from the inside out: a kernel looks at what is in it
            _verify(inner, name)
    _verify(module, name)
    return module


def _verify(op: Operation, name: str) -> None:
    try:
        op.verify(verify_nested_ops=False)
    except VerifyException as error:
        raise TileTextError(f"{name}: {error}\nin {str(op).splitlines()[0]}") from None


def kernels(module: ModuleOp) -> list[KernelOp]:
    return [op for op in module.ops if isinstance(op, KernelOp)]


def to_text(op: Operation) -> str:
    return str(op)
