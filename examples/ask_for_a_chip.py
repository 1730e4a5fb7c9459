"""Which change of a chip would pay? A sweep for architects, over a toy of four cores.

Each point is the machine with some of its fields changed; the model is compiled for it anew, and the simulator says how
long it takes.
"""

from __future__ import annotations

import torch
from torch import nn

import tessera


def main() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(16, 64)
    found = tessera.codesign(model, x, machine="toy", vary={"sram.width": "x0.5..x4", "link.bandwidth": "x0.5..x2"})
    print(found)
    assert found.base.cycles == tessera.map_onto(model, x, machine="toy", effort="quick").cycles
    assert found.asks[0].point.seconds < found.base.seconds


if __name__ == "__main__":
    main()
