"""Reads bytecode in a process of its own: python -m tessera.frontends.stablehlo.probe < program.

MLIR's reader may end the whole process where bytecode is damaged. A file that the probe survives is read again here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tessera.frontends.stablehlo.bindings import bindings, context
from tessera.util.errors import InputError

SECONDS = 60


def survives(source: bytes, name: str) -> None:
    """Refuse bytecode that MLIR's reader does not come back from. That it refuses some is seen where it is read."""
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "tessera.frontends.stablehlo.probe"]
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, timeout=SECONDS, env={**os.environ, "PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{name}: MLIR does not read this within {SECONDS} s") from error
    if done.returncode < 0:
        raise InputError(f"{name}: MLIR does not read this: the bytecode is damaged (signal {-done.returncode})")


if __name__ == "__main__":
    mlir, data = context(), sys.stdin.buffer.read()
    with mlir:
        try:
            str(bindings().stablehlo.deserialize_portable_artifact(mlir, data).operation.verify())
        except Exception:  # noqa: BLE001 - refused, and said where it is read
            str(bindings().ir.Module.parse(data).operation.verify())
