"""Batches whose sizes change: after the second size one program serves all, on every rank; its numbers are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from models import GPT, LENGTH, VOCABULARY, Llama, Pictures, token_loss
from steps import OPTIMIZERS, pretended
from torch import Tensor, nn

import tessera
from tessera.distributed import in_step
from tessera.distributed.plan import DATA

PLANS = [
    ({"dp": 2}, "ddp"),
    ({"dp": 2}, "zero3"),
    ({"dp": 2, "tp": 2}, {"dp": "zero1", "tp": "tensor"}),
    ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "sequence"}),
]


def tokens(rows: int, length: int = LENGTH) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rows + 100 * length)
    return [torch.randint(0, VOCABULARY, (rows, length), generator=draw) for _ in range(2)]


@pytest.mark.parametrize(
    ("kind", "axes", "plan"),
    [
        pytest.param(GPT, *PLANS[0], marks=pytest.mark.sweep),
        (GPT, *PLANS[1]),
        (GPT, *PLANS[2]),
        pytest.param(GPT, *PLANS[3], marks=pytest.mark.sweep),
        (Llama, *PLANS[3]),
    ],
)
def test_steps(kind: type, axes: dict, plan: object) -> None:
    """All ranks in one process: losses and weights after a step, for batches of three sizes, by one program."""
    torch.manual_seed(0)
    model = kind(1).double()
    plain = copy.deepcopy(model)
    with pretended(axes) as mesh:
        by = OPTIMIZERS["sgd"](model.parameters())
        step = tessera.train_step(model, token_loss, by, executors="aten", mesh=mesh, plan=plan)
        for rows in (2, 3, 5, 4):
            step(*tokens(rows))
        told = tessera.explain(step)
        assert len(told.graphs) == 2 and not told.recompiles, [g.recompile_reason for g in told.graphs]
    compilation = step.__tessera__.compilations()[1]
    (program,) = compilation.account.programs
    trace, forward = program.trace, compilation.forward
    places = [v.type.placement for v in trace.inputs]
    split = {axis for axis in step.sharding.plan.axes(*DATA)}
    for rows in (6, 14):
        fresh, batch = copy.deepcopy(plain), tokens(rows)
        loss = token_loss(fresh, *batch)
        loss.backward()
        OPTIMIZERS["sgd"](fresh.parameters()).step()
        held = {n: x.detach().clone() for n, x in (*plain.named_parameters(), *plain.named_buffers())}
        names = [*forward.weights, *forward.buffers]
        args = [in_step.cut(held[name], place) for name, place in zip(names, places, strict=False)]
        ranks = places[0].mesh
        for x in batch:
            parts = [ranks.coordinates(rank)["dp"] if split else 0 for rank in range(ranks.ranks)]
            args.append([x.chunk(2)[part].clone() for part in parts])
        numbers = step.state.numbers(compilation.plan, [0] * len(compilation.plan.members), [])
        for extra, place in zip(compilation.extras, places[len(args) :], strict=True):
            whole = torch.tensor(numbers, dtype=torch.float64) if extra.kind == "numbers" else torch.zeros_like(
                held[compilation.with_grads[extra.member]])  # fmt: skip
            args.append(in_step.cut(whole, place))
        outputs = in_step.run(trace, args)
        for part in outputs[0]:
            torch.testing.assert_close(part, loss.detach(), rtol=1e-11, atol=0)
        for name, parts, place in zip(forward.weights, args, places, strict=False):
            want = dict(fresh.named_parameters())[name].detach()
            torch.testing.assert_close(in_step.join(parts, place), want, rtol=1e-10, atol=1e-12)


def test_calls() -> None:
    """Rows and lengths change; sizes of 1 are programs of their own, and so is every size where `dynamic` is False."""
    torch.manual_seed(0)
    model = GPT(1).double()
    plain = copy.deepcopy(model)
    with pretended({"dp": 1}) as mesh:
        tessera.shard(model, mesh, "zero3")
        fast, fixed = tessera.jit(model, executors="aten"), tessera.jit(model, executors="aten", dynamic=False)
        for rows, length in ((2, 8), (3, 8), (5, 8), (4, 6), (7, 5), (1, 8), (2, 8)):
            ids = tokens(rows, length)[0]
            out, want = fast(ids), plain(ids)
            for result in (out, want):
                result.square().sum().backward()
            torch.testing.assert_close(out, want)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.to_local(), q.grad)
        assert len(tessera.explain(fast).graphs) == 4  # (2, 8), (s, 8), (s, t), (1, 8)
        for rows in (2, 3, 4):
            fixed(tokens(rows)[0])
        assert len(tessera.explain(fixed).graphs) == 3


class Halves(nn.Module):
    """Knows what to do with one size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if x.shape[0] > 8 else 1)


def test_programs_hold_for_the_sizes_that_they_were_captured_with() -> None:
    model = Halves()
    with pretended({"dp": 2}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")
        plain = copy.deepcopy(model.layer)
        for rows in (2, 3, 4, 5, 6):  # of each of two ranks
            x = torch.ones(rows, 4)
            weight, bias = plain.weight.full_tensor(), plain.bias.full_tensor()
            torch.testing.assert_close(fast(x), torch.nn.functional.linear(x, weight, bias) * (2 if rows > 4 else 1))
        assert len(tessera.explain(fast).graphs) == 3


def test_a_convolution_net() -> None:
    model = Pictures().double()
    with pretended({"dp": 1}) as mesh:
        plain = copy.deepcopy(model)
        fast = tessera.jit(model, mesh=mesh, plan="ddp", executors="aten")
        for rows in (2, 3, 5):
            x = torch.randn(rows, 3, 8, 8).double()
            torch.testing.assert_close(fast(x), plain(x))
        assert len(tessera.explain(fast).graphs) == 2


class Summed(nn.Module):
    """Its einsum finds out what the size that changed is, so the program holds for one size."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x).chunk(3, -1)
        sums = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        return torch.einsum("btd,btde,bt->bte", q, sums, 1 / (torch.einsum("btd,btd->bt", q, k.cumsum(1)) + 9))


def test_a_size_that_turns_out_to_be_a_number() -> None:
    torch.manual_seed(0)
    model = Summed().double()
    plain = copy.deepcopy(model)
    with pretended({"tp": 1}) as mesh:
        fast = tessera.jit(model, mesh=mesh, plan="tensor", executors="aten")
        for rows in (8, 4, 6, 4):
            x = torch.randn(rows, 8, 8, dtype=torch.float64)
            torch.testing.assert_close(fast(x), plain(x))
