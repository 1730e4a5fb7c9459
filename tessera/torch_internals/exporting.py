"""`torch.export` while it traces: which lines it notes, what it logs, and what it goes through."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NoReturn

import torch

from tessera.torch_internals import fake
from tessera.torch_internals.lookup import owner_of, symbol
from tessera.util.errors import CaptureError
from tessera.util.files import PACKAGE

_WHY = "the lines of functions that are exported"
_tracer = symbol("torch.fx.proxy.TracerBase", _WHY)
_filter: Callable | None = symbol("torch.fx.proxy.TracerBase._filter_traceback_frames", _WHY, otherwise=None)
_TORCH = torch.__path__[0]
_EXPORT, _LAYERS = f"{_TORCH}/export/", f"{_TORCH}/nn/modules/"
_LIBRARIES = (_TORCH, PACKAGE, "<")


@contextmanager
def every_line() -> Iterator[None]:
    """While inside, nodes know the innermost line that called them. PyTorch notes lines of functions that are called
    `forward`, and of no others."""
    if _filter is None:
        yield
        return
    _tracer._filter_traceback_frames = _lines
    try:
        yield
    finally:
        _tracer._filter_traceback_frames = _filter


def _lines(tracer: object, frames: traceback.StackSummary) -> traceback.StackSummary:
    """Lines of the program, and of PyTorch's own modules; what is above the last of torch.export's called it."""
    above = max((i for i, frame in enumerate(frames) if frame.filename.startswith(_EXPORT)), default=-1)
    return traceback.StackSummary.from_list([f for f in frames[above + 1 :] if is_program(f.filename, f.name)])


def is_program(file: str, function: str) -> bool:
    """Whether this is a line of the program, or of one of PyTorch's own modules."""
    return function == "forward" if is_layer(file) else not file.startswith(_LIBRARIES)


def is_layer(file: str) -> bool:
    """Whether this is a file of one of PyTorch's own modules: its lines tell less than the user's that call them."""
    return file.startswith(_LAYERS)


def line_at_fault(error: BaseException) -> str:
    """The innermost line of the program on the way to an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_program(f.filename, f.name)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"


@contextmanager
def quiet_guards() -> Iterator[None]:
    """While inside, nothing is logged or printed of sizes that do not stay open, depend on data or do not fit: an error
    says so, and another attempt may follow."""
    before = [logger.disabled for logger in _LOGGERS]
    for logger in _LOGGERS:
        logger.disabled = True
    trace = owner_of("torch.export._trace._export", "what it prints of a graph that ends where data would decide")
    vars(trace)["print"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        vars(trace).pop("print", None)
        for logger, was in zip(_LOGGERS, before, strict=True):
            logger.disabled = was


_LOGGERS = [logging.getLogger(name) for name in ("torch._guards", "torch.fx.experimental.symbolic_shapes", fake.LOGGER)]


@contextmanager
def iterations() -> Iterator[set[CodeType]]:
    """While inside, codes of functions are noted that go through an open size, as `range(n)`, or through a tensor."""
    seen: set[CodeType] = set()
    index, through = torch.SymInt.__index__, torch.Tensor.__iter__

    def noted_index(self: torch.SymInt) -> int:
        seen.add(sys._getframe(1).f_code)
        return index(self)

    def noted_iter(self: torch.Tensor) -> Iterator[torch.Tensor]:
        seen.add(sys._getframe(1).f_code)
        return through(self)

    torch.SymInt.__index__, torch.Tensor.__iter__ = noted_index, noted_iter  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        torch.SymInt.__index__, torch.Tensor.__iter__ = index, through  # type: ignore[method-assign]


def fake_arguments(module: torch.nn.Module, args: tuple, shapes: object) -> tuple[Any, list]:
    """A mode, and the arguments as fake tensors of it, with the sizes that `torch.export` would give them."""
    mode, fakes, *_ = symbol(
        "torch._export.non_strict_utils.make_fake_inputs", "sizes of what is exported without torch.export"
    )(module, args, {}, shapes)
    return mode, list(fakes)


@contextmanager
def as_if_exported() -> Iterator[None]:
    """While inside, programs that ask whether they are being exported hear that they are. Operators over functions,
    which TorchDynamo would trace, are refused before it begins: it remembers what it traced under other modes."""
    compiles = torch.compile
    torch.compile = _refuse
    try:
        with symbol("torch._export.utils._compiling_state_context", "programs that ask whether they are exported")():
            yield
    finally:
        torch.compile = compiles


def _refuse(*_: object, **__: object) -> NoReturn:
    raise CaptureError("TorchDynamo is asked to trace a function")
