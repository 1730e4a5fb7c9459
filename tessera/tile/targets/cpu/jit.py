"""From LLVM text to a function in this process: optimise, make object code, link, and wrap for Python.

Few passes are run, because the text is already what it should become: vectors are explicit, loops are as they should
be. Object code is made once and kept (see `util/disk.py`); linking costs under a millisecond.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import llvmlite
import llvmlite.binding as llvm

from tessera.tile.targets.cpu.host import Host, host
from tessera.tile.targets.cpu.process import addresses, function

PASSES = "sroa instcombine simplifycfg"  # as `_optimised` runs them

_libraries = itertools.count()


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
    for symbol, address in addresses().items():
        builder.import_symbol(symbol, address)
    tracker = builder.link(_linker(), f"kernel{next(_libraries)}")
    run, method = function(tracker["entry"], name)
    return run, (method, tracker)
