"""The last linear layer and its loss as one operator, in chunks of rows: same values, same gradients, less memory."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import tessera
from tessera.ir import fake
from tessera.ir.builder import Builder
from tessera.ir.types import type_of
from tessera.ops.linear_loss import LINEAR_LOSS, LINEAR_LOSS_GRADS
from tessera.passes.memory.reuse import reuse
from tessera.passes.memory.schedule import peak_memory
from tessera.passes.patterns import linear_loss as passes

ROWS, WIDTH, CLASSES = 60, 24, 50
EXECUTORS = ["tile", "sdpa", "aten"]


class Model(nn.Module):
    def __init__(self, bias: bool = False, reduction: str = "mean", smoothing: float = 0.0, ignore: int = -100):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = nn.CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing, ignore_index=ignore)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.body(x))).flatten(0, 1).float(), target.flatten())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "LARGE", 0)
    monkeypatch.setattr(passes, "CHUNK", 16 * CLASSES * 2)
    monkeypatch.setattr(passes, "FEW", 1)
    monkeypatch.setattr(passes, "MOST", 16 * CLASSES * 2)
    torch._dynamo.reset()  # sizes that other tests changed would be symbolic here


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, ROWS // 3, WIDTH, dtype=dtype), torch.randint(CLASSES, (3, ROWS // 3))


def step(model: nn.Module, x: Tensor, target: Tensor, factor: float = 3.0) -> list[Tensor]:
    x = x.clone().requires_grad_()
    loss = model(x, target)
    (loss * factor).backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def names(fast: object) -> set[str]:
    return {str(eqn.op) for stage in tessera.stages(fast) for eqn in stage.trace.equations}


def check_agrees(model: nn.Module, x: Tensor, target: Tensor, tolerance: float) -> object:
    exact = step(copy.deepcopy(model).double(), x.double(), target)
    fast = tessera.jit(copy.deepcopy(model), executors=EXECUTORS, strict=True)
    for found, wanted in zip(step(fast, x, target), exact, strict=True):
        assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    return fast


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("reduction", "padded"), [("mean", False), ("sum", False), ("mean", True)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_chunks_give_the_same_loss_and_gradients(
    bias: bool, reduction: str, padded: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "padded", lambda weight: padded)
    x, target = batch(dtype)
    target[0, :7] = -100
    fast = check_agrees(Model(bias, reduction).to(dtype), x, target, tolerance)
    assert "tessera.linear_loss" in names(fast) and "aten.cross_entropy_loss.default" in names(fast)
    chunks = next(s.trace for s in tessera.stages(fast) if s.name == "forward chunk_loss")
    assert sum(str(eqn.op) == "aten.linear.default" for eqn in chunks.equations) > 2


def test_all_rows_ignored() -> None:
    x, target = batch(torch.float32)
    loss, *grads = step(tessera.jit(Model(), executors=EXECUTORS, strict=True), x, torch.full_like(target, -100))
    assert loss.isnan() and all((g == 0).all() for g in grads)


def test_another_ignored_class() -> None:
    x, target = batch(torch.float32)
    check_agrees(Model(ignore=3), x, target, 1e-5)


class Shown(Model):
    """Gives its logits away: they must stay."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.body(x))).flatten(0, 1)
        return self.loss(logits, target.flatten()) + logits.square().mean()


@pytest.mark.parametrize("model", [Model(smoothing=0.1), Model(reduction="mean").half(), Shown()])
def test_what_stays_as_it_is(model: Model) -> None:
    x, target = batch(next(model.parameters()).dtype)
    fast = check_agrees(model, x, target, 2e-2)
    assert "tessera.linear_loss" not in names(fast)


def test_inference_keeps_the_plain_form() -> None:
    x, target = batch(torch.float32)
    model = Model()
    fast = tessera.jit(model, executors=EXECUTORS, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, target), model(x, target))
    assert "tessera.linear_loss" not in names(fast)


def test_the_peak_is_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    x, target = torch.randn(2, 256, WIDTH), torch.randint(1000, (2, 256))
    peaks = []
    for chunk in (2**40, 64 * 1000 * 4):
        monkeypatch.setattr(passes, "MOST", chunk)
        model = Model()
        model.head = nn.Linear(WIDTH, 1000)
        fast = tessera.jit(model, executors=EXECUTORS, strict=True)
        step(fast, x, target)
        peaks.append(peak_memory(next(s.trace for s in tessera.stages(fast) if s.name == "forward reinplace")))
    assert peaks[1] < peaks[0] / 3


def test_the_operators_run_by_themselves() -> None:
    x, target = torch.randn(8, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (8,))
    w, b = torch.randn(CLASSES, WIDTH, dtype=torch.float64), torch.randn(CLASSES, dtype=torch.float64)
    target[2] = -100
    leaves = [t.requires_grad_() for t in (x, w, b)]
    for mean in (True, False):
        loss = F.cross_entropy(F.linear(x, w, b), target, reduction="mean" if mean else "sum")
        wanted = [loss, *torch.autograd.grad(loss, leaves)]
        found = LINEAR_LOSS_GRADS.fn(x, w, b, target, mean, -100)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(LINEAR_LOSS.fn(x, w, b, target, mean, -100), loss)


def test_a_whole_step() -> None:
    x, target = batch(torch.float32)
    model = Model()
    like = copy.deepcopy(model)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    fast = tessera.train_step(model, None, rule, executors=EXECUTORS, strict=True)
    slow = torch.optim.SGD(like.parameters(), lr=0.1)
    for _ in range(3):
        slow.zero_grad()
        wanted = like(x, target)
        wanted.backward()
        slow.step()
        torch.testing.assert_close(fast(x, target), wanted.detach())
    for found, other in zip(model.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(found, other)


def test_padded_logits_have_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "padded", lambda weight: True)
    mode = fake.default_mode()
    with mode:
        given = [torch.empty(s, dtype=torch.bfloat16) for s in ((64, 32), (61, 32), (61,))]
        given.append(torch.empty(64, dtype=torch.int64))
    builder = Builder("program", mode)
    values = [builder.input(n, type_of(x)) for n, x in zip(("x", "w", "b", "target"), given, strict=True)]
    with builder:
        made = builder.emit(LINEAR_LOSS_GRADS, *values, True, -100)
    trace = passes.chunk_loss(builder.finish(made))  # type: ignore[arg-type]
    products = [eqn for eqn in trace.equations if getattr(eqn.op, "_opname", "") in ("linear", "mm")]
    assert {eqn.out.shape[1] for eqn in products} == {64, 32}
    assert [v.shape for v in trace.results()] == [(), (64, 32), (61, 32), (61,)]


@pytest.mark.parametrize("where", ["layer", "between", "loss", "everything"])
def test_what_ran_under_no_grad_is_left_alone(where: str) -> None:
    """Gradients stop where eager stops them, and results say so."""

    def off(part: str) -> torch.no_grad | torch.enable_grad:
        return torch.no_grad() if where in (part, "everything") else torch.enable_grad()

    def program(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with off("layer"):
            logits = F.linear(x, w)
        with off("between"):
            rows = logits.flatten(0, 1).float() if where != "between" else logits.flatten(0, 1).double().float()
        with off("loss"):
            loss = F.cross_entropy(rows, target.flatten())
        return loss, loss + x.square().mean() + (w * w).mean()

    def run(fn: object) -> list[object]:
        x, target = batch(torch.float32)
        torch.manual_seed(1)
        leaves = [x.requires_grad_(), torch.randn(CLASSES, WIDTH, requires_grad=True)]
        loss, total = fn(*leaves, target)  # type: ignore[operator]
        total.backward()
        return [loss.requires_grad, loss.detach(), *(leaf.grad for leaf in leaves)]

    want, got = run(program), run(tessera.jit(program, executors=EXECUTORS, strict=True))
    assert got[0] == want[0]
    torch.testing.assert_close(got[1:], want[1:])


@pytest.mark.parametrize(("size", "count"), [(1, 1), (300 * 2**20, 2), (2 * 2**30, 4), (16 * 2**30, 16)])
def test_few_large_chunks(size: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert passes.chunks(size) == count


def on_a_gpu(chunks: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that sum up the weight's gradient in so many chunks, as they are when values are written over."""
    monkeypatch.setattr(passes, "MOST", ROWS * CLASSES * 2 // chunks)
    mode = fake.default_mode()
    with mode:
        x, w = (torch.empty(n, WIDTH, dtype=torch.bfloat16, device="cuda") for n in (ROWS, CLASSES))
        target = torch.empty(ROWS, dtype=torch.int64, device="cuda")
    builder = Builder("program", mode)
    given = [builder.input(name, type_of(t)) for name, t in (("x", x), ("w", w), ("target", target))]
    with builder:
        types = [replace(given[0].tensor, shape=(), stride=(), dtype=torch.float32), given[0].type, given[1].type, None]
        arguments = (given[0], given[1], None, given[2], True, -100)
        grads = builder.record(LINEAR_LOSS_GRADS, arguments, {}, types)
        trace = builder.finish(list(grads[:3]))  # type: ignore[index]
    final = reuse(passes.chunk_loss(trace))
    summed = [eqn for eqn in final.equations if eqn.opname in ("mm", "addmm") and eqn.out.shape[0] == 64]  # padded
    return [str(eqn.op) for eqn in summed]


def test_gradients_of_chunks_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "FEW", 3)
    assert on_a_gpu(3, monkeypatch) == ["aten.mm.default", *["aten.addmm.out"] * 2]
    assert on_a_gpu(4, monkeypatch) == ["aten.mm.dtype", *["aten.addmm.dtype_out"] * 3]
