"""flex_attention in compiled programs, against PyTorch's own, which runs it unfused."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

import tessera
from tessera.util.config import override

B, H, T, D = 2, 4, 24, 8


@pytest.fixture(autouse=True)
def strict():  # noqa: ANN201
    torch._dynamo.reset()
    torch.manual_seed(0)
    with override(strict=True):
        yield


def draw(heads: int = H, batch: int = B, length: int = T, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, heads, length, D, dtype=dtype)


BIAS = torch.randn(H, T)
DOCUMENT = torch.arange(T) // 7


def causal(b, h, q, k):  # noqa: ANN001, ANN201
    return q >= k


def same_document(b, h, q, k):  # noqa: ANN001, ANN201
    return (DOCUMENT[q] == DOCUMENT[k]) & (q >= k)


def nothing(b, h, q, k):  # noqa: ANN001, ANN201
    return (q < 0) | ((q > 4) & (k < 9))


SCORES = {
    "relative": lambda s, b, h, q, k: s + (q - k),
    "by head": lambda s, b, h, q, k: s * (h + 1) / (b + 1),
    "soft cap": lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    "buffer": lambda s, b, h, q, k: s + BIAS[h, k] - BIAS[h][q],
    "conditional": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
}
MASKS = {"causal": causal, "documents": same_document, "rows that see nothing": nothing}


def compared(f, *args):  # noqa: ANN001, ANN002, ANN202
    with torch.no_grad():
        want = f(*args)
        fast = tessera.jit(f)
        assert_close(fast(*args), want, atol=1e-5, rtol=1e-5)
    assert not tessera.explain(fast).breaks


@pytest.mark.parametrize("name", SCORES)
def test_a_function_of_the_score(name: str) -> None:
    compared(lambda q, k, v: flex_attention(q, k, v, score_mod=SCORES[name]), draw(), draw(), draw())


@pytest.mark.parametrize("name", MASKS)
def test_a_mask(name: str) -> None:
    mask = create_block_mask(MASKS[name], B, H, T, T, device="cpu")
    compared(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), draw(), draw(), draw())


def test_a_mask_that_all_sequences_and_heads_share() -> None:
    mask = create_block_mask(causal, None, None, T, T, device="cpu")
    compared(lambda q, k, v: flex_attention(q, k, v, SCORES["relative"], mask), draw(), draw(), draw())


def test_fewer_heads_of_keys_and_one_sequence_for_all() -> None:
    mask = create_block_mask(causal, B, None, T, T, device="cpu")
    f = lambda q, k, v: flex_attention(q, k, v, SCORES["by head"], mask, enable_gqa=True, scale=0.3)  # noqa: E731
    compared(f, draw(), draw(heads=2, batch=1), draw(heads=2, batch=1))


def test_other_lengths_and_the_logarithm_of_the_sum() -> None:
    f = lambda q, k, v: flex_attention(q, k, v, SCORES["relative"], return_lse=True)  # noqa: E731
    compared(f, draw(length=5), draw(), draw())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types(dtype: torch.dtype) -> None:
    q, k, v = (draw(dtype=dtype) for _ in range(3))
    fast = tessera.jit(lambda q, k, v: flex_attention(q, k, v, SCORES["relative"]))
    with torch.no_grad():
        got, want = fast(q, k, v), flex_attention(q, k, v, SCORES["relative"])
    assert got.dtype == want.dtype
    assert_close(got, want)


def test_a_gradient() -> None:
    """PyTorch has none on CPUs; the same attention in plain words does."""
    q, k, v = (draw(dtype=torch.float64).requires_grad_() for _ in range(3))
    places = torch.arange(T)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * D**-0.5 + (places[:, None] - places)
        return scores.masked_fill(places[:, None] < places, -float("inf")).softmax(-1) @ v

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = (None,) * 12 + (causal,)
        return torch.ops.higher_order.flex_attention(q, k, v, SCORES["relative"], mask, D**-0.5, {})[0]

    got, grads = tessera.value_and_grad(lambda *x: attention(*x).square().sum(), (0, 1, 2))(q, k, v)
    want = plain(q, k, v).square().sum()
    assert_close(got, want)
    assert_close(grads, torch.autograd.grad(want, (q, k, v)))
