"""Sums of bags by our kernel against what the operator means, on `device`. Prints how many agreed.

Run as a program with TRITON_INTERPRET=1, the kernel runs as Python on the CPU; `test_bags` does that, and calls `check`
itself on a GPU.
"""

from __future__ import annotations

import itertools

import torch

from tessera.ops import bags

FORMS = ("plain", "no last", "mean", "weighted", "padded", "padded mean", "strided", "columns")
WIDTHS = (7, 64, 600)
LENGTHS = (0, 3, 0, 1, 4, 5, 9, 0, 17, 0)  # of bags, some empty


def case(width: int, form: str, dtype: torch.dtype, kind: torch.dtype, device: str) -> tuple:
    many, entries = 23, sum(LENGTHS)
    rows = torch.randn(many, width, dtype=torch.float64).to(dtype)
    order = torch.randint(many, (entries,)).to(kind)
    starts = torch.tensor([0, *itertools.accumulate(LENGTHS)]).to(kind)
    last = form != "no last"
    if form == "strided":
        rows = torch.cat((rows, rows), dim=1)[:, :width]
    if form == "columns":
        rows = rows.t().contiguous().t()
    weights = torch.randn(entries).to(dtype) if form == "weighted" else None
    given = (rows, order, starts if last else starts[:-1], last, weights, "mean" in form, 5 if "padded" in form else -1)
    return tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in given)


def exact(rows, order, starts, last, weights, mean, padding) -> torch.Tensor:  # noqa: ANN001
    """In double precision, rounded once: eager's on a CPU rounds weighted bags of 16 bits more often."""
    wide = None if weights is None else weights.cpu().double()
    given = bags.meaning(rows.cpu().double(), order.cpu(), starts.cpu(), last, wide, mean, padding)
    return given.to(rows.dtype)


def check(device: str) -> int:
    torch.manual_seed(0)
    types = itertools.cycle(((torch.bfloat16, torch.int64), (torch.float32, torch.int32), (torch.float16, torch.int64)))
    count = 0
    for width, form in itertools.product(WIDTHS, FORMS):
        dtype, kind = next(types)
        given = case(width, form, dtype, kind, device)
        found = bags.launched(*given)
        torch.testing.assert_close(found.cpu(), exact(*given))
        assert torch.equal(found, bags.launched(*given)) and (found.t() if form == "columns" else found).is_contiguous()
        count += 1
    double = case(40, "weighted", torch.float64, torch.int64, device)
    torch.testing.assert_close(bags.launched(*double).cpu(), exact(*double))
    return count + 1 + edges(device)


def edges(device: str) -> int:
    """One number after the other would be lost in 16 bits; no bags, no entries, no columns."""
    ones = torch.ones(1, 8, device=device, dtype=torch.bfloat16)
    order, starts = torch.zeros(1000, dtype=torch.int64, device=device), torch.tensor([0, 1000, 1000], device=device)
    assert bags.launched(ones, order, starts).tolist() == [[1000.0] * 8, [0.0] * 8]
    assert bags.launched(ones, order[:0], starts[:1]).shape == (0, 8)
    assert bags.launched(ones[:, :0], order, starts).shape == (2, 0)
    assert bags.launched(ones, order[:0], starts[:1], False).tolist() == [[0.0] * 8]
    return 4


def beyond() -> int:
    """Nothing is read at an index out of range. Compiled the kernel asserts, which the interpreter leaves out."""
    rows, starts = torch.ones(3, 8), torch.tensor([0, 2])
    for wrong in (3, -1, 1 << 40):
        assert bags.launched(rows, torch.tensor([0, wrong]), starts).tolist() == [[1.0] * 8]
    return 1


if __name__ == "__main__":
    print(check("cpu") + beyond())
