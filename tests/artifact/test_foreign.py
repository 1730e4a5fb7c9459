"""Operators of other libraries: an artifact holds Tessera's own in their places, or refuses them by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tessera
from tessera.ops.grouped import grouped_mm
from tessera.util.errors import CaptureError

pytest.importorskip("transformers.integrations.moe")


class Experts(nn.Module):
    """Two layers of four experts; a token has one. `rows`: how many of the tokens experts take at most."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        order = choice.argsort(stable=True)
        ends = torch.bincount(choice, minlength=5).cumsum(0)[:4]  # whoever chose the fifth gets nothing
        up = torch.ops.transformers.grouped_mm_fallback(x[order], self.up, ends)
        return torch.ops.transformers.grouped_mm_fallback(up.relu(), self.down, ends)[order.argsort()]


def test_grouped_products_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = Experts().eval(), torch.randn(6, 8)
    choice = torch.tensor([3, 0, 4, 0, 3, 1])
    tessera.export(net, (x, choice), tmp_path / "m.tess", dynamic={"x": {0: "n"}, "choice": {0: "n"}})
    loaded = tessera.load(tmp_path / "m.tess")
    operators = {str(eqn.op) for eqn in loaded.entries["main"].program.trace.equations}
    assert "tessera.grouped_mm.default" in operators and not any("transformers" in name for name in operators)
    with torch.no_grad():
        for args in ((x, choice), (x[:3], torch.full([3], 4)), (torch.randn(9, 8), torch.arange(9) % 5)):
            torch.testing.assert_close(loaded(*args), net(*args))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_our_grouped_product_is_that_of_transformers(dtype: torch.dtype) -> None:
    rows, stack = torch.randn(7, 5).to(dtype), torch.randn(3, 5, 4).to(dtype)
    for ends in ([7, 7, 7], [0, 2, 7], [1, 1, 4], [0, 0, 0]):
        args = rows, stack, torch.tensor(ends, dtype=torch.int32)
        assert torch.equal(grouped_mm(*args), torch.ops.transformers.grouped_mm_fallback(*args))
    assert grouped_mm(rows[:0], stack, torch.zeros(3, dtype=torch.int64)).shape == (0, 4)
    torch.library.opcheck(grouped_mm, args)


def test_others_are_refused_by_name(tmp_path: Path) -> None:
    @torch.library.custom_op("tests_foreign::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    with pytest.raises(CaptureError, match="tests_foreign.twice.default, which is another library's"):
        tessera.export(lambda x: twice(x), (torch.ones(3),), tmp_path / "m.tess")
