"""Products over odd sizes are padded where matrix units want aligned rows: same values, fewer slow kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tessera
from tessera.ir.equation import Value
from tessera.ir.types import type_of
from tessera.passes.patterns import align
from tessera.util.config import override

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align, "DEVICES", ("cpu",))
    monkeypatch.setattr(align.Product, "pays", lambda *given: True)
    torch._dynamo.reset()


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


def products(fast: object, stage: str) -> list[tuple[str, tuple[int, ...]]]:
    trace = next(s.trace for s in tessera.stages(fast) if s.name.endswith(stage))
    return [(eqn.opname, tuple(eqn.out.shape)) for eqn in trace.equations if eqn.opname in align.PRODUCTS]  # type: ignore[misc]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("classes", "width"), [(21, 16), (16, 13), (21, 13)])
def test_a_layer_in_inference(classes: int, width: int, biased: bool) -> None:
    x, w, b = rand(2, 5, width), rand(classes, width), rand(classes) if biased else None
    fast = tessera.jit(F.linear, executors=["tile", "aten"], strict=True)
    with torch.no_grad():
        y = fast(x, w, b)
    wanted = F.linear(x, w, b)
    assert y.stride() == wanted.stride()
    torch.testing.assert_close(y, wanted)
    assert products(fast, "align") == [("linear", (2, 5, 24 if classes == 21 else 16))]


@pytest.mark.parametrize(("classes", "read", "stays"), [(22, False, True), (22, True, False), (21, False, False)])
def test_what_leaves_the_program_is_not_there_twice(
    classes: int, read: bool, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that gives a result of the program is a kernel of ours, unless it could not store pairs of numbers."""
    monkeypatch.setattr(align, "LARGE", 1)
    monkeypatch.setattr(align, "ROWS_OF_TILES", 1)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).sin() if read else F.linear(x, w)

    x, w = rand(2, 5, 16), rand(classes, 16)
    fast = tessera.jit(layer, executors=["tile", "aten"], strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, w), layer(x, w), rtol=2e-2, atol=2e-2)
    assert stays is not any(s.name.endswith("align") for s in tessera.stages(fast))


def test_gradients() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.tanh(), w).sin().float().sum()

    x, w = rand(10, 16).requires_grad_(), rand(21, 16).requires_grad_()
    fast = tessera.jit(loss, executors=["tile", "aten"], strict=True)
    found, wanted = (torch.autograd.grad(fn(x, w), (x, w)) for fn in (fast, loss))
    for got, want in zip(found, wanted, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert products(fast, "align") == [("linear", (10, 24)), ("mm", (10, 16)), ("mm", (24, 16))]


@pytest.mark.parametrize(
    ("dtype", "classes"), [(torch.float32, 21), (BF16, 24)], ids=["four bytes are as slow anyway", "aligned"]
)
def test_what_stays(dtype: torch.dtype, classes: int) -> None:
    fast = tessera.jit(F.linear, executors=["tile", "aten"], strict=True)
    with torch.no_grad():
        fast(rand(4, 16, dtype=dtype), rand(classes, 16, dtype=dtype))
    assert not any(s.name.endswith("align") for s in tessera.stages(fast))


def test_only_where_it_saves_more_than_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def saves(rows: int, classes: int, width: int) -> bool:
        sizes = {align.ROWS: rows, align.DEPTH: width, align.COLUMNS: classes}
        with torch.device("meta"):
            x, w = (torch.empty(n, width, dtype=BF16) for n in (rows, classes))
        product = align.Product(
            _operand(x, (align.ROWS, align.DEPTH)),
            _operand(w, (align.DEPTH, align.COLUMNS)),
            sizes,
            {align.ROWS: 0, align.DEPTH: 0, align.COLUMNS: -classes % 8},
        )
        with override(machine="h200"):
            return product.pays(2, torch.device("cuda"))

    assert saves(2048, 51865, 512) and saves(8192, 30522, 1024)
    assert not saves(16, 1001, 512) and not saves(8, 51865, 512)
    assert not saves(8192, 30524, 64)


def _operand(x: Tensor, dims: tuple[str, str]) -> align.Operand:
    return align.Operand(Value("x", type_of(x)), dims, False)
