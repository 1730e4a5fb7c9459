"""Exported programs as something to call.

In: an `ExportedProgram`. Out: a call, compiled at once for the grad mode at hand and the gradients that its weights
want; a call in another grad mode, or with arguments that want gradients, compiles once more. What does not compile
runs as PyTorch runs the program, as with any other graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.export import ExportedProgram

from tessera.frontends.export import capture_export
from tessera.just_in_time.backend import Backend, GraphRecord
from tessera.just_in_time.compiled import Compiled
from tessera.pipeline.compilation import compile_captured
from tessera.torch_internals import pytree

NAME = "exported"
Wanted = tuple[bool, ...]  # of each input, whether its gradient is followed; empty: of none


class ExportedCall:
    __tessera__: Compiled

    def __init__(self, program: ExportedProgram, backend: Backend) -> None:
        self.backend, self.exported = backend, capture_export(program, NAME)
        self.module = program.module()
        self.calls: dict[Wanted, Callable | None] = {}  # None: as PyTorch runs it
        self._call_for(self._wanted([None] * len(self.exported.leaves)))

    def __call__(self, *args: object, **kwargs: object) -> object:
        leaves = self.exported.flatten(args, kwargs)
        call = None if leaves is None else self._call_for(self._wanted(leaves))
        if call is None:
            return self.module(*args, **kwargs)
        return self.exported.pack(call(*self.exported.held, *leaves))  # type: ignore[misc]

    def _wanted(self, leaves: list) -> Wanted:
        if not torch.is_grad_enabled():
            return ()
        wanted = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in (*self.exported.held, *leaves))
        return wanted if any(wanted) else ()

    def _call_for(self, wanted: Wanted) -> Callable | None:
        if wanted not in self.calls:
            self.calls[wanted] = self._compiled(wanted)
        return self.calls[wanted]

    def _compiled(self, wanted: Wanted) -> Callable | None:
        captured = self.exported.captured
        captured = replace(captured, requires_grad=wanted or (False,) * len(captured.trace.inputs))
        count = len(self.backend.graphs)
        record = GraphRecord(f"{NAME}_{count}" if count else NAME, "")
        self.backend.graphs.append(record)
        try:
            call, record.compilation = compile_captured(captured, self._eager, record.name, self.backend.options)
            return call
        except Exception as error:
            record.failure = getattr(error, "tessera_failure", None)
            self.backend.run_eagerly(self.module, record, error)
            return None

    def _eager(self, *inputs: object) -> tuple:
        leaves = list(inputs[len(self.exported.held) :])
        args, kwargs = pytree.tree_unflatten(leaves, self.exported.in_spec)
        return tuple(pytree.tree_leaves(self.module(*args, **kwargs)))
