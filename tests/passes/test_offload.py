"""Saved tensors that wait on the host: the same gradients, less held on the device, and programs that say so."""

from __future__ import annotations

import pytest
import torch

import tessera
from tessera.executors.aten import bind
from tessera.inspection.examples import example_inputs
from tessera.ir.equation import Value
from tessera.ir.lifetimes import lifetimes
from tessera.ir.printer import compile_trace
from tessera.ir.types import TensorType
from tessera.just_in_time.compiled import compiled_state
from tessera.ops.offload import ARRIVED, FROM_HOST, SENT, TO_HOST
from tessera.passes.memory.offload import Halves, candidates
from tessera.util.errors import OptionError

ROWS, WIDTH = 1024, 256  # just large enough, in single precision
UNIT = ROWS * WIDTH * 4  # bytes of an activation; a weight has a quarter of them


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def stack(depth: int = 5) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[m for _ in range(depth) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())])


def gradients(model: torch.nn.Module, x: torch.Tensor, keep: bool = False, **options: object):
    """The compiled model, its one compilation, and the gradients of all parameters."""
    options.setdefault("executors", ["aten"])
    torch._dynamo.reset()
    model.zero_grad()
    with tessera.override(verify=True):
        fast = tessera.jit(model, strict=True, **options)
        loss = fast(x).square().mean()
    loss.backward(retain_graph=keep)
    if keep:
        loss.backward()
    (compilation,) = compiled_state(fast).compilations()
    return fast, compilation, [p.grad.clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def places(trace, op) -> list[int]:
    return [i for i, eqn in enumerate(trace.equations) if eqn.op is op]


@pytest.mark.parametrize("executors", [["aten"], ["sdpa", "tile", "aten"]])
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_are_the_same_bits(executors, keep):
    model, x = stack(), torch.randn(ROWS, WIDTH)
    _, _, plain = gradients(model, x, keep, executors=executors)
    _, compilation, moved = gradients(model, x, keep, executors=executors, offload="host")
    assert same(plain, moved)
    assert len(compilation.account.offloaded) >= 3 and all(n == UNIT for n in compilation.account.offloaded.values())


def test_the_programs_show_the_copies():
    fast, compilation, _ = gradients(stack(), torch.randn(ROWS, WIDTH), offload="host")
    stages = dict(compilation.account.stages)
    for name in ("forward", "forward prefetch"):
        trace = stages[name]
        assert len(places(trace, TO_HOST)) == len(places(trace, SENT)) == len(compilation.account.offloaded)
        assert "torch.ops.tessera.to_host(linear)" in str(trace) and "torch.ops.tessera.sent(linear_copy" in str(trace)
    count = len(compilation.account.offloaded)
    for name in ("backward", "backward prefetch"):
        assert len(places(stages[name], FROM_HOST)) == len(places(stages[name], ARRIVED)) == count
    told = tessera.explain(fast)
    (graph,) = told.graphs
    assert graph.offloaded == compilation.account.offloaded and not set(graph.offloaded) & set(graph.saved)
    assert "to the host and back a step" in str(told)


def test_copies_begin_early_and_are_waited_for_late():
    _, compilation, _ = gradients(stack(8), torch.randn(ROWS, WIDTH), offload="host")
    forward, backward = (program.trace for program in compilation.account.programs)
    made = {v: i for i, eqn in enumerate(forward.equations) for v in eqn.results()}
    waits = {eqn.args[0]: i for i, eqn in enumerate(forward.equations) if eqn.op is SENT}
    for eqn in (forward.equations[i] for i in places(forward, TO_HOST)):
        begun = made[eqn.out]
        assert begun == made[eqn.args[0]] + 1  # nothing between the tensor and its copy
        readers = [
            i for i, e in enumerate(forward.equations) if eqn.args[0] in e.inputs() and e.op not in (SENT, TO_HOST)
        ]
        assert waits[eqn.out] > max(readers) > begun
    begun = {forward_eqn.out: i for i, forward_eqn in enumerate(backward.equations) if forward_eqn.op is FROM_HOST}
    early = 0
    for i in places(backward, ARRIVED):
        eqn = backward.equations[i]
        first = next(j for j, e in enumerate(backward.equations) if eqn.out in e.inputs())
        assert first == i + 1  # waited for just before its first reader
        early += any(e.op not in (FROM_HOST, ARRIVED) for e in backward.equations[begun[eqn.args[0]] : i])
    assert early == len(compilation.account.offloaded)


def test_less_is_predicted_to_be_held():
    x = torch.randn(ROWS, WIDTH)
    told = [tessera.explain(gradients(stack(), x, **more)[0], measure=True) for more in ({}, {"offload": "host"})]
    plain, moved = (told.graphs[0].memory for told in told)
    for before, after in zip(plain, moved, strict=True):
        assert after.predicted.peak <= before.predicted.peak - 3 * UNIT
    for program in plain:  # with what forward saved, and backward frees
        assert program.measured.after == program.predicted.after
    # what is on the host is not counted; the copies back are
    assert moved[1].measured.after == moved[1].predicted.after


@pytest.mark.parametrize("executors", [["aten"], ["sdpa", "tile", "aten"]])
def test_a_budget_bounds_the_predicted_peak(executors):
    model, x = stack(8), torch.randn(ROWS, WIDTH)
    fast, _, want = gradients(model, x, executors=executors)
    whole = _peak(fast)
    counts = []
    for budget in (whole, whole - UNIT, whole - 2 * UNIT):
        fast, compilation, got = gradients(model, x, executors=executors, offload="host", memory_budget=budget)
        assert _peak(fast) <= budget and same(want, got)
        counts.append(len(compilation.account.offloaded))
    assert counts[0] == 0 < counts[1] < counts[2]


def _peak(fast) -> int:
    return max(program.predicted.peak for program in tessera.explain(fast).graphs[0].memory)


def test_a_budget_that_cannot_be_met_is_told():
    fast, compilation, _ = gradients(stack(), torch.randn(ROWS, WIDTH), offload="host", memory_budget="1KB")
    assert "above the budget" in compilation.account.offload_note and "checkpoint" in str(tessera.explain(fast))
    fast, compilation, _ = gradients(stack(), torch.randn(ROWS, WIDTH), offload="host", memory_budget="1GB")
    assert not compilation.account.offloaded and "fit the budget without it" in str(tessera.explain(fast))
    fast, compilation, _ = gradients(stack(), torch.randn(8, WIDTH), offload="host")
    assert not compilation.account.offloaded and "nothing that is saved is large" in str(tessera.explain(fast))


def test_what_lives_anyway_stays():
    """Parameters, inputs, results, and views of them are not copied; nor is what two saved values share."""

    def f(x, w):
        h = torch.sin(x @ w)
        y = torch.exp(h)
        z = torch.exp(y * 0.1)
        return y, [torch.exp(-torch.tanh(z + i)) for i in range(6)]

    x, w = torch.randn(ROWS, WIDTH), (torch.randn(WIDTH, WIDTH) / 100).requires_grad_()
    fast = tessera.jit(f, executors=["aten"], strict=True, offload="host")
    y, rest = fast(x, w)
    sum(r.sum() for r in rest).backward()
    (compilation,) = compiled_state(fast).compilations()
    forward = dict(compilation.account.stages)["forward"]
    given = {v.name for v in forward.inputs} | {v.name for v in forward.outputs[: compilation.account.results]}
    assert compilation.account.offloaded and not given & set(compilation.account.offloaded)


def test_tensors_that_backward_reads_at_once_stay():
    _, compilation, _ = gradients(stack(8), torch.randn(ROWS, WIDTH), offload="host")
    kept = [n for n in compilation.account.saved if n.startswith(("linear", "gelu"))]
    assert kept and not any(name in compilation.account.offloaded for name in kept)
    assert kept[-1] == "linear_7"  # the last of forward is the first of backward


def test_sizes_may_be_symbolic():
    model = stack()
    fast = tessera.jit(model, executors=["aten"], strict=True, offload="host", dynamic=True)
    plain = tessera.jit(model, executors=["aten"], strict=True, dynamic=True)
    for rows in (ROWS, 1200):
        x = torch.randn(rows, WIDTH)
        found = []
        for run in (plain, fast):
            model.zero_grad()
            run(x).square().mean().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert same(*found)
    assert all(c.account.offloaded for c in compiled_state(fast).compilations())


def test_an_edited_program_is_used(tmp_path):
    model, x = stack(), torch.randn(ROWS, WIDTH)
    fast, compilation, want = gradients(model, x, offload="host")
    path = tmp_path / "forward.py"
    dict(compilation.account.stages)["forward"].save(str(path))
    lines = path.read_text().splitlines()
    moved = [line for line in lines if "to_host(linear)" in line or "sent(linear_copy," in line]
    lines = [line for line in lines if line not in moved]
    later = next(i for i, line in enumerate(lines) if " gelu_1 = " in line)
    lines[later + 1 : later + 1] = moved  # it leaves later
    path.write_text("\n".join(lines) + "\n")
    tessera.edit(fast, str(path), stage="forward")
    edited = dict(compilation.account.stages)["forward"]
    assert len(moved) == 2 and places(edited, TO_HOST)[0] > 1
    model.zero_grad()
    fast(x).square().mean().backward()
    assert same(want, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("executors", [["aten"], ["sdpa", "tile", "aten"]])
def test_a_whole_step(executors):
    def steps(**more):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = stack(), torch.randn(ROWS, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with tessera.override(verify=True):
            step = tessera.train_step(
                model, lambda m, x: m(x).square().mean(), optimizer, executors=executors, strict=True, **more
            )
            losses = [step(x).item() for _ in range(3)]
        return losses, [p.detach().clone() for p in model.parameters()], tessera.explain(step).graphs[0]

    (before, plain, held), (after, moved, less) = steps(), steps(offload="host")
    assert before == after and same(plain, moved)
    assert less.offloaded and less.memory[0].predicted.peak < held.memory[0].predicted.peak
    assert "waits on the host for backward" in less.cuda_graph


def test_options_are_checked():
    with pytest.raises(OptionError, match="offload: expected one of none, host, got 'disk'"):
        tessera.jit(stack(), offload="disk")
    with pytest.raises(OptionError, match="offload: expected one of none, host, got True"):
        tessera.jit(stack(), offload=True)
    model = stack(1)
    with pytest.raises(OptionError, match="cuda_graph=True: expected a step that stays on the device"):
        tessera.train_step(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), cuda_graph=True, offload="host"
        )
    with tessera.override(offload="host"):
        _, compilation, _ = gradients(stack(), torch.randn(ROWS, WIDTH))
        assert compilation.account.offloaded


def test_operators_copy_and_keep_strides():
    x = torch.randn(4, 6, 8).permute(2, 0, 1)
    h = torch.ops.tessera.to_host(x)
    back = torch.ops.tessera.from_host(torch.ops.tessera.sent(h, x), x.device)
    assert h.data_ptr() != x.data_ptr() != back.data_ptr() and torch.ops.tessera.arrived(back) is not None
    for made in (h, back):
        assert torch.equal(made, x) and made.stride() == x.stride()


@pytest.mark.parametrize(
    "shape, stride, dense",
    [
        ((4, 6), (6, 1), True),
        ((4, 6), (1, 4), True),
        ((4, 6), (8, 1), False),
        ((4, 6), (0, 1), False),
        ((1, 6), (99, 1), True),
    ],
)
def test_only_tensors_without_gaps_leave(shape, stride, dense):
    assert TensorType(torch.float32, shape, stride, torch.device("cpu")).is_dense is dense


def test_nothing_is_saved_nothing_moves():
    _, compilation, _ = gradients(stack(1), torch.randn(8, WIDTH), offload="host")
    forward, backward = (program.trace for program in compilation.account.programs)
    saved = tuple(v for v in forward.outputs[compilation.account.results :] if isinstance(v, Value))
    assert candidates(Halves(forward, backward, saved)) == []


@pytest.mark.parametrize("executors", [["aten"], ["sdpa", "tile", "aten"]])
def test_nothing_touches_a_tensor_while_it_is_copied(executors):
    """Copies that happen only where they are waited for, as late as a stream may be, give the same numbers."""
    model = torch.nn.Sequential(*[m for _ in range(5) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Sigmoid())])
    _, compilation, _ = gradients(model, torch.randn(ROWS, WIDTH), executors=executors, offload="host")
    forward, backward = (program.trace for program in compilation.account.programs)
    begun: dict[int, torch.Tensor] = {}

    def begin(source, *_):
        target = torch.full_like(source, float("nan"))
        begun[target.data_ptr()] = source
        return target

    def end(target, *_):
        return target.copy_(begun.pop(target.data_ptr()))

    def late(op):
        return {TO_HOST: begin, SENT: end, FROM_HOST: begin, ARRIVED: end}.get(op) or bind(op)

    given, found = example_inputs(forward), []
    cotangent = torch.randn(ROWS, WIDTH)
    for how in (bind, late):
        with torch.no_grad():
            run, back = (compile_trace(t, bind=how, dead=lifetimes(t)) for t in (forward, backward))
            out = run(*given)
            found.append([*out[: compilation.account.results], *back(*out[compilation.account.results :], cotangent)])
    assert compilation.account.offloaded and not begun and same(*found)
