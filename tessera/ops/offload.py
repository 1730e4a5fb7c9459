"""Operators that move a tensor to the host and back while other work goes on.

    to_host(x)         begins to copy x into host memory; what it gives may be handed on, not read
    sent(h, x)         h, once that copy is done; until here x must stay as it is
    from_host(h, dev)  begins to copy h back to a device; what it gives may not be read yet
    arrived(x)         x, once that copy is done

Each pair is one copy: what begins it stands early in a program, what waits for it stands late. Here stands what they
compute, in PyTorch, with nothing going on beside it; `runtime/transfer` runs them on a stream of their own on CUDA.
Strides stay as they are, so these take tensors without gaps. `passes/memory/offload` finds the places for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.ops.op import declare

library = torch.library.Library("tessera", "FRAGMENT")
library.define("to_host(Tensor x) -> Tensor")
library.define("sent(Tensor(a) h, Tensor x) -> Tensor(a)")
library.define("from_host(Tensor h, Device device) -> Tensor")
library.define("arrived(Tensor(a) x) -> Tensor(a)")

TO_HOST = torch.ops.tessera.to_host.default
SENT = torch.ops.tessera.sent.default
FROM_HOST = torch.ops.tessera.from_host.default
ARRIVED = torch.ops.tessera.arrived.default


def like(x: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    """Memory for a copy of x."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, pin_memory=pinned)


def to_host(x: Tensor) -> Tensor:
    return like(x, torch.device("cpu")).copy_(x)


def from_host(h: Tensor, device: torch.device) -> Tensor:
    return like(h, device).copy_(h)


library.impl("to_host", to_host, "CompositeExplicitAutograd")
library.impl("from_host", from_host, "CompositeExplicitAutograd")
library.impl("sent", lambda h, x: h, "CompositeExplicitAutograd")
library.impl("arrived", lambda x: x, "CompositeExplicitAutograd")
torch.library.register_fake("tessera::to_host", lambda x: like(x, torch.device("cpu")), lib=library)
torch.library.register_fake("tessera::from_host", like, lib=library)
torch.library.register_fake("tessera::sent", lambda h, x: h, lib=library)
torch.library.register_fake("tessera::arrived", lambda x: x, lib=library)

for _name in ("to_host", "from_host"):
    declare(f"tessera.{_name}", "transfer", cost=lambda eqn: 0.0)
for _name in ("sent", "arrived"):
    declare(f"tessera.{_name}", "transfer", free=True)
