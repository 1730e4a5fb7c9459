"""Python loops over open sizes leave as scans: exported once, they are right at every length, or refused."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch.export import Dim

import tessera
from tessera.frontends.open_loops import rewritten


def appended(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h, w = torch.zeros(x.shape[0], 4), torch.linspace(-1, 1, 16).reshape(4, 4)
    out = []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + h @ w)
        y = h * 2
        out.append(y[:, 1:])
    y = torch.stack(out, dim=-1)
    return y, h


def looked_at(x: torch.Tensor) -> torch.Tensor:
    """As by a debugger: the frame then holds its locals a second time."""
    out = []
    assert "out" in sys._getframe().f_locals
    for t in range(x.shape[1]):
        out.append(x[:, t] * 2)
    return torch.stack(out, 1)


def concatenated(x: torch.Tensor) -> torch.Tensor:
    out = []
    for t in range(x.shape[1]):
        out.append(x[:, t, None].cumsum(-1))
    return torch.cat(out, dim=1)


def stored(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    h = x[:, 0]
    for t in range(1, x.shape[1]):
        h = 0.5 * h + x[:, t] * x[:, t - 1, :]
        out[:, t] = h
    return out


def last_value(x: torch.Tensor) -> torch.Tensor:
    n, h = x.shape[1], x[:, 0]
    for t in range(n):
        step = x[:, t].sin()
        h = h + step
    return h * step


def rows(x: torch.Tensor) -> torch.Tensor:
    h = torch.ones(4)
    for row in x.transpose(0, 1):
        h = h * row.mean(0)
    return h


def listed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = list(x.transpose(0, 1))
    return torch.cat(parts, dim=-1), torch.stack(parts, 1), parts[-1]


def comprehended(x: torch.Tensor) -> torch.Tensor:
    doubled = [row * 2 for row in x.transpose(0, 1)]
    return torch.stack([(x[:, t] - 1).relu() for t in range(x.shape[1])], 1) + torch.stack(doubled, 1)


def in_turns(x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(x.shape[0], 4)
    for t in range(x.shape[1]):
        for k in range(3):
            h = h.sin() + x[:, t] * k
        if x.ndim == 3:
            h = h * 0.5
    return h


class Cell(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = torch.nn.GRUCell(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 4)
        out = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(self.out(h))
        return torch.stack(out, 1)


cell = Cell()
DYNAMIC = {"x": {0: "batch", 1: "length"}}
LOOPS = [appended, looked_at, concatenated, stored, last_value, rows, listed, comprehended, in_turns, cell]


@pytest.mark.parametrize("fn", LOOPS, ids=[getattr(fn, "__name__", "cell") for fn in LOOPS])
def test_every_length(fn: Callable) -> None:
    torch.manual_seed(0)
    program = tessera.to_exported(fn, (torch.randn(3, 5, 4),), dynamic=DYNAMIC).module()
    for shape in ((2, 9, 4), (4, 3, 4)):  # PyTorch compiles a scan anew in every call
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), fn(x))


def test_onnx(tmp_path) -> None:
    pytest.importorskip("onnx")
    tessera.onnx.export(appended, (torch.randn(3, 5, 4),), tmp_path / "m.onnx", dynamic=DYNAMIC)
    net = tessera.onnx.load(tmp_path / "m.onnx", compile=False)
    x = torch.randn(2, 9, 4)
    torch.testing.assert_close(net(x), appended(x))


# --- what a scan cannot say stays refused ---


def number_of_the_turn(x: torch.Tensor) -> torch.Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h + x[:, t] * (t / 3)
    return h


def ends_early(x: torch.Tensor) -> torch.Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h + x[:, t]
        if t == 2:
            break
    return h


def reads_what_it_wrote(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    for t in range(1, x.shape[1]):
        out[:, t] = out[:, t - 1] + x[:, t]
    return out


def counts(x: torch.Tensor) -> torch.Tensor:
    total, h = 0, x[:, 0]
    for t in range(x.shape[1]):
        h, total = h + x[:, t], total + 2
    return h * total


def asks_how_many(x: torch.Tensor) -> torch.Tensor:
    parts = list(x.transpose(0, 1))
    return torch.stack(parts) / len(parts)


def list_of_two_names(x: torch.Tensor) -> torch.Tensor:
    same = out = []
    for t in range(x.shape[1]):
        out.append(x[:, t])
    return torch.stack(same)


def list_that_is_read_before(x: torch.Tensor) -> torch.Tensor:
    out = []
    kept = [out]
    for t in range(x.shape[1]):
        out.append(x[:, t])
    return torch.stack(kept[0])


def list_of_several_rounds(x: torch.Tensor) -> torch.Tensor:
    out = []
    for _ in range(2):
        for t in range(x.shape[1]):
            out.append(x[:, t])
    return torch.stack(out)


def closed_over(x: torch.Tensor) -> torch.Tensor:
    h = x[:, 0]

    def doubled() -> torch.Tensor:
        return h * 2

    for t in range(x.shape[1]):
        h = x[:, t] + doubled()
    return h


def row_before_the_first(x: torch.Tensor) -> torch.Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h * x[:, t - 1]
    return h


def rows_that_broadcast(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = x[0, t]
    return out


TURNS = 0


def counts_outside(x: torch.Tensor) -> torch.Tensor:
    global TURNS
    h = x[:, 0]
    for t in range(x.shape[1]):
        h, TURNS = h + x[:, t], h.sum()
    return h


REFUSED = [
    counts_outside,
    number_of_the_turn,
    ends_early,
    reads_what_it_wrote,
    counts,
    asks_how_many,
    list_of_two_names,
    list_that_is_read_before,
    list_of_several_rounds,
    closed_over,
    row_before_the_first,
    rows_that_broadcast,
]


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_refused(fn: Callable) -> None:
    class Model(torch.nn.Module):
        forward = staticmethod(fn)

    before, sizes = fn.__code__, {"x": {0: Dim("batch"), 1: Dim("length")}}
    with rewritten([before]), pytest.raises(Exception, match="specialized it to be a constant|open|same metadata"):
        torch.export.export(Model(), (torch.randn(3, 5, 4),), dynamic_shapes=sizes)
    assert fn.__code__ is before
