"""Experts: what they compute on one device, and ranks that have some of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import MoE, token_batches, token_loss
from steps import compiled_step, pretended, program_of, train_ranks, train_whole
from test_plans import check, program
from torch import Tensor

import tessera
from tessera.distributed import in_step
from tessera.frontends.functional.trace import trace_function
from tessera.ir.dist import bytes_sent, exchange_of, is_collective
from tessera.ir.equation import Equation
from tessera.ir.mesh import Mesh
from tessera.ir.placement import Placement
from tessera.ir.trace import Trace
from tessera.ops.factors import experts as rule
from tessera.transforms.shard.partition import shard
from tessera.transforms.vjp import vjp
from tessera.util.errors import InputError, OptionError

TOKENS, CHOICES, WIDTH, BETWEEN, EXPERTS = 12, 2, 4, 6, 4


def operands(gate: bool = True) -> list[Tensor]:
    """Tokens, weights, then stacks."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(TOKENS, WIDTH), (TOKENS, CHOICES), (EXPERTS, BETWEEN, WIDTH), (EXPERTS, WIDTH, BETWEEN)]
    sizes += [(EXPERTS, BETWEEN, WIDTH)] if gate else []
    return [torch.randn(size, dtype=torch.float64, generator=draw, requires_grad=True) for size in sizes]


def is_rows(eqn: Equation) -> bool:
    return (exchange_of(eqn) or ("",))[0] == "rows"


def choice(low: int = -1, high: int = EXPERTS + 1) -> Tensor:
    return torch.randint(low, high, (TOKENS, CHOICES), generator=torch.Generator().manual_seed(1))


def one_by_one(ids: Tensor, tokens: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor | None = None):
    """Token by token, choice by choice."""
    rows = []
    for token, own, each in zip(tokens, ids.tolist(), weights, strict=True):
        row = token * 0
        for e, weight in zip(own, each, strict=True):
            if 0 <= e < EXPERTS:
                between = F.silu(up[e] @ token) if gate is None else F.silu(gate[e] @ token) * (up[e] @ token)
                row = row + weight * (down[e] @ between)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_experts_compute(gate: bool, compiled: bool) -> None:
    ids, given = choice(), operands(gate)

    def run(tokens: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        return tessera.experts(tokens, ids, weights, *stacks)

    got, want = (tessera.jit(run) if compiled else run)(*given), one_by_one(ids, *given)
    torch.testing.assert_close(got, want)
    pairs = [torch.autograd.grad(out.square().sum(), given) for out in (got, want)]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gradients(activation: str) -> None:
    ids = choice()
    run = lambda tokens, weights, *rest: tessera.experts(tokens, ids, weights, *rest, activation=activation)  # noqa: E731
    assert torch.autograd.gradcheck(run, operands())


@pytest.mark.parametrize(
    ("gate", "activation"), [(True, "silu"), (False, "gelu"), (True, "gelu_tanh"), (False, "relu")]
)
def test_gradients_of_gradients(gate: bool, activation: str) -> None:
    ids, given = choice(), operands(gate)
    run = lambda tokens, weights, *rest: tessera.experts(tokens, ids, weights, *rest, activation=activation)  # noqa: E731
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


def test_compiled_gradients_of_gradients() -> None:
    ids, given = choice(), operands()

    def run(tokens: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        return tessera.experts(tokens, ids, weights, *rest).sin()

    def second(function: object) -> tuple:
        first = torch.autograd.grad(function(*given).sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    torch.testing.assert_close(second(tessera.jit(run)), second(run))


def test_capacity_drops_those_that_come_last() -> None:
    ids, taken = choice(), dict.fromkeys(range(EXPERTS), 0)
    kept = ids.clone()
    for token in range(TOKENS):
        for slot, e in enumerate(ids[token].tolist()):
            if e in taken:
                kept[token, slot] = e if taken[e] < 3 else EXPERTS  # half of 24 choices over 4 experts
                taken[e] += 1
    assert max(taken.values()) > 3
    tokens, weights, *stacks = operands()
    got = tessera.experts(tokens, ids, weights, *stacks, capacity=0.5)
    torch.testing.assert_close(got, one_by_one(kept, tokens, weights, *stacks))


def test_leading_dimensions() -> None:
    ids, (tokens, weights, *stacks) = choice(), operands()
    flat = tessera.experts(tokens, ids, weights, *stacks)
    out = tessera.experts(tokens.view(3, 4, -1), ids.view(3, 4, -1), weights.view(3, 4, -1), *stacks)
    torch.testing.assert_close(out, flat.view(3, 4, -1))


@pytest.mark.parametrize("own", [("/ep", "/ep"), ("", "/ep"), ("/ep", "")], ids=["both", "experts", "tokens"])
@pytest.mark.parametrize("ids", [choice(), choice(0, 1), torch.full((TOKENS, CHOICES), -1)], ids=["any", "one", "none"])
def test_ranks_that_have_some(own: tuple, ids: Tensor) -> None:
    """Of tokens, experts or both; also where all rows go to one expert, so that other ranks have none, or nowhere."""
    mesh, given = Mesh.of(ep=2), [x.detach() for x in operands()]

    def run(tokens: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
        return tessera.experts(tokens, ids, weights, up, down, gate)

    given.insert(1, ids)
    trace = trace_function(run, tuple(given)).trace
    trace = vjp(trace, [v for v in trace.inputs if v.is_differentiable]).trace
    given.append(torch.randn(TOKENS, WIDTH, dtype=torch.float64))
    lies = [f"[{v.shape[0]}{own[v.ndim == 3]}, {', '.join(map(str, v.shape[1:]))}]" for v in trace.inputs]
    places = {v: Placement.parse(text, mesh) for v, text in zip(trace.inputs, lies, strict=True)}
    local = shard(trace, mesh, places, ways={"ep": "experts"}).trace
    parts = in_step.run(local, [in_step.cut(x, places[v]) for x, v in zip(given, trace.inputs, strict=True)])
    for x in given:
        x.requires_grad_(x.is_floating_point())
    want = one_by_one(ids, given[0], *given[2:6])
    grads = torch.autograd.grad(want, [given[0], *given[2:6]], given[6], allow_unused=True)
    for part, v, whole in zip(parts, local.outputs, [want, *grads], strict=True):
        got = in_step.join(part, v.type.placement, exact=False)
        torch.testing.assert_close(got, torch.zeros_like(got) if whole is None else whole.detach())
    exchanged = any(is_rows(e) for e in local.equations)
    assert exchanged == (own == ("/ep", "/ep"))


# --- whole training steps -------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_alone(ranks: int) -> None:
    check("moe", {"ep": ranks}, "experts")


def test_rows_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one part travels, there or back, experts work on the other; what they compute is the same."""
    monkeypatch.setattr(rule, "PART", 0)
    torch.manual_seed(0)
    model, batches = MoE(1).double(), token_batches(2)
    step, compilation = compiled_step(model, token_loss, batches[0], {"ep": 2}, "experts", "adam", None)
    mine = train_ranks(model, step, compilation, batches)
    want = train_whole(model, token_loss, batches, "adam", None)
    for got, x in [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]:
        assert (got - x).norm() <= 1e-11 * x.norm() + 1e-14
    equations = program_of(compilation).equations
    works = [i for i, e in enumerate(equations) if "experts" in e.opname]
    waits = {e.inputs()[0]: i for i, e in enumerate(equations) if is_collective(e, "wait")}
    ways = [(i, waits[e.out]) for i, e in enumerate(equations) if is_rows(e)]
    hidden = sum(any(begin < work < wait for work in works) for begin, wait in ways)
    assert len(ways) >= 8 and hidden >= len(ways) // 2


def test_with_capacity() -> None:
    """Which tokens are dropped is decided over all ranks."""
    torch.manual_seed(0)
    model, batches = MoE(1, capacity=0.7).double(), token_batches(2)
    step, compilation = compiled_step(model, token_loss, batches[0], {"ep": 2}, "experts", "adam", None)
    mine = train_ranks(model, step, compilation, batches)
    want = train_whole(model, token_loss, batches, "adam", None)
    for got, x in [*zip(mine.losses, want.losses, strict=True), *((mine.held[n], x) for n, x in want.held.items())]:
        assert (got - x).norm() <= 1e-11 * x.norm() + 1e-14
    rooms = {exchange_of(e)[1][3] for e in program_of(compilation).equations if is_rows(e)}
    assert rooms == {2 * 12, 32}  # a rank has two experts, which take 12 of 64 choices each


def row_bytes(local: Trace) -> float:
    return sum(bytes_sent(e) for e in local.equations if is_rows(e))


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes(ranks: int) -> None:
    """A row for each choice goes out and comes back, in forward and in backward."""
    activation = 4 * 8 * 16 * 8 / ranks
    assert row_bytes(program("moe", {"ep": ranks}, "experts")) == 2 * 2 * 2 * activation * 2 * (ranks - 1) / ranks


def test_explain_tells_how_rows_went() -> None:
    with pretended({"ep": 2}) as mesh:
        fast = tessera.jit(MoE(1), mesh=mesh, plan="experts", executors="aten")
        with torch.no_grad():
            fast(token_batches(1)[0][0][:2])
        assert "ep: this rank's experts had 32 rows on average, 32 at most; it sent 32" in str(tessera.explain(fast))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": torch.ones(3, 2)}, r"a choice and weights of the shape \[12, 'k'\], got \[12, 2\] and \[3, 2\]"),
        ({"choice": torch.ones(12, 2)}, "a choice of whole numbers, got torch.float32"),
        ({"up": torch.ones(4, 6, 5)}, r"up to be \[experts, f, 4\], got \[4, 6, 5\]"),
        ({"gate": torch.ones(4, 5, 4)}, r"gate to be \[4, 6, 4\] as up is, got \[4, 5, 4\]"),
        ({"down": torch.ones(4, 6, 4)}, r"down to be \[4, 4, 6\], got \[4, 6, 4\]"),
        ({"activation": "sine"}, "one of silu, gelu, gelu_tanh, relu, got 'sine'"),
        ({"capacity": 0.0}, "a capacity above 0, got 0.0"),
    ],
)
def test_bad_operands(change: dict, says: str) -> None:
    names = ("tokens", "weights", "up", "down", "gate")
    given = dict(zip(names, operands(), strict=True)) | {"choice": choice()} | change
    with pytest.raises(InputError, match=says):
        tessera.experts(**given)


class Nothing(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.parametrize(
    ("model", "ranks", "says"),
    [
        (lambda: MoE(1), 3, "experts that ep=3 divides, got 4"),
        (lambda: Nothing(8, 8), 2, "plan: ep splits experts, expected tessera.experts in the model, got none"),
    ],
)
def test_bad_models(model, ranks: int, says: str) -> None:
    with pretended({"ep": ranks}) as mesh:
        fast = tessera.jit(model(), mesh=mesh, plan="experts", executors="aten")
        with pytest.raises(OptionError, match=says):
            fast(token_batches(1)[0][0])
