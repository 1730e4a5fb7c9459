"""The CPU target for machines that are described: what they choose, and code for all of them, wherever tests run.

Numbers are compared on the machine at hand: with its own code in `test_cpu`, with that of lesser ones here.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hosts import HOSTS, know_all_machines
from test_cpu import EDGES, PLAIN, ULPS, bf16, data, f32, few_rows, one_function, random_kernel, reduction, softmax

from tessera.tile.dialect import interp
from tessera.tile.dialect.elements import torch_dtype
from tessera.tile.dialect.ops import KernelOp
from tessera.tile.targets.cpu import jit
from tessera.tile.targets.cpu.host import Host, host
from tessera.tile.targets.cpu.product import at_once, block_rows
from tessera.tile.targets.cpu.target import CpuTarget, module_text

MULTIPLY = r"\bv?fm(?:la|ad)"  # and add
LOOP = re.compile(r"(?s)(\n(?P<label>\.L\w+):(?:(?!\n\.L).)*?\n\t[\w.]+\t(?:[^\n]*, )?(?P=label)\b)")
WRITES = r"\n\tst\w+|\n\tv?mov\w+\s+%[xyz]mm\d+, [^%\n]*\("  # a register to memory

TAKEN = {
    "avx512": {*range(12, 17), *range(24, 33), *range(36, 65)},
    "avx2": {*range(6, 9), *range(12, 17), *range(18, 65)},
    "neon": {3, 4, *range(6, 65)},
    "sve": {*range(6, 9), *range(12, 17), *range(18, 65)},
    "sse": set(),
}


@pytest.mark.parametrize("name", HOSTS)
def test_products_that_stay_with_the_library(name):
    """Rows fill registers, so that how many are taken follows from a register's length."""
    target = CpuTarget(host=HOSTS[name])
    assert {rows for rows in range(1, 80) if not target.no_product(rows, 64, 64)} == TAKEN[name]
    if TAKEN[name]:
        assert "multiples" in target.no_product(16, 60, 64) and "multiples" in target.no_product(16, 64, 2)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("avx512", {16: (16, 4)}),
        ("avx2", {16: (4, 2), 8: (8, 4)}),
        ("neon", {16: (4, 2), 8: (8, 4), 4: (8, 4)}),
        ("sve", {16: (8, 4), 8: (16, 4)}),
    ],
)
def test_blocks_of_a_product_stay_in_registers(name, blocks):
    """Rows of a block -> columns and steps at once. Inside the loop nothing is written to memory."""
    host = HOSTS[name]
    know_all_machines()
    for rows, (columns, steps) in blocks.items():
        assert block_rows(rows, host) == rows and at_once(rows, host) == (columns, steps)
        text = jit.assembly(module_text(few_rows(rows, 32, 64)[0], PLAIN, host), host)
        loop = max((found[0] for found in LOOP.findall(text)), key=lambda found: len(re.findall(MULTIPLY, found)))
        assert len(re.findall(MULTIPLY, loop)) == steps * columns * rows // host.lanes
        assert not re.search(WRITES, loop)


def samples() -> list[tuple[KernelOp, list[torch.Tensor]]]:
    """Kernels that between them use most of what machines differ in."""
    everything = [softmax(9, 100), softmax(9, 100, rows=False), softmax(4, 40, bf16)]
    listed = [(k, [data(k.buffers[0].type.element, 1000), data(k.buffers[0].type.element, 1000)]) for k in everything]
    x = torch.cat([torch.linspace(-50, 50, 501), torch.tensor(EDGES)])
    listed += [one_function(fn, f32, [x]) for fn in ULPS] + [one_function("pow", f32, [x.abs(), x])]
    for kind in ("max", "argmax", "sum"):
        kernel = reduction(kind, f32, True, 5, 77)
        listed.append((kernel, [data(f32, 5 * 77), torch.zeros(5, dtype=torch_dtype(kernel.buffers[1].type.element))]))
    return [*listed, few_rows(16, 32, 16), random_kernel(3)[:2], random_kernel(5)[:2]]


def lesser_machines() -> dict[str, Host]:
    """What the machine that runs the tests can run besides its own code."""
    here = host()
    if here.arm:
        return {"neon": replace(here, cpu="generic", features="+neon", sve=0)}
    narrow = {"sse": HOSTS["sse"], "avx2": HOSTS["avx2"]}
    return {name: h for name, h in narrow.items() if h.width <= here.width}


@pytest.mark.parametrize("name", lesser_machines())
def test_lesser_machines(name):
    target = CpuTarget(host=lesser_machines()[name])
    for kernel, tensors in samples():
        mine, theirs = [t.clone() for t in tensors], [t.clone() for t in tensors]
        target.compile(kernel, PLAIN)(mine)
        interp.run(kernel, theirs)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-2 if a.dtype == torch.bfloat16 else 2e-5,
                                       atol=1e-4, equal_nan=True)  # fmt: skip


# What each machine's registers are called, and what multiplies and adds at once in them.
MNEMONICS = {
    "avx512": (r"%zmm\d", "vfmadd"), "avx2": (r"%ymm\d", "vfmadd"), "sse": (r"%xmm\d", "mulps"),
    "neon": (r"\bv\d+\.4s", "fmla"), "sve": (r"\bz\d+\.s", "fmla|fmad"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTS)
def test_code_for_every_machine(name):
    """Made wherever the tests run: the machine is described, not asked."""
    know_all_machines()
    register, multiply = MNEMONICS[name]
    for kernel, _ in samples():
        text = jit.assembly(module_text(kernel, PLAIN, HOSTS[name]), HOSTS[name])
        if kernel.sym_name.data == "softmax":
            assert re.search(register, text) and re.search(multiply, text)
