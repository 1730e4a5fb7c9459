"""Autocast on traces is PyTorch's own policy."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from tessera.frontends.functional.trace import trace_function
from tessera.ir.interp import run
from tessera.ir.verify import verify
from tessera.transforms.autocast import autocast


def test_casts_are_those_of_torch_autocast() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(net(x), torch.ones(3, 2))

    traced = trace_function(f, (x,))
    cast = verify(autocast(traced.trace, "cpu", torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = f(x)
    (out,) = run(cast, x)
    assert out.dtype == want.dtype
    assert_close(out.detach(), want)
    assert [v.name for v in cast.inputs] == [v.name for v in traced.trace.inputs]
    assert all(e.source.file == traced.trace.equations[0].source.file for e in cast.equations)
