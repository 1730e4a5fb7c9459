"""An artifact's program, compiled on this machine: where no kernels of the file can run, and the compiler is here.

In: a program that was read and checked. Out: what calls in its place. The generated function is recorded as any
function of a user's is, so the program goes through the whole pipeline for the device at hand; programs are kept by the
sizes of their arguments, and on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tessera.artifact.read import Program
from tessera.artifact.traced import bind_traced
from tessera.ir.printer import compile_trace
from tessera.just_in_time.api import jit
from tessera.runtime.call import build_call
from tessera.runtime.double_backward import no_forward_mode
from tessera.util.errors import CaptureError


def unguarded(program: Program) -> Callable[..., tuple]:
    """The program with the writes and views that stand around it, for whoever traces it."""
    layout = replace(program.layout, written=(), counted=())
    run = compile_trace(program.trace, bind=bind_traced)
    fn = build_call(run, layout, no_forward_mode, guarded=False)
    fn.__name__ = program.trace.name
    return fn


def compiled(program: Program, refused: Callable[[str], None]) -> Callable[..., tuple]:
    """The same call, compiled for the sizes that come. Where it cannot be, `refused` is told why, and it runs as it
    is."""
    fast = jit(unguarded(program), frontend="functional")  # which looks itself whether arguments overlap

    run: Callable[..., tuple] = fast

    def call(*args: object) -> tuple:
        nonlocal run
        with torch.no_grad():
            try:
                return run(*args)
            except CaptureError as error:  # before anything ran
                if run is not fast:
                    raise
                run = program.call
                refused(str(error))
                return run(*args)

    return call
