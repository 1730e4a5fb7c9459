"""Masks that say nothing go, causal ones are named, others are laid out for fused kernels; values stay eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import tessera
from tessera.ir import fake
from tessera.ir.builder import Builder, aten
from tessera.ir.printer import compile_trace
from tessera.ir.record import record
from tessera.ir.trace import Trace
from tessera.ir.types import TensorType, contiguous_strides
from tessera.ir.verify import verify
from tessera.passes.patterns.attention_mask import attention_mask

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 40, 8  # more than a thousand elements of mask: `fold` leaves those alone
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]


def before() -> Tensor:
    queries, keys = positions()
    return keys <= queries


EVERYTHING: dict[str, Callable[[], Tensor]] = {
    "ones": lambda: torch.ones(TOKENS, TOKENS, dtype=torch.bool),
    "positions that are not negative": lambda: (positions()[0] >= 0).expand(BATCH, 1, TOKENS, TOKENS),
    "zeros": lambda: torch.zeros(BATCH, 1, 1, TOKENS),
    "where nothing is masked": lambda: torch.where(positions()[0] >= 0, 0.0, -torch.inf).expand(TOKENS, TOKENS),
    "or": lambda: before() | ~before(),
}
CAUSAL: dict[str, Callable[[], Tensor]] = {
    "compared positions": before,
    "a triangle": lambda: torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(),
    "for each head": lambda: before().expand(BATCH, HEADS, TOKENS, TOKENS),
    "minus infinity above": lambda: torch.full((TOKENS, TOKENS), -torch.inf).triu(1),
    "filled": lambda: torch.zeros(TOKENS, TOKENS).masked_fill(~before(), -torch.inf),
    "as modules do": lambda: torch.nn.Transformer.generate_square_subsequent_mask(TOKENS),
}
KEPT: dict[str, Callable[[], Tensor]] = {
    "a window": lambda: before() & (positions()[1] > positions()[0] - 5),
    "the smallest number": lambda: torch.zeros(TOKENS, TOKENS).masked_fill(~before(), torch.finfo(torch.float32).min),
    "strictly before, and itself as last": lambda: before().roll(1, 0),
    "a bias": lambda: (positions()[1] - positions()[0]).float(),
    "by keys": lambda: (torch.arange(TOKENS) % 3 > 0).expand(TOKENS, TOKENS),
}


def draw(tokens: int = TOKENS) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(BATCH, tokens, HEADS, WIDTH, generator=generator).transpose(1, 2) for _ in range(3))
    return tuple(x.requires_grad_() for x in made)


def attends(mask: Callable[[], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask()).transpose(1, 2).flatten(2)


def agrees(fn: Callable[..., Tensor]) -> list[str]:
    """Values and gradients are eager's. Out: the attention of the clean program, as it is printed."""
    fast, given, expected = tessera.jit(fn), draw(), draw()
    out, reference = fast(*given), fn(*expected)
    assert_close(out, reference)
    assert out.stride() == reference.stride()
    out.sin().sum().backward()
    reference.sin().sum().backward()
    for x, y in zip(given, expected, strict=True):
        assert_close(x.grad, y.grad)
    lines = str(tessera.stages(fast)["dce"].trace).splitlines()
    return [line.split("#")[0] for line in lines if "aten.scaled_dot_product_attention" in line]


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_mask_that_allows_everything_is_left_out(name):
    (line,) = agrees(attends(EVERYTHING[name]))
    assert line.strip().endswith("(q, k, v)")


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_named(name):
    (line,) = agrees(attends(CAUSAL[name]))
    assert line.strip().endswith("(q, k, v, None, 0.0, True)")


@pytest.mark.parametrize("name", KEPT)
def test_any_other_mask_stays(name):
    (line,) = agrees(attends(KEPT[name]))
    assert "None" not in line and line.count(",") == 3


def test_a_mask_that_is_given_stays():
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    fast = tessera.jit(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m))
    q, k, v = draw()
    fast(q, k, v, mask)
    mask = before()
    assert_close(fast(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))


def test_chance_is_not_known():
    (line,) = [line for line in agrees_once(lambda: torch.rand(TOKENS, TOKENS) >= 0) if "(" in line]
    assert "None" not in line and line.count(",") == 3


def agrees_once(mask: Callable[[], Tensor]) -> list[str]:
    fast = tessera.jit(attends(mask))
    assert_close(fast(*draw()), attends(mask)(*draw()))
    lines = str(tessera.stages(fast)["dce"].trace).splitlines()
    return [line.split("#")[0] for line in lines if "aten.scaled_dot_product_attention" in line]


def test_a_triangle_over_more_keys_than_queries_is_not_causal_order():
    def fn(q, k, v):
        mask = torch.ones(TOKENS - 4, TOKENS, dtype=torch.bool).tril(4)
        return F.scaled_dot_product_attention(q[:, :, 4:], k, v, mask)

    assert "True" not in agrees(fn)[0]


DYNAMIC: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "everything": (lambda q, k: (q >= 0) & (k > -1), "(q, k, v)"),
    "causal": (lambda q, k: (k <= q) & (q >= 0), "(q, k, v, None, 0.0, True)"),
    "causal, turned": (lambda q, k: (k.transpose(0, 1) < q.transpose(0, 1) + 1).transpose(0, 1), "None, 0.0, True)"),
    "strictly before": (lambda q, k: (k < q) | (k == 0), ""),
    "a window": (lambda q, k: (k <= q) & (k > q - 5), ""),
    "later": (lambda q, k: k >= q, ""),
    "shifted": (lambda q, k: k <= q + 1, ""),
    "one text": (lambda q, k: (k <= q) & same_text(q, k, 1), "None, 0.0, True)"),
    "every second place is a text": (lambda q, k: (k <= q) & same_text(q, k, 2), ""),
    "looked up by row": (lambda q, k: k[torch.arange(1)[:, None], k] <= q, "None, 0.0, True)"),
    "joined": (lambda q, k: torch.cat([k[:, :1] - 1, k], 1)[:, 1:] <= q, "None, 0.0, True)"),
    "joined with a gap": (lambda q, k: torch.cat([k[:, :1] - 2, k], 1)[:, 1:] <= q, ""),
    "looked up": (lambda q, k: k[:, :].expand(2, -1)[torch.zeros_like(q), k] <= q, ""),
    "looked up by places": (lambda q, k: torch.cat([k, k[:, -1:] + 1], 1)[:, 1:][k * 0, k] <= q + 1, ""),
    "from the end": (lambda q, k: k[0][k - 1] <= q, ""),
    "never": (lambda q, k: (k <= q) & (k - k != 0), ""),
}


def same_text(q: Tensor, k: Tensor, step: int) -> Tensor:
    """As libraries find texts that are packed into a row: a new one begins where places do not go up by one."""
    places = torch.arange(0, step * k.shape[1], step)[None]
    text = (torch.diff(places, prepend=places[:, :1] - 1) != 1).cumsum(-1)
    row = torch.arange(1)[:, None]
    return text[row, q] == text[row, k]


@pytest.mark.parametrize("name", DYNAMIC)
def test_masks_over_sizes_that_are_symbols(name):
    mask, told = DYNAMIC[name]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        allowed = mask(places[:, None], places[None]).expand(q.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, allowed)

    fast = tessera.jit(fn, dynamic=True)
    for tokens in (12, 20):
        given = draw(tokens)
        assert_close(fast(*given), fn(*given))
    (stage,) = [s for s in tessera.stages(fast) if s.name == "dce"]
    (line,) = [x.split("#")[0].strip() for x in str(stage.trace).splitlines() if "scaled_dot_product" in x and "=" in x]
    assert line.endswith(told) if told else "None" not in line and line.count(",") == 3


def on_a_gpu(*shape: int, order: tuple[int, ...] | None = None) -> Tensor:
    """A tensor that no machine needs to have."""
    with fake.default_mode():
        order = order or tuple(range(len(shape)))
        whole = torch.empty([shape[d] for d in order], dtype=torch.bfloat16, device="cuda")
        return whole.permute([order.index(d) for d in range(len(shape))])


def mask_of(trace: Trace) -> TensorType:
    (eqn,) = [e for e in attention_mask(trace).equations if e.op is ATTENTION]
    return eqn.args[3].tensor


@pytest.mark.parametrize("repeated", [False, True])
def test_a_strided_mask_is_laid_out_along_the_keys_on_a_gpu(repeated):
    q, k, v = (on_a_gpu(BATCH, 4, 16, 8) for _ in range(3))
    mask = on_a_gpu(1, 4, 16, 16, order=(0, 2, 3, 1))

    def fn(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, mask.expand(BATCH, -1, -1, -1) if repeated else mask)

    builder = Builder("attends", fake.default_mode())
    trace, _ = record(fn, [q, k, v, mask], ["q", "k", "v", "mask"], lambda op: op is ATTENTION, builder)
    assert mask_of(trace).stride == ((0,) if repeated else (1024,)) + (256, 16, 1)
    assert mask_of(trace).shape == ((BATCH,) if repeated else (1,)) + (4, 16, 16)


@pytest.mark.parametrize("repeated", [False, True])
def test_layers_that_share_a_mask_of_truth_values_add_the_same_numbers_on_a_gpu(repeated):
    q, k, v = (on_a_gpu(BATCH, 4, 16, 8) for _ in range(3))
    with fake.default_mode():
        mask = torch.empty(BATCH, 1, 16, 16, dtype=torch.bool, device="cuda")

    def fn(q, k, v, mask):
        mask = mask.expand(-1, 4, -1, -1) if repeated else mask
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v, mask), k, v, mask)

    builder = Builder("attends", fake.default_mode())
    trace, _ = record(fn, [q, k, v, mask], ["q", "k", "v", "mask"], lambda op: op is ATTENTION, builder)
    after = attention_mask(trace)
    verify(after)
    one, two = (e.args[3] for e in after.equations if e.op is ATTENTION)
    assert one is two and one.dtype == torch.bfloat16 and one.tensor.stride[1] == (0 if repeated else 256)
    (made,) = [e for e in after.equations if e.opname == "where"]
    assert made.out.numel() == BATCH * 16 * 16  # no head has its own


@pytest.mark.parametrize("ends", ["transposed", "flattened", "as it is"])
def test_what_reads_another_layout_is_typed_again_and_leaves_as_before(ends):
    """The program was written for a kernel whose result lies by heads; the one without a mask lays it out by tokens."""
    mode = fake.default_mode()
    with mode:
        given = [torch.empty(BATCH, TOKENS, HEADS, WIDTH).transpose(1, 2) for _ in range(3)]
    builder = Builder("attends", mode)
    q, k, v = (builder.input(n, fake.type_of(x)) for n, x in zip("qkv", given, strict=True))
    by_heads = TensorType(q.dtype, q.shape, contiguous_strides(q.shape), q.tensor.device)
    with builder:
        mask = aten.ones([TOKENS, TOKENS], dtype=torch.bool, device=torch.device("cpu"))
        out = builder.record(ATTENTION, (q, k, v, mask), {}, by_heads)
        if ends != "as it is":
            out = aten.mul(aten.transpose(out, 1, 2), 2.0)
        if ends == "flattened":
            out = aten.view(aten.transpose(out, 1, 2), [BATCH, HEADS * TOKENS, WIDTH])
    trace = builder.finish([out])
    changed = attention_mask(trace)
    verify(changed)
    assert changed.outputs[0].type == trace.outputs[0].type
    real = [x.detach() for x in draw()]
    (result,) = compile_trace(changed)(*real)
    expected = F.scaled_dot_product_attention(*real)
    expected = expected if ends == "as it is" else expected.transpose(1, 2) * 2
    expected = expected.transpose(1, 2).reshape(result.shape) if ends == "flattened" else expected
    assert_close(result, expected)
    assert result.stride() == trace.outputs[0].tensor.stride
