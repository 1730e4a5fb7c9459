"""Dropout draws what eager draws, however its argument lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera

BASE = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
LAYOUTS: dict[str, Tensor] = {
    "rows of one": BASE[:, :1].expand(4, 3, 2),
    "one batch": BASE[:1].expand(4, 3, 2),
    "one column": BASE[..., :1].expand(4, 3, 2),
    "transposed": BASE.transpose(0, 2),
    "expanded and transposed": BASE[0, 0].expand(4, 3, 2).transpose(0, 2),
}
DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.5, True),
}


@pytest.mark.parametrize("frontend", ["dynamo", "functional"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DROPOUTS)
def test_like_eager(name: str, layout: str, frontend: str) -> None:
    x = LAYOUTS[layout].detach().requires_grad_()
    torch.manual_seed(0)
    want = DROPOUTS[name](x)
    torch.manual_seed(0)
    got = tessera.jit(DROPOUTS[name], executors=["aten"], frontend=frontend)(x)
    assert torch.equal(got, want) and got.stride() == want.stride()
