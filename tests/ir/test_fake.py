"""Types that are inferred are those that the kernels give, also where PyTorch's own rule is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from programs import trace_of
from torch import nn

import tessera
from tessera.ir import fake
from tessera.ir.strides import laid_out
from tessera.ir.verify import verify

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


def check(op: torch._ops.OpOverload, *args: object) -> None:
    real = op(*args)
    with (mode := fake.default_mode()):
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        made = fake.rule_of(op)(*fakes)
    found = [(x.dtype, x.shape, x.stride()) for x in made]
    assert found == [(x.dtype, x.shape, x.stride()) for x in real]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("other", [torch.float32, "same", None])
def test_norms_of_mixed_precision(dtype: torch.dtype, other: torch.dtype | str | None) -> None:
    x, wide = torch.randn(4, 8, 3, 3, dtype=dtype), dtype if other == "same" else torch.float32
    weight = None if other is None else torch.randn(8, dtype=wide)
    mean, var = torch.zeros(8, dtype=wide), torch.ones(8, dtype=wide)
    for training in (True, False):
        tail = (mean, var, training, 0.1, 1e-5)
        check(aten._native_batch_norm_legit_functional.default, x, weight, weight, *tail)
        check(aten.native_batch_norm.default, x, weight, weight, *tail)
    check(aten._native_batch_norm_legit.no_stats, x, weight, weight, True, 0.1, 1e-5)
    check(aten.native_group_norm.default, x, weight, weight, 4, 8, 9, 2, 1e-5)
    stat = aten.native_group_norm(x, weight, weight, 4, 8, 9, 2, 1e-5)[1]
    if weight is not None:
        check(aten.native_group_norm_backward.default, x, x, stat, stat, weight, 4, 8, 9, 2, [True, True, True])


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(8), lambda: nn.BatchNorm2d(8, affine=False),
                                  lambda: nn.GroupNorm(2, 8), lambda: nn.InstanceNorm2d(8, affine=True)],
                         ids=["batch", "plain", "group", "instance"])  # fmt: skip
def test_gradients_of_norms_over_16_bits(norm) -> None:
    """The input has 16 bits, as under autocast, parameters and statistics have 32."""
    torch.manual_seed(0)
    model, x = norm(), torch.randn(4, 8, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for compiled in (False, True):
        mine, x.grad = copy.deepcopy(model), None
        out = (tessera.jit(mine, strict=True) if compiled else mine)(x)
        (out.float() * torch.linspace(-1, 1, 3)).square().sum().backward()
        found.append([out, x.grad, *(p.grad for p in mine.parameters()), *mine.buffers()])
    torch.testing.assert_close(found[1], found[0], rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32))
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_of_rows(dtype: torch.dtype, mode: int) -> None:
    weight, ids, starts = torch.randn(20, 8, dtype=dtype), torch.randint(20, (8,)), torch.arange(0, 8, 2)
    given = (weight, ids, starts, False, mode, False)
    for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default, aten.embedding_bag.default):
        check(op, *given)
        if mode == 0:
            check(op, *given, torch.ones(8, dtype=dtype))
    check(aten.embedding_bag.padding_idx, *given, None, False, None)


@pytest.mark.parametrize("first", [False, True])
def test_a_layer_in_evaluation_gives_rows(first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=first).eval()
    attention, parts = layer.self_attn, (layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    weights = [w for part in parts for w in (part.weight, part.bias)]
    projections = (attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias)
    op = aten._transformer_encoder_layer_fwd.default
    for x in (torch.randn(2, 5, 16), torch.randn(2, 16, 5).transpose(1, 2), torch.randn(5, 2, 16).transpose(0, 1)):
        given = (x, 16, 2, *projections, False, first, 1e-5, *weights)
        with torch.no_grad():
            real = op(*given)
        with (mode := fake.default_mode()):
            made = fake.rule_of(op)(mode.from_tensor(x), *given[1:])
        assert (made.dtype, made.shape, made.stride()) == (real.dtype, real.shape, real.stride())


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.int64))
def test_powers_of_a_number_are_rows(dtype: torch.dtype) -> None:
    x = torch.arange(16).to(dtype).view(4, 4).t()
    for base in (2.0, 1.0, 3):
        lies(aten.pow.Scalar, base, x)
    for y in (torch.arange(4), torch.randn(4, 4).t(), torch.tensor(2)):
        lies(aten.ldexp.Tensor, y, x)
        lies(aten.ldexp.Tensor, x, y)


@pytest.mark.parametrize("size", [(2, 4, 1, 2), (2, 1, 4, 1, 2), (2, 2, 2, 1, 2), (2, -1, 2), (-1,)])
def test_a_dimension_of_one_lies_as_the_kernels_of_views_have_it(size: tuple[int, ...]) -> None:
    """An operator that reads a view may order its result's dimensions by that stride."""
    apart = torch.randn(4, 4, 1)[1:].unfold(0, 2, 1)
    for x in (apart, apart.contiguous(), torch.randn(2, 4, 1, 2), torch.randn(2, 1, 4, 2).transpose(1, 2)):
        if -1 not in size or x.is_contiguous():
            lies(aten.view.default, x, size)
        lies(aten.reshape.default, x, size)


def test_an_index_into_a_view_lies_as_in_eager() -> None:
    def picked(x: torch.Tensor) -> torch.Tensor:
        windows = x[..., None].unfold(0, 2, 1)
        return windows.view_as(windows)[:, torch.tensor([2, 3, 1])]

    x = torch.randn(3, 4)
    for frontend in ("dynamo", "functional"):
        fast = tessera.jit(picked, executors=["aten"], frontend=frontend)
        assert torch.equal(fast(x), picked(x)) and fast(x).stride() == picked(x).stride()


def lies(op: torch._ops.OpOverload, *args: object) -> None:
    real = op(*args)
    with (mode := fake.default_mode()):
        out = fake.rule_of(op)(
            *(mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in args)
        )
    assert (out.dtype, out.shape, out.stride()) == (real.dtype, real.shape, real.stride())


@pytest.mark.parametrize("way", ["slice", "select", "diagonal"])
def test_what_is_scattered_into_an_expanded_tensor_lies_in_memory_of_its_own(way: str) -> None:
    parts = {
        "slice": (torch.zeros(1, 3), 0, 0, 1),
        "select": (torch.zeros(3), 0, 0),
        "diagonal": (torch.zeros(2), 0, 0, 1),
    }
    op = getattr(torch.ops.aten, f"{way}_scatter").default
    x = torch.ones(3).expand(2, 3)
    trace = trace_of(lambda x: op(x, *parts[way]), x)
    (told,) = trace.outputs
    assert told.tensor.stride == op(x, *parts[way]).stride() == (3, 1)  # type: ignore[union-attr]


def test_a_wrong_type_never_spoils_a_result() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert laid_out(x, (1, 2)).stride() == (1, 2)
    with pytest.raises(RuntimeError, match="a wrong type"):
        laid_out(x, (0, 1))


def test_gradients_of_parts_written_into_what_is_summed() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        part = (x * 1)[..., 1:]
        part[::2].index_put_((torch.tensor([0, 0]),), torch.tensor(2.0), accumulate=True)
        return part.sum(-3)

    x = torch.randn(2, 2, 2, requires_grad=True)
    fast = tessera.jit(program, executors=["aten"], frontend="functional")
    expected, got = (torch.autograd.grad(f(x).sum(), x) for f in (program, fast))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [[-1], [0, 2], None, []])
def test_norms_over_dimensions_of_one(dim: list[int] | None, keepdim: bool) -> None:
    x = torch.randn(1, 3, 1, requires_grad=True)
    trace = trace_of(lambda x: torch.linalg.vector_norm(x, 2, dim, keepdim), x.detach())
    assert trace.outputs[0].tensor.shape == torch.linalg.vector_norm(x, 2, dim, keepdim).shape  # type: ignore[union-attr]
    fast = tessera.jit(lambda x: torch.linalg.vector_norm(x, 2, dim, keepdim), frontend="functional")
    expected = torch.autograd.grad(torch.linalg.vector_norm(x, 2, dim, keepdim).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(fast(x).sum(), x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_integers_are_divided_in_the_default_dtype(dtype: torch.dtype) -> None:
    """The same call has results of other types; no earlier answer is given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        trace = trace_of(lambda x: x / x, torch.ones(3, 2, dtype=torch.int64))
        assert trace.outputs[0].dtype == dtype
        verify(trace)
    finally:
        torch.set_default_dtype(before)


def test_sizes_that_one_program_learned_are_no_other_programs() -> None:
    def two(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.nonzero().shape[0] == 2)
        return x.nonzero() * 2

    def several(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.nonzero().shape[0] > 1)
        return x * 2

    x, fast = torch.tensor([1, 1]), tessera.jit(several, frontend="functional")
    tessera.jit(two, frontend="functional")(x)
    torch.testing.assert_close(fast(x), several(x))
    with pytest.raises(RuntimeError, match="on which the program relies"):
        fast(torch.tensor([1, 0]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_against_classes_over_open_sizes(reduction: str) -> None:
    """PyTorch's rule takes the reduction for another argument where sizes are symbols."""

    def losses(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        smooth = F.cross_entropy(x, y, label_smoothing=0.1, reduction=reduction)
        return [F.nll_loss(x, y, reduction=reduction), F.cross_entropy(x, y, reduction=reduction), smooth]

    with tessera.override(verify=True, strict=True):
        compiled = tessera.jit(lambda x, y: [loss * 2 for loss in losses(x, y)], dynamic=True)
        for rows in (3, 5):
            x, y = torch.randn(rows, 4), torch.arange(rows) % 4
            torch.testing.assert_close(compiled(x, y), [loss * 2 for loss in losses(x, y)])
