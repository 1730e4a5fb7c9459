"""Batching on traces: rules, PyTorch's formulas, what is shared, what is drawn, what is written."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tessera.frontends.functional.trace import trace_function
from tessera.func.batch import example_type
from tessera.ir.interp import run
from tessera.ir.types import type_of
from tessera.ir.verify import verify
from tessera.transforms.vmap import vmap
from tessera.util.errors import CaptureError, InputError, OptionError

ROWS = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))

PROGRAMS = {
    "pointwise": lambda x: (x.sin() * x.exp() + 1).tanh(),
    "matmul and softmax": lambda x: (x @ x.t()).softmax(-1),
    "lists": lambda x: torch.cat([x, torch.ones(3, 4), x * 2], 1),
    "several results": lambda x: x.sort(-1)[0] + x.max(0)[0],
    "views": lambda x: x.t().reshape(2, 6).unsqueeze(1).flatten(1)[:, 1::2],
    "written in place": lambda x: x.clone().mul_(x).add_(2)[:, 1:],
    "a shared tensor written with rows": lambda x: torch.zeros(3, 4).add_(x) * 2,
    "conv": lambda x: torch.nn.functional.conv1d(x[None], torch.ones(2, 3, 2)),
    "by formula": lambda x: torch.linalg.pinv(x),
    "memory of its own": lambda x: (x * 2).as_strided((2, 2), (4, 1), 1),
}


def batched(f: object, rows: torch.Tensor, dim: int, randomness: str = "error") -> list:
    traced = trace_function(f, (rows,), types={0: example_type(rows, dim)})  # type: ignore[arg-type]
    made = vmap(traced.trace, {traced.trace.inputs[0]: (type_of(rows), dim)}, 5, traced.mode, randomness)  # type: ignore[dict-item]
    assert made.on == (True,)
    return run(verify(made.trace), rows)


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_matches_a_loop(name: str, dim: int) -> None:
    f = PROGRAMS[name]
    rows = ROWS.movedim(0, dim).contiguous()
    want = torch.stack([f(r) for r in ROWS])
    assert_close(batched(f, rows, dim)[0], want, rtol=1e-4, atol=1e-4)


def test_what_reads_nothing_batched_stays_single() -> None:
    traced = trace_function(lambda x, w: (x @ w.tanh(), w.exp()), (ROWS[0], ROWS[0].t()))
    made = vmap(traced.trace, {traced.trace.inputs[0]: (type_of(ROWS), 0)}, 5, traced.mode)  # type: ignore[dict-item]
    assert made.on == (True, False)
    assert made.trace.outputs[1].shape == (4, 3)  # type: ignore[union-attr]


def test_draws() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(3, 4)

    with pytest.raises(InputError, match="test_vmap.py"):
        batched(f, ROWS, 0)
    noise = batched(f, ROWS, 0, "different")[0] - ROWS
    assert not torch.allclose(noise[0], noise[1])
    noise = batched(f, ROWS, 0, "same")[0] - ROWS
    assert_close(noise[0], noise[1])
    with pytest.raises(OptionError, match="error, different, same"):
        batched(f, ROWS, 0, "other")


def test_memory_of_the_batch_is_addressed_where_examples_lie_one_after_another() -> None:
    def part(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2, 2), (4, 1), 1)

    assert_close(batched(part, ROWS, 0)[0], torch.vmap(part)(ROWS))
    with pytest.raises((InputError, CaptureError), match="as_strided"):
        batched(part, ROWS.movedim(0, 1).contiguous(), 1)
