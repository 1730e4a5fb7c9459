"""Who takes part where nobody names executors, and that it is told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera.executors import default
from tessera.pipeline.options import Options
from tessera.store.key import check_executors
from tessera.tools import doctor
from tessera.util.config import override


def test_a_list_is_read_as_it_stands():
    assert default.named("sdpa,aten") == ("sdpa", "aten")
    assert default.named("") == ()


def test_kernels_take_part_where_they_can_be_made(monkeypatch: pytest.MonkeyPatch):
    assert Options.of(None, None, None).executors == default.WITH_KERNELS
    with override(executors="aten"):
        assert Options.of(None, None, None).executors == ("aten",)
    monkeypatch.setattr(default, "missing", lambda target: f"no {target}")
    options = Options.of(None, None, None)
    assert options.executors == default.PLAIN and options.recompute == "views"
    told = {check.name: check.found for check in doctor.checks()}
    assert "in the default list" in told["executor sdpa"] and "named by" in told["executor tile"]


@pytest.mark.parametrize("names", [default.WITH_KERNELS, default.PLAIN], ids=str)
def test_programs_of_those_that_take_part_by_default_can_be_stored(names: tuple[str, ...]):
    """One that names its operators counts as a user's: nothing would be kept on disk, and every layer compiled."""
    check_executors(names)


def test_a_program_is_fused_by_default():
    torch._dynamo.reset()

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x * 2, -1)

    fast, x = tessera.jit(f, strict=True), torch.randn(4, 8)
    torch.testing.assert_close(fast(x), f(x))
    (graph,) = tessera.explain(fast).graphs
    assert any(region.fused and region.executor == "tile" for region in graph.regions)
    assert "in the default list" in {check.name: check.found for check in doctor.checks()}["executor tile"]
