"""Rates that published machines reached, beside those of our programs on their files.

    python -m tests.spatial.measured            all; a word chooses some: wormhole

A simulated rate below a measured one says that a file or the compiler is wrong: the machine did it. One far above says
that the machine waits for something its file does not know. What is multiplied is computed on the chip from two small
inputs, and of each row of the result only the largest leaves: there the operands lie in memory too, and nothing comes
over the host's port.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from tessera.spatial.map import map_onto
from tessera.spatial.simulator.api import cost

MOST = 4.0  # times what was measured


@dataclass(frozen=True)
class Measured:
    machine: str
    size: tuple[int, int, int]  # of a product in bfloat16
    rate: float  # operations a second
    source: str
    effort: str = "normal"


TT = "Tenstorrent, tt-metal, tech_reports/GEMM_FLOPS, 2025: bfloat16, HiFi4, 8×8 cores of an n150 at 1 GHz, with trace"
MAXTEXT = "Google, MaxText, end-to-end training of 32B on a v5e-256, 2023: 66.86 % of the peak"
RATES = {
    "wormhole 512": Measured("wormhole", (512, 512, 512), 19.96e12, TT, "quick"),
    "wormhole 1024": Measured("wormhole", (1024, 1024, 1024), 46.39e12, TT, "quick"),
    "tpu-v5e": Measured("tpu-v5e", (1024, 4096, 4096), 132e12, MAXTEXT),
}


class Product(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(k, n).bfloat16())

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a * b) @ self.w).amax(-1)


def simulated(of: Measured) -> float:
    """Operations a second."""
    m, k, n = of.size
    torch.manual_seed(0)
    inputs = torch.randn(m, 1).bfloat16(), torch.randn(1, k).bfloat16()
    return 2 * m * k * n / cost(map_onto(Product(k, n), *inputs, machine=of.machine, effort=of.effort)).seconds


if __name__ == "__main__":
    for name, of in RATES.items():
        if all(word in name for word in sys.argv[1:]):
            rate = simulated(of)
            print(f"{name}: {rate / 1e12:.1f} TFLOP/s, measured {of.rate / 1e12:.1f}: {rate / of.rate:.2f}", flush=True)
