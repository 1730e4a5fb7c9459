"""Copies that only attention reads go, operands that no fused kernel reads are copied; results keep their values and
their layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of
from torch import Tensor

from tessera.ir.equation import Equation
from tessera.ir.interp import run
from tessera.ir.trace import Trace
from tessera.ir.verify import verify
from tessera.passes.patterns import attention_operands as passes
from tessera.passes.patterns.attention_operands import attention_operands

SHAPE = (2, 5, 32)  # batch, tokens, four heads of eight


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 4, -1).transpose(1, 2)


def count(trace: Trace, name: str) -> int:
    return sum(eqn.opname == name for eqn in trace.equations)


def whisper(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(*(heads(x * 2).contiguous() for x in (q, k, v)))
    return y.transpose(1, 2).contiguous().view(q.shape) + q


@pytest.fixture(autouse=True)
def here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU."""
    monkeypatch.setattr(passes, "DEVICES", ("cpu",))


def test_copies_go() -> None:
    args = [torch.randn(SHAPE).bfloat16() for _ in range(3)]
    before = trace_of(whisper, *args)
    after = attention_operands(before)
    verify(after)
    assert count(before, "contiguous") == 4 and count(after, "contiguous") <= 1
    for got, want in zip(run(after, *args), run(before, *args), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def untouched(fn, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> bool:  # noqa: ANN001
    trace = trace_of(fn, *(torch.randn(shape, dtype=dtype) for shape in shapes))
    return attention_operands(trace) is trace


def test_what_kernels_cannot_read_is_copied_still() -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    assert untouched(lambda x: x.clone() + 1, ())
    assert untouched(whisper, SHAPE, SHAPE, SHAPE, dtype=torch.float32)
    assert untouched(whisper, (2, 5, 36), (2, 5, 36), (2, 5, 36))  # heads of nine: rows begin at odd addresses
    assert untouched(lambda x: attend(x.transpose(2, 3).contiguous()), (2, 4, 8, 16))  # a head's numbers lie apart
    assert untouched(lambda x: attend(x.expand(2, 4, 8, 16).contiguous()), (2, 1, 8, 16))  # heads that are repeated
    assert untouched(lambda x: (y := heads(x).contiguous()).exp() + attend(y), SHAPE)  # somebody else reads the copy
    assert untouched(lambda x: (attend(y := heads(x).contiguous()), y), SHAPE)  # the caller gets it
    assert not untouched(lambda x: attend(heads(x).contiguous()), SHAPE)


def attention_of(trace: Trace) -> Equation:
    (eqn,) = (eqn for eqn in trace.equations if eqn.opname == "scaled_dot_product_attention")
    return eqn


def behind_a_convolution(x: Tensor) -> Tensor:
    """Channels are heads, and a head's numbers lie as far apart as an image has points."""
    batch, width, side, _ = x.shape
    q, k, v = (x * 2).reshape(batch, 3, 2, width // 6, side * side).transpose(-1, -2).unbind(1)
    y = F.scaled_dot_product_attention(q, k, v)
    return y.transpose(-1, -2).reshape(batch, width // 3, side, side)


def shared_keys(q: Tensor, k: Tensor) -> Tensor:
    keys = k.transpose(-1, -2).expand(q.shape)
    return F.scaled_dot_product_attention(q, keys, keys)


@pytest.mark.parametrize(
    ("program", "shapes", "copied"),
    [(behind_a_convolution, [(2, 48, 4, 4)], 3), (shared_keys, [(2, 4, 6, 8), (2, 1, 8, 6)], 1)],
    ids=["convolution", "shared keys"],
)
def test_numbers_of_a_head_that_lie_apart_are_copied(program: Callable, shapes: list, copied: int) -> None:
    args = [torch.randn(shape).bfloat16() for shape in shapes]
    before = trace_of(program, *args)
    after = attention_operands(before)
    verify(after)
    assert all(v.tensor.stride[-1] == 1 for v in attention_of(after).inputs())
    clones = [eqn.out for eqn in after.equations if eqn.opname == "clone"]
    assert len(clones) >= copied and all(v.numel() <= max(x.numel() for x in args) for v in clones)
    for got, want in zip(run(after, *args), run(before, *args), strict=True):
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1.6e-2)  # other kernels, in 16 bits
        assert got.stride() == want.stride()


def test_heads_that_no_fused_kernel_takes_are_left_as_they_lie() -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(2, 3),) * 3)

    assert not untouched(attend, (2, 4, 8, 16))
    assert untouched(attend, (2, 4, 9, 16))  # heads of nine
    assert untouched(attend, (2, 4, 8, 16), dtype=torch.float32)


def test_a_copy_that_nobody_reads_is_no_hindrance() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads(q).contiguous()
        return whisper(q, k, v)

    args = [torch.randn(SHAPE).bfloat16() for _ in range(3)]
    trace = trace_of(program, *args)
    torch.testing.assert_close(run(attention_operands(trace), *args), run(trace, *args))
