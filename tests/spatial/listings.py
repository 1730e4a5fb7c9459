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


def int8_on_two() -> Case:
    """x w in int8, cut along k: core 0,0 sends half of x to 0,1 and adds what comes back."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-128, 128, (8, 32), dtype=torch.int8, generator=generator)
    w = torch.randint(-128, 128, (32, 16), dtype=torch.int8, generator=generator)
    body = """\
input   x int8[8, 32]
output  y int32[8, 16]

core 0,0
  sram  w  int8[16, 16]   0x0000 +256  always = w[0:16, 0:16]
  sram  x  int8[8, 32]    0x0100 +256  0..66
  sram  a  int32[8, 16]   0x0200 +512  12..118
  sram  b  int32[8, 16]   0x0400 +512  70..118
  sram  y  int32[8, 16]   0x0600 +512  86..134
  @0    host    recv x from host.x         8       sram.w0
  @8    east    send x[0:8, 16:32] to 0,1  4       sram.r0 link 0,0>0,1
  @12   matrix  a = x[0:8, 0:16] · w       54      sram.r0 sram.w0
  @70   east    recv b from 0,1            16      sram.w0
  @86   vector  y = a + b                  32      sram.r0 sram.w0
  @118  host    send y to host.y           16      sram.r0

core 0,1
  sram  w  int8[16, 16]   0x0000 +256  always = w[16:32, 0:16]
  sram  x  int8[8, 16]    0x0100 +128  10..68
  sram  a  int32[8, 16]   0x0200 +512  14..84
  @10   west    recv x from 0,0            4       sram.w0
  @14   matrix  a = x · w                  54      sram.r0 sram.w0
  @68   west    send a to 0,0              16      sram.r0 link 0,1>0,0
end 134
"""
    return Case(listing(toy(), body, {"w": w}), (x,), (x.int() @ w.int(),))


def multicast() -> Case:
    """x to all other cores of 2×2 by one tree; each gives back a quarter of relu(x), along a route of two hops."""
    x = _random(4, 16, seed=5)
    body = """\
input   x float32[4, 16]
output  y float32[4, 16]

core 0,0
  sram  x  float32[4, 16]  0x0000 +256  0..20
  sram  y  float32[4, 16]  0x0100 +256  16..52
  @0   host        recv x from host.x       8  sram.w0
  @8   east+south  send x to 0,1 1,0 1,1    8  sram.r0 link 0,0>0,1 0,0>1,0 0,0>0,1>1,1
  @16  vector      y[0:1, :] = relu(x[0:1, :])  2  sram.r0 sram.w0
  @22  east        recv y[1:2, :] from 0,1  2  sram.w0
  @24  south       recv y[2:3, :] from 1,0  2  sram.w0
  @38  south       recv y[3:4, :] from 1,1  2  sram.w0
  @44  host        send y to host.y         8  sram.r0

core 0,1
  sram  x  float32[4, 16]  0x0000 +256  10..20
  sram  y  float32[1, 16]  0x0100 +64   18..22
  @10  west    recv x from 0,0      8  sram.w0
  @18  vector  y = relu(x[1:2, :])  2  sram.r0 sram.w0
  @20  west    send y to 0,0        2  sram.r0 link 0,1>0,0

core 1,0
  sram  x  float32[4, 16]  0x0000 +256  10..20
  sram  y  float32[1, 16]  0x0100 +64   18..24
  @10  north   recv x from 0,0      8  sram.w0
  @18  vector  y = relu(x[2:3, :])  2  sram.r0 sram.w0
  @22  north   send y to 0,0        2  sram.r0 link 1,0>0,0

core 1,1
  sram  x  float32[4, 16]  0x0000 +256  12..24
  sram  y  float32[1, 16]  0x0100 +64   20..36
  @12  north   recv x from 0,0      8  sram.w0
  @20  vector  y = relu(x[3:4, :])  2  sram.r0 sram.w0
  @34  west    send y to 0,0        2  sram.r0 link 1,1>1,0>0,0
end 52
"""
    return Case(listing(toy(), body), (x,), (torch.relu(x),))


def ring() -> Case:
    """A sum around a ring of four cores whose links add: what the first one sends gathers a constant on every other."""
    machine = toy(link__reduce=True, link__jitter=1)
    x, c = _random(2, 8, seed=6), _random(3, 2, 8, seed=7)
    body = """\
input   x float32[2, 8]
output  y float32[2, 8]

core 0,0
  sram  x  float32[2, 8]  0x0000 +64  0..4
  sram  y  float32[2, 8]  0x0040 +64  20..24
  @0   host   recv x from host.x  2  sram.w0
  @2   east   send x to 0,1       2  sram.r0 link 0,0>0,1
  @20  south  recv y from 1,0     2  sram.w0
  @22  host   send y to host.y    2  sram.r0

core 0,1
  sram  c  float32[2, 8]  0x0000 +64  always = c[0]
  sram  y  float32[2, 8]  0x0040 +64  0..9
  @0  copy0  y = c              2  sram.r0 sram.w0
  @5  west   recv y += from 0,0  2  sram.r0 sram.w0
  @7  south  send y to 1,1       2  sram.r0 link 0,1>1,1

core 1,1
  sram  c  float32[2, 8]  0x0000 +64  always = c[1]
  sram  y  float32[2, 8]  0x0040 +64  0..14
  @0   copy0  y = c               2  sram.r0 sram.w0
  @10  north  recv y += from 0,1  2  sram.r0 sram.w0
  @12  west   send y to 1,0       2  sram.r0 link 1,1>1,0

core 1,0
  sram  c  float32[2, 8]  0x0000 +64  always = c[2]
  sram  y  float32[2, 8]  0x0040 +64  0..19
  @0   copy0  y = c               2  sram.r0 sram.w0
  @15  east   recv y += from 1,1  2  sram.r0 sram.w0
  @17  north  send y to 0,0       2  sram.r0 link 1,0>0,0
end 24
"""
    return Case(listing(machine, body, {"c": c}), (x,), (((x + c[0]) + c[1]) + c[2],))


def gather_and_scatter() -> Case:
    """Rows of an embedding are chosen, normalised, and written in another order."""
    table = _random(10, 8, seed=8)
    rows, places = torch.tensor([3, 9, 0, 3]), torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    body = """\
input   rows int64[4]
input   places int32[4]
output  y float32[4, 8]
output  best int32[4, 1]

core 0,0
  sram  table   float32[10, 8]  0x0000 +320  always = table
  sram  rows    int64[4]        0x0200 +32   0..7
  sram  places  int32[4]        0x0220 +16   1..18
  sram  e       float32[4, 8]   0x0240 +128  2..13
  sram  n       float32[4, 8]   0x02c0 +128  7..18
  sram  y       float32[4, 8]   0x0140 +128  13..26
  sram  best    int32[4, 1]     0x0340 +16   18..27
  @0   host    recv rows from host.rows      1  sram.w0
  @1   host    recv places from host.places  1  sram.w0
  @2   copy0   e = table[rows]               5  sram.r0 sram.w0
  @7   vector  n = e * rsqrt(sum(e * e) * 0.125 + 1e-06)  6  sram.r0 sram.w0
  @13  copy0   y[places] = n                 5  sram.r0 sram.w0
  @18  vector  best = argmax(y)              4  sram.r0 sram.w0
  @22  host    send y to host.y              4  sram.r0
  @26  host    send best to host.best        1  sram.r0
end 27
"""
    e = table[rows]
    n = e * torch.rsqrt((e * e).sum(-1, keepdim=True) * 0.125 + 1e-6)
    y = torch.empty_like(n)
    y[places.long()] = n
    expected = (y, y.argmax(-1, keepdim=True).int())
    return Case(listing(toy(), body, {"table": table}), (rows, places), expected, 1e-6)


def cache() -> Case:
    """A row is written to a state at a place that the input names, twice the same one; a counter begins at zero."""
    old, x = _random(6, 8, seed=9), _random(2, 8, seed=10)
    body = """\
input   x float32[2, 8]
input   place int64[2]
output  y float32[6, 8]
output  count int32[1]

core 0,0
  sram  cache  float32[6, 8]  0x0000 +192  always state = cache
  sram  steps  int32[1]       0x00c0 +4    always state
  sram  place  int64[2]       0x00e0 +16   0..6
  sram  x      float32[2, 8]  0x0100 +64   1..6
  @0   host    recv place from host.place  1  sram.w0
  @1   host    recv x from host.x          2  sram.w0
  @3   copy0   cache[place] = x            3  sram.r0 sram.w0
  @6   vector  steps = steps + 1           1  sram.r0 sram.w0
  @7   host    send cache to host.y        6  sram.r0
  @13  host    send steps to host.count    1  sram.r0
end 14
"""
    y = old.clone()
    y[4] = x[1]
    program = listing(toy(), body, {"cache": old})
    expected = (y, torch.ones(1, dtype=torch.int32))
    return Case(program, (x, torch.tensor([4, 4])), expected, 0.0, {"cache": y, "0,0 steps": expected[1]})


def off_chip() -> Case:
    """bfloat16 weights loaded from memory off the chip, a product turned, and a result stored and loaded again."""
    machine = toy(dram__cores=[[0, 0]], dram__size="1 MiB", dram__width="16 B", dram__latency=7)
    x, w = _random(3, 16, seed=10).bfloat16(), _random(8, 16, seed=11).bfloat16()
    body = """\
input   x bfloat16[3, 16]
output  y float32[3, 8]
dram    w  bfloat16[8, 16]  chip 0 = w
dram    s  float32[3, 8]  chip 0

core 0,0
  sram  x  bfloat16[3, 16]  0x0000 +96   0..72
  sram  w  bfloat16[8, 16]  0x0060 +256  7..72
  sram  y  float32[3, 8]    0x0160 +96   23..79
  sram  z  float32[3, 8]    0x01c0 +96   85..94
  @0   dram    load w from dram.w    16  sram.w0
  @0   host    recv x from host.x    3   sram.w0
  @23  matrix  y = x · w^T           49  sram.r0 sram.w0
  @72  dram    store y to dram.s     6   sram.r0
  @78  dram    load z from dram.s[0:3, :]  6  sram.w0
  @91  host    send z to host.y      3   sram.r0
end 94
"""
    return Case(listing(machine, body, {"w": w}), (x,), (x.float() @ w.float().T,), 1e-6)


def softmax_of_a_stride() -> Case:
    """Every second column of each head, through softmax, and turned; two read ports and four banks."""
    machine = toy(sram__banks=4, sram__read_ports=2, sram__write_ports=2, sram__width="16 B", vector__lanes=4)
    x = _random(2, 3, 8, seed=12)
    body = """\
input   x float32[2, 3, 8]
output  y float32[2, 4, 3]

core 0,0
  sram  x  float32[2, 3, 8]  0x0000 +192  0..24
  sram  a  float32[3, 4]     0x4000 +48   6..30
  sram  b  float32[3, 4]     0x4040 +48   15..36
  sram  c  float32[3, 4]     0x4080 +48   24..39
  sram  d  float32[3, 4]     0x40c0 +48   30..42
  sram  y  float32[2, 4, 3]  0x8000 +96   36..45
  @0   host    recv x from host.x  6  sram.w0 sram.w1
  @6   vector  a = exp(x[0, :, 0:8:2] - max(x[0, :, 0:8:2]))  9  sram.r0 sram.w0
  @15  vector  b = exp(x[1, :, 0:8:2] - max(x[1, :, 0:8:2]))  9  sram.r0 sram.w0
  @24  vector  c = a / sum(a)  6  sram.r0 sram.w0
  @30  vector  d = b / sum(b)  6  sram.r0 sram.w0
  @36  copy0   y[0] = c^T  3  sram.r0 sram.w0
  @39  copy0   y[1] = d^T  3  sram.r0 sram.w0
  @42  host    send y to host.y  3  sram.r0 sram.r1
end 45
"""
    expected = torch.softmax(x[..., ::2], -1).transpose(-1, -2)
    return Case(listing(machine, body), (x,), (expected,), 1e-6)


def over_chips() -> Case:
    """A quantised value crosses two chips and comes back; the link between them drifts by up to three cycles."""
    chips = {
        "chips__count": 2,
        "chips__topology": "ring",
        "chips__width": "4 B",
        "chips__latency": 5,
        "chips__jitter": 3,
    }
    machine = toy(**chips, chips__gates=[[0, 1]])
    x = _random(2, 16, seed=13)
    body = """\
input   x float32[2, 16]
output  y float32[2, 16]

core 0,0
  sram  x  float32[2, 16]  0x0000 +128  0..9
  sram  q  int8[2, 16]     0x0080 +32   4..17
  sram  r  int8[2, 16]     0x00a0 +32   45..59
  sram  y  float32[2, 16]  0x00c0 +128  53..61
  @0   host    recv x from host.x  4  sram.w0
  @4   vector  q = x * 20.0        4  sram.r0 sram.w0
  @8   east    send q to 1:1,0     8  sram.r0 link 0,0>0,1>1:0,1>1:0,0>1:1,0
  @45  east    recv r from 1:1,0   8  sram.w0
  @53  vector  y = r * 0.05        4  sram.r0 sram.w0
  @57  host    send y to host.y    4  sram.r0

core 1:1,0
  sram  q  int8[2, 16]  0x0000 +32  22..31
  sram  n  int8[2, 16]  0x0020 +32  30..39
  @22  north   recv q from 0,0   8  sram.w0
  @30  vector  n = neg(q)        1  sram.r0 sram.w0
  @31  north   send n to 0,0     8  sram.r0 link 1:1,0>1:0,0>1:0,1>0,1>0,0
end 61
"""
    expected = (-(x * 20.0).round().clamp(-128, 127).to(torch.int8)).float() * 0.05
    return Case(listing(machine, body), (x,), (expected,))


def on_the_host() -> Case:
    """The inverse and the factors of x, which the host computes; y is their product and a sum."""
    x = _random(4, 4, seed=9) + 3 * torch.eye(4)
    machine = toy(host__latency=20, host__rate="16 B", chip__grid=[1, 1])
    body = """\
input   x float32[4, 4]
output  y float32[4, 4]
host    u float32[4, 4]
host    v float32[4, 4]
host    q float32[4, 4]
host    r float32[4, 4]

core 0,0
  sram  x  float32[4, 4]  0x0000 +64  0..4
  sram  v  float32[4, 4]  0x0040 +64  32..74
  sram  q  float32[4, 4]  0x0080 +64  64..74
  sram  r  float32[4, 4]  0x00c0 +64  66..74
  sram  y  float32[4, 4]  0x0100 +64  68..76
  @0   host    recv x from host.x                          2   sram.w0
  @2   host    send x to host.u                            2   sram.r0
  @4   call    v _ = aten.linalg_inv_ex.default(u, check_errors=false)  28  -
  @32  host    recv v from host.v                          2   sram.w0
  @32  call    q r = aten.linalg_qr.default(u, "reduced")  32  -
  @64  host    recv q from host.q                          2   sram.w0
  @66  host    recv r from host.r                          2   sram.w0
  @68  vector  y = v + q * r                               6   sram.r0 sram.w0
  @74  host    send y to host.y                            2   sram.r0
end 76
"""
    q, r = torch.linalg.qr(x)
    return Case(listing(machine, body), (x,), (torch.linalg.inv(x) + q * r,))


CASES: dict[str, Callable[[], Case]] = {
    "mlp on one core": mlp_on_one,
    "int8 on two cores": int8_on_two,
    "multicast": multicast,
    "ring": ring,
    "gather and scatter": gather_and_scatter,
    "off-chip memory": off_chip,
    "softmax of a stride": softmax_of_a_stride,
    "two chips": over_chips,
    "operators at the host": on_the_host,
}
