"""The profiler: what it measures, what it counts, that its sums add up and that it leaves no trace."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tessera
from tessera.inspection.work import is_view, work
from tessera.just_in_time.compiled import compiled_state
from tessera.machines import machine
from tessera.tools.models import GPT, GPTConfig
from tessera.tools.profile import result, run
from tessera.tools.profile.rows import rows_of, spans_of
from tessera.tools.profile.sample import Ran, Step, from_torch_profile
from tessera.util.errors import InputError, OptionError

SMALL = GPTConfig(layers=2, width=32, heads=2, context=40, vocab=16)  # more rows than product kernels of our own take
pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def trained():
    torch._dynamo.reset()
    tokens = torch.randint(SMALL.vocab, (2, SMALL.context))
    fast = tessera.jit(GPT(SMALL), executors=["sdpa", "tile", "aten"])
    return fast, tokens, tessera.profile(fast, tokens, tokens, steps=4)


def test_every_equation_has_a_row(trained):
    fast, _, profile = trained
    programs = compiled_state(fast).compilations()[0].account.programs
    assert [p.name for p in programs] == ["forward", "backward"]
    assert len(profile.rows) == sum(len(p.trace.equations) for p in programs)
    assert {(r.program, r.index) for r in profile.rows} == {
        (p.name, i) for p in programs for i in range(len(p.trace.equations))
    }


def test_rows_are_sorted_and_say_where_they_come_from(trained):
    rows = trained[2].rows
    assert [r.seconds for r in rows] == sorted((r.seconds for r in rows), reverse=True)
    assert all(r.seconds > 0 and r.calls == 1 for r in rows)
    linear = next(r for r in rows if r.operator == "aten.linear" and r.module == "blocks.1.attention.qkv")
    assert linear.lines[0][0].endswith("models.py") and linear.where.startswith("models.py:")
    region = next(r for r in rows if r.executor == "tile")
    assert " + " in region.operator


def test_sums_add_up(trained):
    p = trained[2]
    assert p.equation_seconds == pytest.approx(sum(r.seconds for r in p.rows))
    assert p.equation_seconds + p.between_seconds == pytest.approx(p.measured_seconds)
    assert 0 < p.equation_seconds < p.measured_seconds
    assert p.step_seconds > 0 and p.device_seconds == 0 and p.gaps == ()
    step = next(s for s in p.spans if s.track == "step")
    host = [s for s in p.spans if s.track == "host"]
    assert len(host) == len(p.rows)
    assert sum(s.seconds for s in host) < step.seconds
    for a, b in zip(host, host[1:], strict=False):
        assert a.start + a.seconds <= b.start + 1e-9


def test_bytes_and_flops_are_those_of_the_shapes(trained):
    p = trained[2]
    qkv = next(r for r in p.rows if r.operator == "aten.linear" and r.module == "blocks.0.attention.qkv")
    tokens, width = 2 * SMALL.context, SMALL.width
    assert qkv.bytes == 4 * (tokens * width + 3 * width * width + 3 * width + tokens * 3 * width)
    assert qkv.flops == pytest.approx(2 * tokens * width * 3 * width, rel=0.1)
    for row in p.rows:
        assert row.limit in ("memory", "compute", "")
        assert (row.reached is None) == (row.limit == "")
        if row.reached is not None:
            assert row.reached == pytest.approx(row.roofline_seconds / row.seconds)


def test_the_compiled_function_is_left_as_it_was():
    fast, x = tessera.jit(nn.Linear(4, 4)), torch.randn(2, 4)
    fast(x)
    compilation = compiled_state(fast).compilations()[0]
    call, runs = compilation.executable.call, [p.run for p in compilation.account.programs]
    tessera.profile(fast, x, steps=1)
    assert compilation.executable.call is call
    assert all(p.run is run for p, run in zip(compilation.account.programs, runs, strict=True))
    assert all("_tessera_" not in p.run.source for p in compilation.account.programs)
    assert len(compiled_state(fast).compilations()) == 1


def test_the_function_is_back_after_a_failure():
    calls = []

    def f(x):
        return x.sin() * 2

    fast = tessera.jit(f)
    fast(torch.ones(3))
    compilation = compiled_state(fast).compilations()[0]
    call = compilation.executable.call

    def failing():
        calls.append(compilation.executable.call is not call)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        run._on_cpu([(compilation, "f")], failing, 1)
    assert calls == [True] and compilation.executable.call is call


def test_no_gradient_is_left_behind_and_none_is_touched():
    model = nn.Linear(4, 4)
    model.weight.grad = torch.full((4, 4), 7.0)
    p = tessera.profile(tessera.jit(model), torch.randn(2, 4), steps=2)
    assert {r.program for r in p.rows} == {"forward", "backward"}
    assert torch.equal(model.weight.grad, torch.full((4, 4), 7.0)) and model.bias.grad is None


def test_backward_may_be_left_out():
    p = tessera.profile(tessera.jit(nn.Linear(4, 4)), torch.randn(2, 4), steps=1, backward=False)
    assert {r.program for r in p.rows} == {"forward"}
    with torch.no_grad():
        p = tessera.profile(tessera.jit(nn.Linear(4, 4)), torch.randn(2, 4), steps=1)
    assert {r.program for r in p.rows} == {"inference"}


def test_the_functional_frontend_is_profiled_too():
    fast = tessera.jit(lambda x: F.gelu(x) + 1, frontend="functional", executors=["aten"])
    p = tessera.profile(fast, torch.randn(8), steps=1)
    assert {r.operator for r in p.rows} == {"aten.gelu", "aten.add_"}


def test_what_cannot_be_profiled_is_refused():
    with pytest.raises(InputError, match=r"expected what tessera.jit gave, got function"):
        tessera.profile(lambda x: x, torch.ones(1))
    with pytest.raises(InputError, match="at least 1 step"):
        tessera.profile(tessera.jit(lambda x: x + 1), torch.ones(1), steps=0)
    with pytest.raises(InputError, match="no result requires grad"):
        tessera.profile(tessera.jit(lambda x: x + 1), torch.ones(1), backward=True)


def test_a_training_step_is_profiled_and_goes_on_training():
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    step = tessera.train_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1))
    first = step(x)
    p = tessera.profile(step, x, steps=2)
    assert {r.program for r in p.rows} == {"step"}
    assert step(x) < first


# --- output ---


def test_tables_sum_to_the_same(trained):
    p = trained[2]
    for by in result.GROUPS:
        groups = result.grouped(p.rows, by)
        assert sum(g.seconds for g in groups) == pytest.approx(p.equation_seconds)
        assert len(groups) <= len(p.rows)
    assert p.table(5).row_count == 6 and p.table(None).row_count == len(p.rows)
    assert "aten.linear" in str(p) and "models.py:" in str(p)
    with pytest.raises(OptionError, match="equation, operator, line, module"):
        p.table(by="colour")


def test_dict_is_plain(trained):
    found = json.loads(json.dumps(trained[2].to_dict()))
    assert found["rows"][0]["seconds"] == trained[2].rows[0].seconds
    assert found["rates"]["bandwidth"] > 1e8 and found["equation_seconds"] > 0


def test_chrome_trace_is_valid(trained, tmp_path):
    path = tmp_path / "trace.json"
    trained[2].save_chrome(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(named.values()) == {"step", "program", "host"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(trained[2].spans)
    for e in complete:
        assert e["tid"] in named and e["ts"] >= 0 and e["dur"] >= 0 and isinstance(e["name"], str)
    step = next(e for e in complete if e["name"] == "step")
    assert all(e["ts"] + e["dur"] <= step["dur"] * 1.001 for e in complete)
    assert any("models.py" in e["args"].get("where", "") for e in complete)


# --- what must be moved ---


def equations(f, *args):
    return tessera.trace(f, *args).equations


def test_an_expanded_tensor_is_read_once():
    (eqn,) = equations(lambda x, y: x + y, torch.ones(1, 8).expand(64, 8), torch.ones(64, 8))
    assert work(eqn).bytes == 4 * (8 + 512 + 512)


def test_a_gather_reads_what_it_takes():
    (eqn,) = equations(lambda w, i: F.embedding(i, w), torch.ones(1000, 16), torch.zeros(4, dtype=torch.long))
    assert work(eqn).bytes == 4 * 8 + 2 * 4 * 16 * 4


def test_views_cost_nothing_and_copies_do():
    (view,) = equations(lambda x: x.reshape(6, 4), torch.ones(4, 6))
    (copy,) = equations(lambda x: x.reshape(-1), torch.ones(4, 6).t())
    assert is_view(view) and work(view).bytes == 0
    assert not is_view(copy) and work(copy).bytes == 2 * 4 * 24


def test_an_executors_operator_counts_as_the_operator():
    q = torch.randn(1, 2, 16, 8)
    fast = tessera.jit(lambda q: F.scaled_dot_product_attention(q, q, q), executors=["sdpa", "aten"])
    fast(q)
    eqn = compiled_state(fast).compilations()[0].account.programs[0].trace.equations[0]
    assert work(eqn).matrix_flops == pytest.approx(4 * 2 * 16 * 16 * 8, rel=0.2)


# --- a torch profile from a GPU ---


def event(name, ts, dur, cat="cpu_op", **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": args}


EVENTS = [
    event("tessera/step", 100.0, 100.0, "user_annotation"),
    event("tessera/0/-1", 101.0, 50.0),
    event("tessera/0/0", 102.0, 10.0),
    event("cudaLaunchKernel", 104.0, 2.0, "cuda_runtime", correlation=1),
    event("tessera/0/1", 114.0, 10.0),
    event("cuLaunchKernel", 115.0, 2.0, "cuda_driver", correlation=2),
    event("cuLaunchKernel", 118.0, 2.0, "cuda_driver", correlation=3),
    event("cudaLaunchKernel", 160.0, 2.0, "cuda_runtime", correlation=4),
    event("first", 120.0, 20.0, "kernel", correlation=1, stream=7, device=0),
    event("second", 140.0, 10.0, "kernel", correlation=2, stream=7, device=0),
    event("third", 155.0, 5.0, "kernel", correlation=3, stream=7, device=0),
    event("Memset", 170.0, 5.0, "gpu_memset", correlation=4, stream=7, device=0),
    event("late", 500.0, 5.0, "kernel", correlation=9, stream=7, device=0),
]


def test_kernels_belong_to_the_equation_that_launched_them():
    (step,) = from_torch_profile(EVENTS)
    assert step.seconds == pytest.approx(100e-6)
    assert [(r.equation, r.name) for r in step.kernels] == [
        ((0, 0), "first"), ((0, 1), "second"), ((0, 1), "third"), (None, "Memset"),
    ]  # fmt: skip
    assert {r.stream for r in step.kernels} == {"GPU 0 stream 7"}
    busy, gaps = step.busy()
    assert busy == pytest.approx(40e-6)
    assert [(round(a * 1e6), round(b * 1e6)) for a, b in gaps] == [(50, 5), (60, 10)]


def test_kernels_that_overlap_are_busy_once():
    step = Step(1.0, kernels=[Ran(None, 0.0, 0.4), Ran(None, 0.1, 0.1), Ran(None, 0.3, 0.3), Ran(None, 0.8, 0.1)])
    busy, gaps = step.busy()
    assert busy == pytest.approx(0.7) and gaps == [(pytest.approx(0.6), pytest.approx(0.2))]


def test_rows_of_a_gpu_take_the_time_of_kernels():
    fast = tessera.jit(lambda x: x.sin().cumsum(0), executors=["aten"])
    fast(torch.ones(8))
    (compilation,) = compiled_state(fast).compilations()
    programs = [(compilation.name, p) for p in compilation.account.programs]
    rows = rows_of(programs, from_torch_profile(EVENTS), machine("h200"))
    assert [(r.operator, round(r.seconds * 1e6), round(r.host_seconds * 1e6)) for r in rows] == [
        ("aten.sin", 20, 10), ("aten.cumsum", 15, 10),
    ]  # fmt: skip
    assert rows[1].kernels == (("second", pytest.approx(10e-6)), ("third", pytest.approx(5e-6)))
    spans = spans_of(programs, from_torch_profile(EVENTS)[0], rows)
    assert [s.name for s in spans if s.track.startswith("GPU")] == ["first", "second", "third", "Memset"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_profile_on_a_gpu(tmp_path):
    config = GPTConfig(layers=2, width=256, heads=4, context=256)
    model = GPT(config).to("cuda", torch.bfloat16)
    tokens = torch.randint(256, (8, 256), device="cuda")
    p = tessera.profile(tessera.jit(model, executors=["sdpa", "tile", "aten"]), tokens, tokens, steps=4)
    assert {r.program for r in p.rows} == {"forward", "backward"}
    heavy = [r for r in p.rows if r.operator in ("aten.linear", "aten.mm") or r.executor == "tile"]
    assert heavy and all(r.kernels and r.seconds > 0 for r in heavy)
    assert all(r.seconds < 1e-2 and (r.reached is None or r.reached < 2) for r in heavy)
    assert p.equation_seconds + p.outside_seconds == pytest.approx(p.device_seconds, rel=0.1)
    assert p.idle_seconds >= 0 and p.device_seconds < p.measured_seconds
    p.save_chrome(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(e["ph"] == "X" and e["cat"].startswith("GPU") for e in events)
