"""Functional tracing: structures in and out, what is closed over, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from tessera.frontends.functional.trace import trace_function
from tessera.ir import fake
from tessera.ir.interp import run
from tessera.ir.record import recording
from tessera.ir.verify import verify
from tessera.util.errors import CaptureError


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float


pytree.register_dataclass(Batch)


def test_structures_numbers_and_names() -> None:
    def f(b: Batch, d: dict, *, k: torch.Tensor) -> dict:
        return {"out": (b.x * b.scale + d["w"], "text"), "k": k * 2}

    b, d, k = Batch(torch.randn(3), 2.0), {"w": torch.randn(3)}, torch.randn(2)
    traced = trace_function(f, (b, d), {"k": k})
    verify(traced.trace)
    assert [v.name for v in traced.trace.inputs] == ["x", "w", "k"]
    got = traced.pack(run(traced.trace, *traced.args))
    assert_close(got["out"][0], b.x * 2 + d["w"])
    assert got["out"][1] == "text"
    assert_close(got["k"], k * 2)


def test_what_is_closed_over_stays_by_reference() -> None:
    net = torch.nn.Linear(3, 2)
    traced = trace_function(net, (torch.randn(4, 3),))
    held = list(traced.trace.constants.values())
    assert any(h is net.weight for h in held) and any(h is net.bias for h in held)
    assert traced.captured == ()
    with torch.no_grad():
        net.weight.zero_()
    (out,) = run(traced.trace, torch.ones(4, 3))
    assert_close(out, net.bias.expand(4, 2))


def test_a_tensor_of_an_outer_recording_becomes_an_input() -> None:
    seen = {}

    def outer(x: torch.Tensor) -> torch.Tensor:
        seen["inner"] = trace_function(lambda y: x * y, (torch.ones(3),))
        seen["x"] = x
        assert recording() is not None
        return x + 1

    trace_function(outer, (torch.randn(3),))
    inner = seen["inner"]
    assert len(inner.trace.inputs) == 2 and inner.captured[0] is seen["x"]
    assert inner.mode is fake.default_mode()


def test_high_level_operators_stay_whole() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU())
    traced = trace_function(net, (torch.randn(2, 4),))
    assert [str(e.op) for e in traced.trace.equations] == [
        "aten.linear.default",
        "aten.layer_norm.default",
        "aten.gelu.default",
    ]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.sum().item(),
        lambda x: x[: int(x.sum())],
    ],
)
def test_values_are_not_known(f: object) -> None:
    with pytest.raises(CaptureError, match=r"test_functional.py:\d+: .*torch.cond"):
        trace_function(f, (torch.randn(3),))  # type: ignore[arg-type]


def test_writes_to_shared_memory_are_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(CaptureError, match="shares"):
        trace_function(lambda a, b: a.mul_(2) + b, (x, x[:]))
    with pytest.raises(CaptureError, match="closes over"):
        trace_function(lambda a: x.add_(a), (torch.ones(4),))


def test_autocast_around_the_call_is_recorded() -> None:
    net = torch.nn.Linear(3, 2)
    with torch.autocast("cpu", torch.bfloat16):
        traced = trace_function(net, (torch.randn(4, 3),))
    assert traced.trace.equations[-1].out.dtype == torch.bfloat16
