"""Replayed programs: what is captured when, which memory is used, what is handed out; without a GPU."""

from __future__ import annotations

import copy

import torch

import tessera
from tessera.ir.trace import Trace
from tessera.runtime import cudagraph
from tessera.runtime.capturable import why_not_captured
from tessera.runtime.cudagraph import Graphed
from tessera.tools.models import GPT, GPTConfig


class Fake:
    """Capturing carries nothing out: tensors that the program writes are as they were when it returns."""

    def __init__(self, *state: torch.Tensor) -> None:
        self.state, self.fails = state, False
        self.seconds = (0.0, 1.0)  # of the host and of the device

    def pool(self):
        return "pool"

    def beside(self, run, device):
        return run()

    def timed(self, run, device):
        return run(), *self.seconds

    def capture(self, run, pool, device):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        before = [x.clone() for x in self.state]
        results = run()
        for x, old in zip(self.state, before, strict=True):
            x.copy_(old)

        def replay():
            for x, new in zip(results, run(), strict=True):
                x.copy_(new)

        return replay, results


CPU = torch.device("cpu")


def graphed(run, *state, written=(), **more):
    return Graphed(run, written, CPU, Fake(*state), **more)


def test_every_call_is_carried_out_once():
    total = torch.zeros(3)

    def add(x, total):
        total += x
        return (total * 2,)

    run = graphed(add, total, written=(1,))
    for k in range(6):
        (out,) = run(torch.full((3,), 1.0), total)
        assert torch.equal(total, torch.full((3,), k + 1.0))
        assert torch.equal(out, total * 2)
    assert run.captures == 1 and run.replays == 4 and not run.reason


def test_inputs_that_move_are_copied_in():
    run = graphed(lambda x, w: (x @ w,))
    w = torch.randn(4, 4)
    for _ in range(6):
        x = torch.randn(2, 4)
        torch.testing.assert_close(run(x, w)[0], x @ w)
    (size,) = run.sizes.values()
    assert 1 in size.graph.addresses


def test_a_parameter_that_moved_is_captured_anew():
    run = graphed(lambda x, w: (x * w,))
    w, x = torch.randn(4), torch.randn(4)
    for _ in range(4):
        run(x, w)
    other = torch.randn(4)
    torch.testing.assert_close(run(x, other)[0], x * other)
    torch.testing.assert_close(run(x, w)[0], x * w)
    assert run.captures == 2  # from then on it is copied in


def test_a_written_input_that_moves_is_written_all_the_same():
    def bump(x):
        x += 1
        return (x * 2,)

    run = graphed(bump, written=(0,))
    kept = []
    for k in range(5):
        x = torch.full((3,), float(k))
        kept.append(x)
        (out,) = run(x)
        assert torch.equal(x, torch.full((3,), k + 1.0)) and torch.equal(out, x * 2)


def test_a_new_cache_after_many_replays_is_not_copied(monkeypatch):
    """Another text, another cache: captured where it lies, however often that happens."""
    monkeypatch.setattr(cudagraph, "PAID", 4)
    monkeypatch.setattr(cudagraph, "MOST_MOVES", 0)

    def write(cache, at):
        cache[at] += 1
        return (cache.sum(),)

    caches = [torch.zeros(8) for _ in range(3)]
    run = graphed(write, *caches, written=(0,))
    at = torch.zeros(1, dtype=torch.int64)
    for cache in caches:
        for k in range(8):
            at.fill_(k)
            assert run(cache, at)[0] == k + 1
        assert torch.equal(cache, torch.ones(8))
    (size,) = run.sizes.values()
    assert run.captures == 3 and not size.graph.copied and not run.retired and not run.reason


def test_memory_that_moves_again_and_again(monkeypatch):
    monkeypatch.setattr(cudagraph, "MOST_MOVES", 0)
    run = graphed(lambda x: (x + 1,))
    x = torch.zeros(2)
    for _ in range(4):
        run(x)
    assert torch.equal(run(torch.ones(2))[0], torch.full((2,), 2.0))
    assert "moves" in run.reason


def test_results_that_are_held_are_not_overwritten(monkeypatch):
    monkeypatch.setattr(cudagraph, "SMALL", 0)
    run = graphed(lambda x: (x * 2,))
    kept = []
    for k in range(8):
        kept.append(run(torch.full((4,), float(k)))[0])
    for k, out in enumerate(kept):
        assert torch.equal(out, torch.full((4,), 2.0 * k))
    view = run(torch.full((4,), 9.0))[0][1:]
    run(torch.full((4,), 1.0))
    assert torch.equal(view, torch.full((3,), 18.0))


def test_results_that_nobody_holds_are_not_copied(monkeypatch):
    monkeypatch.setattr(cudagraph, "SMALL", 0)
    run = graphed(lambda x: (x * 2,))
    x = torch.ones(4)
    places = [run(x)[0].data_ptr() for _ in range(8)]
    assert run.captures == 1 and len(set(places[2:])) == 1


def test_a_graph_for_every_size_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(cudagraph, "MOST_GRAPHS", 2)
    run = graphed(lambda x, n: (x * n,))
    for size in (2, 3, 4):
        for _ in range(4):
            assert torch.equal(run(torch.ones(size), 3)[0], torch.full((size,), 3.0))
    assert run.captures == 2


def test_a_number_is_part_of_the_graph():
    run = graphed(lambda x, n: (x * n,))
    for n in (2, 3):
        for _ in range(4):
            assert torch.equal(run(torch.ones(2), n)[0], torch.full((2,), float(n)))


def test_a_failed_capture_runs_as_before_and_says_why():
    run = graphed(lambda x: (x + 1,))
    run.api.fails = True
    for _ in range(5):
        assert torch.equal(run(torch.zeros(2))[0], torch.ones(2))
    assert "capturing failed" in run.reason and "stream is capturing" in str(run)


# --- what can be captured ---


def on_cuda(trace: Trace) -> Trace:
    """The same program with all its tensors on a GPU, to be looked at only."""
    import dataclasses

    from tessera.ir.equation import Value, map_values
    from tessera.ir.types import TensorType

    moved = {}

    def look(v):
        if v not in moved:
            t = v.type
            moved[v] = Value(
                v.name, dataclasses.replace(t, device=torch.device("cuda", 0)) if isinstance(t, TensorType) else t
            )
        return moved[v]

    return trace.with_(
        inputs=tuple(map(look, trace.inputs)),
        equations=tuple(
            e.with_(
                args=map_values(e.args, look), kwargs=map_values(e.kwargs, look), outputs=tuple(map(look, e.outputs))
            )
            for e in trace.equations
        ),
        outputs=map_values(trace.outputs, look),
    )


def test_what_is_refused():
    plain = tessera.trace(lambda x: [x.exp().sum()], torch.randn(3))
    assert "is on cpu" in why_not_captured(plain)
    assert why_not_captured(on_cuda(plain)) == ""


def test_jit_says_why_not():
    fast = tessera.jit(lambda x: x.exp() * 2, cuda_graph=True, executors=["aten"], strict=True)
    x = torch.randn(3)
    torch.testing.assert_close(fast(x), x.exp() * 2)
    (report,) = tessera.explain(fast).graphs
    assert "is on cpu" in report.cuda_graph and "is on cpu" in str(tessera.explain(fast))
    trained = tessera.jit(torch.nn.Linear(3, 3), cuda_graph=True, executors=["aten"], strict=True)
    trained(x)
    assert "train_step" in tessera.explain(trained).graphs[0].cuda_graph


def test_a_whole_step_is_replayed(monkeypatch):
    """The step's program on a device that captures as a GPU does."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=16, heads=2, context=8, vocab=16))
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))
    step = tessera.train_step(model, None, mine, clip_norm=1.0, executors=["tile", "aten"], strict=True)
    made = []

    def replayed(self, run, trace, options):
        state = [*model.parameters(), *(x for s in mine.state.values() for k, x in s.items() if k != "step")]
        made.append(Graphed(run, self.ends.written, CPU, Fake(*state)))
        return made[-1]

    monkeypatch.setattr("tessera.pipeline.executable.Executable.replayed", replayed)
    for _ in range(6):
        x = torch.randint(0, 16, (2, 8))
        theirs.zero_grad()
        loss = other(x, x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        theirs.step()
        torch.testing.assert_close(step(x, x), loss.detach(), rtol=1e-4, atol=1e-4)
    assert made[0].replays >= 3, str(made[0])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


def test_a_program_is_left_alone_where_the_device_is_the_slower_one():
    total = torch.zeros(3)

    def add(x, total):
        total += x
        return (total * 2,)

    for seconds, captured in (((0.001, 0.004), False), ((0.003, 0.004), True)):
        total.zero_()
        run = graphed(add, total, written=(1,), always=False)
        run.api.seconds = seconds
        for k in range(6):
            (out,) = run(torch.full((3,), 1.0), total)
            assert torch.equal(total, torch.full((3,), k + 1.0)) and torch.equal(out, 2 * total)
        assert (run.captures, run.replays) == ((1, 3) if captured else (0, 0))
        told = (
            "CUDA graphs: 1 captured"
            if captured
            else "no CUDA graph: the host launches in 1.00 ms what the device needs"
        )
        assert told in str(run)


def test_every_size_is_measured_by_itself():
    run = graphed(lambda x: (x * 2,), always=False)
    for size, seconds in ((3, (0.1, 1.0)), (2, (0.9, 1.0))):
        run.api.seconds = seconds
        for _ in range(5):
            assert torch.equal(run(torch.ones(size))[0], torch.full((size,), 2.0))
    assert [s.pays for s in run.sizes.values()] == [False, True] and "1 captured" in str(run)
