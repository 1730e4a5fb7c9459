"""Writes join the attention that reads them only where nobody could tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tessera
from tessera.ops.rows import limits


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were kernels for the CPU: the operators' meaning runs in their place."""
    monkeypatch.setattr(limits, "runs", lambda device: True)
    torch._dynamo.reset()
    torch.manual_seed(0)


class Step(nn.Module):
    """Attention over a cache; `form` says what else happens to the caches."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: Tensor, new: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        other = at
        keys.index_copy_(2, at, new)
        between = keys.sum() if self.form == "read between" else new.sum()
        if self.form == "another place":
            other = at + 1
        values.index_copy_(2, other, new)
        if self.form == "written twice":
            values.index_copy_(2, at, 2 * new)
        if self.form == "written after":
            keys.mul_(0.5)
        seen = torch.arange(keys.shape[2]) <= at[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen), between


FORMS = {"": True, "written twice": False, "read between": False, "another place": False, "written after": False}


@pytest.mark.parametrize("form", FORMS)
def test_writes_join(form: str) -> None:
    q, new = (torch.randn(2, 4, 1, 32, dtype=torch.bfloat16) for _ in range(2))
    caches = [torch.randn(2, 4, 16, 32, dtype=torch.bfloat16) for _ in range(2)]
    others = [cache.clone() for cache in caches]
    fast = tessera.jit(Step(form), executors=["rows", "tile", "sdpa", "aten"], strict=True)
    with torch.no_grad():
        found = fast(q, new, *caches, torch.tensor([5]))
        wanted = Step(form)(q, new, *others, torch.tensor([5]))
    for one, two in zip((*found, *caches), (*wanted, *others), strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.02)
    final = [str(eqn.op) for eqn in tessera.stages(fast)["cached_attention"].trace.equations]
    assert ("rows.cached_attention" in final) == FORMS[form], final
