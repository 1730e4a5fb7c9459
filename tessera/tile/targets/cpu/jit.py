"""From LLVM text to a function in this process: optimise, make object code, link, and wrap for Python.

Few passes are run, because the text is already what it should become: vectors are explicit, loops are as they should
be. Object code is made once and kept (see `tile.cache`); linking costs under a millisecond.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import torch

from tessera.tile.targets.cpu.host import Host, host

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
PASSES = "sroa instcombine simplifycfg"  # as `_optimised` runs them

_libraries = itertools.count()


class MethodDef(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


def version(machine: Host) -> str:
    """What object code depends on besides the LLVM text."""
    compiler = f"{PASSES} llvmlite {llvmlite.__version__} {llvm.llvm_version_info}"
    return f"{compiler} {machine.triple} {machine.cpu} {machine.features} {machine.sve}"


@functools.cache
def _target_machine(machine: Host) -> llvm.TargetMachine:
    target = llvm.Target.from_triple(machine.triple)
    return target.create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=2, reloc="pic", codemodel="small", jit=True
    )


@functools.cache
def _linker() -> llvm.LLJIT:
    # A machine of its own: the linker takes it over. JITLink puts all of an object into one piece of memory; pieces of
    # their own may be further apart than small code reaches, where a process has mapped large libraries.
    machine = host()
    target = llvm.Target.from_triple(machine.triple)
    own = target.create_target_machine(cpu=machine.cpu, features=machine.features, opt=2, reloc="pic", jit=True)
    return llvm.create_lljit_compiler(own, use_jit_link=True)


def _optimised(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()  # stack slots become registers
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(module, builder)
    return module


def object_code(text: str, machine: Host) -> bytes:
    target = _target_machine(machine)
    return target.emit_object(_optimised(text, target))


def assembly(text: str, machine: Host) -> str:
    target = _target_machine(machine)
    return target.emit_assembly(_optimised(text, target))


def link(code: bytes, name: str) -> tuple[Callable[..., None], object]:
    """The entry of an object as a Python function, and what must live as long as it."""
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol("entry")
    for symbol, address in _addresses().items():
        builder.import_symbol(symbol, address)
    tracker = builder.link(_linker(), f"kernel{next(_libraries)}")
    method = MethodDef(name.encode("ascii", "replace"), tracker["entry"], METH_FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return make(ctypes.addressof(method), None, None), (method, tracker)


@functools.cache
def _addresses() -> dict[str, int]:
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
