"""Listings written by hand for the tests: each one with its machine, its data and what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tessera.machines.find import spatial_machine
from tessera.machines.spatial import SpatialMachine
from tessera.machines.spatial.read import vary
from tessera.spatial.listing import Program, parse


@dataclass(frozen=True)
class Case:
    program: Program
    inputs: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor, ...]
    tolerance: float = 0.0  # 0: bit for bit
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def listing(machine: SpatialMachine, body: str, data: dict[str, torch.Tensor] | None = None) -> Program:
    head = f"tessera spatial listing 1\nmachine {machine.key} {machine.sha256}\n"
    return Program(parse(head + body), machine, data or {})


def toy(**changes: object) -> SpatialMachine:
    fields = {name.replace("__", "."): value for name, value in changes.items()}
    return vary(spatial_machine("toy"), fields) if fields else spatial_machine("toy")


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp_on_one() -> Case:
    """gelu(x w1 + b) w2, all on core 0,0."""
    x, w1, b, w2 = _random(16, 32), _random(32, 32, seed=1), _random(32, seed=2), _random(32, 16, seed=3)
    body = """\
input   x float32[16, 32]
output  y float32[16, 16]

core 0,0
  sram  w1  float32[32, 32]  0x0000 +4096  always = w1
  sram  w2  float32[32, 16]  0x1000 +2048  always = w2[0:32, 0:16]
  sram  b   float32[32]      0x1800 +128   always = b
  sram  x   float32[16, 32]  0x2000 +2048  0..320
  sram  a   float32[16, 32]  0x2800 +2048  64..388
  sram  h   float32[16, 32]  0x2000 +2048  320..516
  sram  y   float32[16, 16]  0x3000 +1024  388..548
  @0    host    recv x from host.x   64      sram.w0          mlp   mlp.py:1
  @64   matrix  a = x · w1           256     sram.r0 sram.w0  up    mlp.py:2
  @320  vector  h = gelu(a + b)      68      sram.r0 sram.w0  act   mlp.py:3
  @388  matrix  y = h · w2           128     sram.r0 sram.w0  down  mlp.py:4
  @516  host    send y to host.y     32      sram.r0
end 548
"""
    expected = F.gelu(x @ w1 + b) @ w2
    return Case(listing(toy(), body, {"w1": w1, "w2": w2, "b": b}), (x,), (expected,), 1e-5)


CASES: dict[str, Callable[[], Case]] = {
    "mlp on one core": mlp_on_one,
}
