"""The context of the first GPU, made while Python imports PyTorch.

Each takes a second or so, and the driver needs no lock of Python's. PyTorch finds the context there, since it uses the
same one (the primary). Where there is no driver or no GPU nothing happens: whoever needs one will say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading


def begin(device: str | None) -> None:
    """Make it in the background, unless another device is asked for."""
    if device != "cpu":
        threading.Thread(target=_make, name="tessera-context", daemon=True).start()


def _make() -> None:
    with contextlib.suppress(OSError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before its first call
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
