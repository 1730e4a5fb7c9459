"""Operators that look along data: where a trial lets one be cut, the cut holds on numbers that try to break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tessera.frontends.functional.trace import trace_function
from tessera.ir.equation import Equation, map_values
from tessera.ops.factors.rule import Factors, tensors
from tessera.ops.factors.tried import tried

N = 6
DRAWS = 30
aten = torch.ops.aten


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape)


X = floats(N, N)
CALLS: dict[str, tuple[Callable, tuple]] = {
    "masked_scatter": (torch.masked_scatter, (X, flags(N, N), floats(N, N))),
    "masked_scatter of rows": (torch.masked_scatter, (X, flags(N, 1), floats(N, N))),
    "masked_scatter of few rows": (torch.masked_scatter, (floats(4, 2), flags(4, 1), floats(4, 2))),
    "masked_scatter of a longer source": (torch.masked_scatter, (floats(4, 2), flags(4, 1), floats(12, 2))),
    "masked_scatter of four": (torch.masked_scatter, (floats(4), flags(4), floats(4))),
    "masked_scatter_backward": (lambda g, m: aten.masked_scatter_backward(g, m, [4]), (floats(4), flags(4))),
    "cumsum": (lambda x: x.cumsum(0), (X,)),
    "cummax": (lambda x: torch.cummax(x, 1), (X,)),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), (X,)),
    "cumulative_trapezoid": (lambda x: torch.cumulative_trapezoid(x, dim=0), (X,)),
    "diff": (lambda x: torch.diff(x, dim=0, prepend=x[:1]), (X,)),
    "searchsorted": (torch.searchsorted, (X, X)),
    "searchsorted in one row": (torch.searchsorted, (floats(N), floats(N))),
    "bucketize": (torch.bucketize, (X, floats(N))),
    "repeat_interleave": (lambda x, n: torch.repeat_interleave(x, n, 0, output_size=N), (X, torch.ones(N).long())),
    "histc": (lambda x: torch.histc(x, N, -1.0, 1.0), (floats(N),)),
    "take": (torch.take, (X, ids(N, N))),
    "put": (lambda x, i, y: torch.put(x, i, y), (X, ids(N, N), X)),
    "put and add": (lambda x, i, y: torch.put(x, i, y, True), (X, ids(N, N), X)),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 0), (X, ids(N, N))),
    "index_put": (lambda x, i, y: torch.index_put(x, (i,), y), (X, ids(N), X)),
    "index_put and add": (lambda x, i, y: torch.index_put(x, (i,), y, True), (X, ids(N), X)),
    "index_put of pairs": (lambda x, i, y: torch.index_put(x, (i, i), y), (X, ids(N), floats(N))),
    "index_put by a mask": (lambda x, m, y: torch.index_put(x, (m,), y), (X, flags(N), floats(N))),
    "scatter": (lambda x, i, y: x.scatter(0, i, y), (X, ids(N, N), X)),
    "scatter_reduce": (lambda x, i, y: x.scatter_reduce(1, i, y, "amax"), (X, ids(N, N), X)),
    "index_reduce": (lambda x, i, y: x.index_reduce(0, i, y, "prod"), (X, ids(N), X)),
    "segment_reduce": (lambda x, n: torch.segment_reduce(x, "sum", lengths=n), (X, torch.ones(N).long())),
    "argsort": (lambda x: torch.argsort(x, dim=0, stable=True), (X,)),
    "msort": (torch.msort, (X,)),
    "kthvalue": (lambda x: torch.kthvalue(x, 2, 0, keepdim=True), (X,)),
    "mode": (lambda x: torch.mode(x, 0), (X,)),
    "median": (lambda x: torch.median(x, 1), (X,)),
    "nanmedian": (lambda x: torch.nanmedian(x, 0), (X,)),
    "quantile": (lambda x, q: torch.quantile(x, q, 0), (X, torch.rand(N, dtype=torch.float64))),
    "renorm": (lambda x: torch.renorm(x, 2.0, 0, 1.0), (X,)),
    "renorm of columns": (lambda x: torch.renorm(x, 2.0, 1, 1.0), (X,)),
    "roll": (lambda x: torch.roll(x, 1, 0), (X,)),
    "vander": (lambda x: torch.vander(x, N), (floats(N),)),
    "cdist": (torch.cdist, (X, X)),
    "cov": (torch.cov, (X,)),
    "corrcoef": (torch.corrcoef, (X,)),
    "isin": (torch.isin, (X, X)),
    "interp": (lambda x: torch.nn.functional.interpolate(x[None], size=N, mode="linear")[0], (X,)),
    "unfold_copy": (lambda x: torch.ops.aten.unfold_copy(x, 0, 1, 1), (X,)),
    "max_unpool": (lambda x, i: torch.nn.functional.max_unpool1d(x[None], i[None], 1), (X, ids(N, N))),
    "bincount by weights": (lambda i, w: torch.zeros(N, dtype=w.dtype).index_add(0, i, w), (ids(N), floats(N))),
    "embedding_bag": (
        lambda i, w, o: torch.nn.functional.embedding_bag(i, w, o, mode="max"),
        (ids(N), X, torch.arange(N)),
    ),
}


def hostile(like: torch.Tensor, reach: int, draw: torch.Generator) -> torch.Tensor:
    """Numbers that are unlike from row to row and column to column: sorted, tied, scaled, partly NaN; indices that may
    reach over every border."""

    def coin(share: float) -> bool:
        return bool(torch.rand((), generator=draw) < share)

    rows = torch.rand([n if coin(0.5) else 1 for n in like.shape], generator=draw).expand(like.shape)
    if like.dtype == torch.bool:
        return (rows < torch.rand((), generator=draw)).contiguous()
    if not like.dtype.is_floating_point:
        picked = torch.randint(0, 2 if coin(0.3) else reach, like.shape, generator=draw).to(like.dtype)
        return picked.sort(-1).values if coin(0.3) else picked
    x = torch.randn(like.shape, dtype=torch.float64, generator=draw) * 10 ** (4 * rows - 2)
    x = x.round() if coin(0.3) else x
    x = x.sort(int(torch.randint(0, like.ndim, (), generator=draw)), coin(0.5)).values if coin(0.4) else x
    return torch.where(rows < 0.3, torch.nan, x) if coin(0.2) else x


def called(eqn: Equation, given: list) -> list | None:
    supply = iter(given)
    args, kwargs = map_values((eqn.args, eqn.kwargs), lambda v: next(supply))
    try:
        out = eqn.op(*args, **kwargs)
    except (RuntimeError, IndexError):
        return None
    return list(out) if isinstance(out, (tuple, list)) else [out]


def wrong(eqn: Equation, rule: Factors) -> Iterator[str]:
    draw = torch.Generator().manual_seed(11)
    given = [torch.empty([int(n) for n in v.shape], dtype=v.dtype) for v in tensors(eqn)]
    named = {factor for dims in (*rule.operands, *rule.results) for dim in dims or () for factor in dim}
    for turn in range(DRAWS):
        full = [hostile(x, 2 if turn % 2 else N, draw) for x in given]
        whole = called(eqn, full)
        for factor in sorted(named - rule.whole) if whole is not None else ():
            for chunks in (2, 3):
                parts = [
                    list(x.tensor_split(chunks, dims.index((factor,)))) if (factor,) in dims else [x] * chunks
                    for x, dims in zip(full, rule.operands, strict=True)
                ]
                ran = [called(eqn, [part[c] for part in parts]) for c in range(chunks)]
                for i, dims in enumerate(rule.results):
                    if dims is None or any(out is None for out in ran):
                        continue
                    at = dims.index((factor,))
                    joined = torch.cat([out[i] for out in ran], at)
                    if not torch.allclose(joined, whole[i], rtol=1e-9, atol=1e-9, equal_nan=True):
                        yield f"{eqn.op} along {factor} of {rule} in {chunks}: {full}"


@pytest.mark.parametrize("name", CALLS)
def test_a_cut_found_by_trial_holds(name: str) -> None:
    call, args = CALLS[name]
    for eqn in trace_function(call, tuple(x.clone() for x in args)).trace.equations:
        if (rule := tried(eqn)) is not None:
            assert not list(wrong(eqn, rule))
