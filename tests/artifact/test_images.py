"""CPU kernels as images: what objects become for both architectures, and that this machine runs its own."""

from __future__ import annotations

import struct

import pytest
import torch

from tessera.tile.targets.cpu.image import PAGE, Image, mapped, missing_symbols
from tessera.tile.targets.cpu.levels import LEVELS, levels_here
from tessera.tile.targets.cpu.link import JUMP, image_of

llvm = pytest.importorskip("llvmlite.binding")

# Adds one to a float that is given by its address, as kernels are called.
TEXT = """
target triple = "{triple}"
declare ptr @PyLong_AsVoidPtr(ptr)
declare void @Py_IncRef(ptr)
@_Py_NoneStruct = external global i8
@table = private constant [4 x float] [float 0.0, float 1.0, float 2.0, float 3.0], align 16
define internal float @more(float %x, i64 %i) noinline {{
  %at = getelementptr float, ptr @table, i64 %i
  %y = load float, ptr %at
  %sum = fadd float %x, %y
  ret float %sum
}}
define ptr @entry(ptr %self, ptr %argv, i64 %count) {{
  %object = load ptr, ptr %argv
  %address = call ptr @PyLong_AsVoidPtr(ptr %object)
  %x = load float, ptr %address
  %y = call float @more(float %x, i64 %count)
  store float %y, ptr %address
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
}}
"""


def compiled(level: str) -> Image:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    of = LEVELS[level]
    target = llvm.Target.from_triple(of.triple)
    machine = target.create_target_machine(
        cpu=of.cpu, features=of.features, opt=2, reloc="pic", codemodel="small", jit=True
    )
    return image_of(machine.emit_object(llvm.parse_assembly(TEXT.format(triple=of.triple))), "add_one")


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_links(level: str) -> None:
    image = compiled(level)
    symbols = {symbol: at for at, symbol in image.imports}
    assert set(symbols) == {"PyLong_AsVoidPtr", "Py_IncRef", "_Py_NoneStruct"}
    assert all(at % 8 == 0 and not any(image.code[at : at + 8]) for at in symbols.values())
    jump = JUMP[183 if level.startswith("aarch64") else 62]
    assert image.code[symbols["Py_IncRef"] - len(jump) : symbols["Py_IncRef"]] == jump
    assert 0 <= image.entry < len(image.code)
    assert struct.pack("<4f", 0, 1, 2, 3) in image.code


@pytest.mark.skipif(not levels_here(), reason="this machine is of no level that is known")
def test_this_machine_runs_its_own() -> None:
    image = compiled(levels_here()[-1])
    assert missing_symbols([image]) == []
    first, second = mapped([image, image])  # wherever they lie
    x = torch.tensor([41.0])
    first([x])
    second.by_address(x.data_ptr())
    assert x.item() == 43.0
    assert len(image.code) < PAGE


def test_an_object_of_another_kind_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="ELF objects"):
        image_of(b"\xcf\xfa\xed\xfe" + bytes(100), "mach")


def test_levels_are_best_first() -> None:
    here = levels_here()
    assert list(here) == [name for name in LEVELS if name in here]
