"""What generated code finds in the process it runs in: Python's functions, the OpenMP runtime of PyTorch, C's library.

In: the address of an entry. Out: a Python function of it. Nothing here needs the compiler: kernels that were compiled
before run by this file alone.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

import torch

PYTHON_SYMBOLS = (
    "PyLong_AsVoidPtr",
    "PyLong_AsLongLong",
    "PyErr_Occurred",
    "PyErr_SetString",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "Py_IncRef",
)
OPENMP_SYMBOLS = {
    "gomp": ("GOMP_parallel",),
    "kmp": ("__kmpc_global_thread_num", "__kmpc_push_num_threads", "__kmpc_fork_call"),
}
OPENMP_ALL = ("omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads")
METH_FASTCALL = 0x0080


class MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def function(address: int, name: str) -> tuple[Callable[..., None], object]:
    """The entry of a kernel as a Python function, and what must live as long as it."""
    method = MethodDef(name.encode("ascii", "replace"), address, METH_FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return make(ctypes.addressof(method), None, None), method


def address_of(name: str) -> int:
    """Where this process has a symbol that generated code calls; 0 where it has none."""
    if name in addresses():
        return addresses()[name]
    try:
        return _address(ctypes.CDLL(None), name)
    except AttributeError:
        return 0


@functools.cache
def addresses() -> dict[str, int]:
    """Symbols that generated code calls, where this process has them."""
    addresses = {name: _address(ctypes.pythonapi, name) for name in PYTHON_SYMBOLS}
    addresses["_Py_NoneStruct"] = id(None)
    addresses["PyExc_TypeError"] = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyExc_TypeError"))
    kind, library = _openmp()
    for name in (*OPENMP_SYMBOLS[kind], *OPENMP_ALL) if kind else ():
        addresses[name] = _address(library, name)
    return addresses


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def openmp() -> str:
    """The kind of OpenMP runtime that PyTorch loaded: gomp, kmp, or empty if there is none."""
    return _openmp()[0]


@functools.cache
def _openmp() -> tuple[str, ctypes.CDLL]:
    for path in _openmp_files():
        library = ctypes.CDLL(path)  # it is loaded already: this only asks for it by its name
        for kind, names in OPENMP_SYMBOLS.items():
            if all(hasattr(library, n) for n in (*names, *OPENMP_ALL)):
                return kind, library
    return "", ctypes.CDLL(None)


def _openmp_files() -> list[str]:
    if not torch.backends.openmp.is_available():
        return []
    pattern = re.compile(r"(/\S*lib[gi]?omp[^/\s]*\.(?:so|dylib)\S*)")
    maps = Path("/proc/self/maps")
    if maps.exists():
        return sorted(set(pattern.findall(maps.read_text())), key=lambda p: "torch" not in p)
    return [str(p) for p in (Path(torch.__file__).parent / "lib").glob("lib*omp*") if pattern.match(str(p))]
