"""A small MLP on a toy machine: its listing is read, edited by hand, and put back.

The first edit begins a product a cycle earlier, and the simulator says what it meets. The second makes relu of gelu, in
the same cycles, and the result is that of the changed model.
"""

from __future__ import annotations

import re

import torch
from torch import nn

import tessera
from tessera.spatial.simulator.violation import Violation


def main() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), torch.randn(8, 32)
    program = tessera.map_onto(model, x, machine="toy")
    print(program.core(0, 0))
    print(program.summary())
    run = tessera.simulate(program, x)
    assert run.cycles == program.cycles
    torch.testing.assert_close(run.output, model(x).detach(), rtol=1e-5, atol=1e-5)

    # One product a cycle earlier: what it reads has not arrived, or a port is not free yet.
    start = max(map(int, re.findall(r"@(\d+) +matrix", str(program))))
    hurried = program.edited(re.sub(rf"@{start}( +)matrix", rf"@{start - 1}\1matrix", str(program), count=1))
    try:
        tessera.simulate(hurried, x)
    except Violation as violation:
        print(f"\na cycle earlier: {violation}")

    # gelu becomes relu, in the same cycles: another program, and a right one.
    other = program.edited(str(program).replace("gelu(", "relu("))
    relu = nn.Sequential(model[0], nn.ReLU(), model[2])
    torch.testing.assert_close(tessera.simulate(other, x).output, relu(x).detach(), rtol=1e-5, atol=1e-5)
    print("\nwith relu in place of gelu:", other.summary())


if __name__ == "__main__":
    main()
