"""`load`: a StableHLO program as a function that compiles itself when it is called.

In: MLIR text, bytecode, a path, or what `jax.export` gave. Out: a function over tensors. A program is captured once
for all sizes that it leaves open; arguments of other kinds (layouts, devices, gradients) are captured anew. One that
cannot be captured is interpreted, operation by operation, and `tessera.explain` says why.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tessera.frontends.stablehlo.capture import Fits, Imported
from tessera.frontends.stablehlo.limits import FILE_BYTES
from tessera.frontends.stablehlo.parse import parse
from tessera.frontends.stablehlo.registry import custom_call
from tessera.ir.record import recording
from tessera.just_in_time.api import jit
from tessera.just_in_time.backend import Backend
from tessera.just_in_time.compiled import Compiled
from tessera.pipeline.compilation import compile_captured
from tessera.pipeline.options import Options
from tessera.torch_internals.dynamo import compile_lock
from tessera.util.errors import CaptureError, InputError

Call = Callable[..., list]


class Structure(Protocol):
    """How a caller's arguments and results line up with the program's."""

    def flatten(self, args: tuple, kwargs: dict) -> list: ...
    def pack(self, results: list) -> object: ...


class Flat:
    """Arguments by position; one result as it is, several as a tuple."""

    def flatten(self, args: tuple, kwargs: dict) -> list:
        if kwargs:
            raise InputError(f"expected arguments by position, got {', '.join(kwargs)}")
        return list(args)

    def pack(self, results: list) -> object:
        return results[0] if len(results) == 1 else tuple(results)


class Trees:
    """The trees of a `jax.export.Exported`. Arguments that the program does not read are not passed on."""

    def __init__(self, exported: Any) -> None:
        self.exported = exported

    def flatten(self, args: tuple, kwargs: dict) -> list:
        try:
            leaves = self.exported.in_tree.flatten_up_to((args, kwargs))
        except (ValueError, TypeError) as error:
            raise InputError(f"expected arguments of structure {self.exported.in_tree}: {error}") from error
        return [leaves[i] for i in self.exported.module_kept_var_idx]

    def pack(self, results: list) -> object:
        return self.exported.out_tree.unflatten(results)


class Programs:
    """The compiled forms of one imported program."""

    def __init__(self, imported: Imported, name: str, options: Options) -> None:
        self.imported, self.name, self.options = imported, name, options
        self.backend = Backend(options, name=name)
        self.entries: dict[object, Call] = {}
        self.general: list[tuple[object, Fits, Call]] = []

    def __call__(self, *given: object) -> list:
        tensors = self.imported.check(given)
        key = (torch.is_grad_enabled(), *((x.shape, x.stride(), x.device, x.requires_grad) for x in tensors))
        entry = self.entries.get(key)
        if entry is None:
            with compile_lock:
                entry = self.entries.get(key) or self.entry(key, tensors)
        return entry(*tensors)

    def entry(self, key: object, tensors: Sequence[torch.Tensor]) -> Call:
        """A program that holds for these arguments: one that is there, or a new one."""
        kind = _kind(tensors)
        fitting = (call for other, fits, call in self.general if other == kind and fits.holds(tensors))
        call = next(fitting, None) or self.compile(kind, tensors)
        self.entries[key] = call
        return call

    def compile(self, kind: object, tensors: Sequence[torch.Tensor]) -> Call:
        record = self.backend.next_record()
        self.backend.graphs.append(record)
        names = [f"x{i}" for i in range(len(tensors))]
        try:
            captured, lifted, fits = self.imported.capture(tensors, names, record.name)
        except CaptureError as error:
            record.eager_reason = f"interpreted: {error}".split("\n")[0]
            return self.imported.run
        record.nodes = len(captured.trace.equations)

        def eager(*inputs: torch.Tensor) -> tuple:
            return tuple(self.imported.run(*inputs[: len(tensors)]))

        call, record.compilation = compile_captured(captured, eager, record.name, self.options)
        entry = (lambda *xs: list(call(*xs, *lifted))) if lifted else (lambda *xs: list(call(*xs)))
        self.general.append((kind, fits, entry))
        return entry


def _kind(tensors: Sequence[torch.Tensor]) -> tuple:
    """What a program is captured for besides sizes. Layouts other than the plain one are captured one by one."""
    plain = [x.is_contiguous() for x in tensors]
    layouts = tuple(() if p else (tuple(x.shape), x.stride()) for p, x in zip(plain, tensors, strict=True))
    return (torch.is_grad_enabled(), layouts, tuple((x.device, x.requires_grad) for x in tensors))


def load(
    source: str | os.PathLike | bytes | Any,
    *,
    limit: int | None = None,
    executors: str | list[str] | tuple[str, ...] | None = None,
    name: str | None = None,
) -> Callable:
    """A function over tensors that computes what a StableHLO program does.

    source     a path, bytecode, MLIR text, or a `jax.export.Exported`
    limit      the most bytes that one value of the program may take; None: what the file and the arguments justify
    executors  who may run what, as for `tessera.jit`
    name       what the program is called in messages
    """
    data, named, structure = _read(source)
    called = name or named
    ours = hasattr(source, "mlir_module_serialized")  # made in this process
    imported = Imported(parse(data, called, limit, probed=not ours), limit)
    options = Options.of(executors, None, None, False, None, None)
    programs = Programs(imported, re.sub(r"\W", "_", called) or "program", options)
    again = functools.partial(jit, executors=executors)

    @torch.compiler.disable(reason="a StableHLO program has programs of its own")  # inside what Dynamo traces
    def run(args: tuple, kwargs: dict) -> object:
        leaves = structure.flatten(args, kwargs)
        if recording() is not None or torch.compiler.is_exporting():  # be traced as plain operations
            return structure.pack(imported.run(*imported.check(leaves)))
        return structure.pack(state.call(*leaves))

    def function(*args: object, **kwargs: object) -> object:
        return run(args, kwargs)

    state = Compiled(function, programs.backend, programs, again)
    state.owner = function
    function.__tessera__ = state  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = programs.name
    return function


def _read(source: Any) -> tuple[str | bytes, str, Structure]:
    """The program's bytes or text, a name for it, and its structure."""
    if hasattr(source, "mlir_module_serialized"):
        return source.mlir_module_serialized, str(getattr(source, "fun_name", "exported")), Trees(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source), "program", Flat()
    if isinstance(source, str) and ("\n" in source or "{" in source):
        return source, "program", Flat()
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise InputError(f"expected a file of MLIR bytecode or text, got {str(path)!r}, which is no file")
        if path.stat().st_size > FILE_BYTES:
            raise InputError(f"{path.name}: expected at most {FILE_BYTES:,} bytes, got {path.stat().st_size:,}")
        return path.read_bytes(), path.name, Flat()
    raise InputError(f"expected a path, bytes, MLIR text or a jax.export.Exported, got {type(source).__name__}")


def register(target: str) -> Callable[[Callable], Callable]:
    """A decorator: the function is what `custom_call @target` means in programs.

    It takes the call's site (`site["attribute"]`, `site.result`) and its operands, and gives a tensor or a list.
    """

    def enter(fn: Callable) -> Callable:
        custom_call(target)(fn)
        return fn

    return enter
