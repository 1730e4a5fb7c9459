"""`torch._check` on numbers known only at run time, in a function that is traced.

PyTorch takes such a claim for granted while it traces. Here it also becomes an equation of the program, which raises
the error and the message that eager does. TorchDynamo's graphs hold these claims as operators
(`frontends/dynamo/graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.frontends.functional.trace import WATCHED, tracing
from tessera.ir.check import KINDS
from tessera.ir.checks import record_check
from tessera.ir.record import recording
from tessera.torch_internals.shapes import CHECK_WITH


def _watched(original: Callable) -> Callable:
    def check_with(error_type: type[Exception], cond: object, message: Callable[[], str] | None) -> None:
        recorder = recording()
        if isinstance(cond, torch.SymBool) and tracing() and recorder is not None:
            kind = error_type.__name__ if error_type.__name__ in KINDS else "RuntimeError"
            told = "expected what torch._check was given to hold" if message is None else str(message())
            record_check(recorder.builder, cond, told, kind)
        original(error_type, cond, message)

    return check_with


WATCHED.append((*CHECK_WITH, _watched))
