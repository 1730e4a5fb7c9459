"""Looking in: traces that print and run, stages that diff, edits that take effect or are refused, explanations."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os

import llvmlite.binding
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import tessera
from tessera.inspection.advice import changed, for_break, for_recompile
from tessera.tile.dialect import interp
from tessera.tile.dialect.text import kernels, parse
from tessera.tools.models import Block, GPTConfig
from tessera.util.errors import CaptureError, EditError, InputError


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def run_file(path: str, name: str):
    scope: dict = {}
    with open(path) as file:
        exec(file.read(), scope)
    return scope[name]


def model(x, w):
    h = F.gelu(x @ w)
    with torch.no_grad():
        scale = h.abs().max()
    return h / scale


def test_printed_block_is_short_and_runs(tmp_path):
    block, x = Block(GPTConfig()), torch.randn(1, 16, 128)
    trace = tessera.trace(block, x)
    text = str(trace)
    assert len(text.splitlines()) < 40
    for word in ("aten.layer_norm(", "aten.linear(", "aten.scaled_dot_product_attention(", "aten.gelu("):
        assert word in text
    path = str(tmp_path / "block.py")
    trace.save(path)
    (out,) = run_file(path, "Block")(x)
    assert torch.equal(out, block(x))


def test_no_grad_is_printed_and_survives(tmp_path):
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    trace = tessera.trace(model, x, w)
    assert "with torch.no_grad():" in str(trace)
    path = str(tmp_path / "f.py")
    trace.save(path)
    (out,) = run_file(path, "model")(x, w)
    (want,) = torch.autograd.grad(model(x, w).sum(), w)
    (got,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(got, want)


def test_every_stage_runs_by_itself(tmp_path):
    fast = tessera.jit(model, strict=True)
    x, w = torch.randn(3, 4), torch.randn(4, 4)
    with torch.no_grad():
        out = fast(x, w)
    stages = tessera.stages(fast)
    for name in ("captured", "canonicalise", "fold", "cse", "dce", "inference canonicalise"):
        path = str(tmp_path / f"{name}.py")
        stages[name].save(path)
        with torch.no_grad():
            (again,) = run_file(path, "model_0")(x, w)
        torch.testing.assert_close(again, out)
    assert stages.graphs() == ["model_0"]
    with pytest.raises(InputError, match="captured"):
        stages["nothing"]


def test_stages_before_any_call():
    with pytest.raises(InputError, match="call the function first"):
        tessera.stages(tessera.jit(model))
    with pytest.raises(InputError, match="tessera.jit"):
        tessera.stages(model)


def edited(fast, stage, tmp_path, change):
    path = str(tmp_path / "edited.py")
    tessera.stages(fast)[stage].save(path)
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(change(text))
    tessera.edit(fast, path)


def test_edit_changes_forward_and_backward(tmp_path):
    fast = tessera.jit(lambda x: x.sin() * 2, strict=True)
    x = torch.randn(3, requires_grad=True)
    fast(x)
    edited(fast, "captured", tmp_path, lambda text: text.replace("aten.sin(", "aten.cos("))
    out = fast(x)
    torch.testing.assert_close(out, x.cos() * 2)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], -2 * x.sin())


def test_edit_of_the_backward_alone(tmp_path):
    fast = tessera.jit(lambda x: x.sin(), strict=True)
    x = torch.randn(3, requires_grad=True)
    fast(x)
    edited(fast, "backward", tmp_path, lambda text: text.replace("aten.cos(", "aten.sin("))
    torch.testing.assert_close(torch.autograd.grad(fast(x).sum(), x)[0], x.sin())


def test_edit_with_dynamic_sizes(tmp_path):
    fast = tessera.jit(lambda x: x.view(-1, 2).sum(1), dynamic=True, strict=True)
    fast(torch.ones(4, 2))
    edited(fast, "captured", tmp_path, lambda text: text.replace("aten.sum(", "aten.mean("))
    torch.testing.assert_close(fast(torch.ones(6, 2)), torch.ones(6))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.replace("return (mul,)", "return (mul, mul)"), "expected 1 outputs, got 2"),
        (lambda t: t.replace("return (mul,)", "return (mul.sum(),)"), r"expected output 0 to be f32\[3\]"),
        (lambda t: t.replace("def lambda_0(x)", "def lambda_0(x, y)"), "function of"),
        (lambda t: t.replace("def lambda_0(", "def other("), "expected a function 'lambda_0'"),
        (lambda t: t.replace("return (mul,)", "x.add_(1)\n    return (mul,)"), "it writes x"),
        (lambda t: "\n".join(t.splitlines()[1:]), "does not say which stage"),
        (lambda t: t.replace("'captured'", "'claim'"), "cannot be edited"),
    ],
)
def test_edits_that_do_not_fit_are_refused(tmp_path, change, message):
    fast = tessera.jit(lambda x: x.sin() * 2, strict=True)
    x = torch.randn(3)
    want = fast(x)
    with pytest.raises(EditError, match=message):
        edited(fast, "captured", tmp_path, change)
    torch.testing.assert_close(fast(x), want)


def test_an_edit_ends_those_of_later_stages(tmp_path):
    fast = tessera.jit(lambda x: x.sin() * 2, strict=True)
    x = torch.randn(3, requires_grad=True)
    fast(x)
    edited(fast, "backward", tmp_path, lambda text: text.replace("aten.cos(", "aten.sin("))
    edited(fast, "captured", tmp_path, lambda text: text.replace("aten.sin(", "aten.exp("))
    torch.testing.assert_close(torch.autograd.grad(fast(x).sum(), x)[0], 2 * x.exp())


def test_an_edit_that_does_not_compile_changes_nothing(tmp_path):
    model = torch.nn.Linear(3, 1)
    step = tessera.train_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 3)
    step(x)
    with pytest.raises(CaptureError, match="depends on no parameter"):
        edited(step, "captured", tmp_path, lambda text: text.replace("return (mean,)", "return (mean.detach(),)"))
    want = model(x).square().mean()
    torch.testing.assert_close(step(x), want)
    edited(step, "captured", tmp_path, lambda text: text.replace("return (mean,)", "return (mean * 3,)"))
    want = model(x).square().mean() * 3
    torch.testing.assert_close(step(x), want)


def test_edits_of_outputs_that_share_memory(tmp_path):
    """What was a view of an input or of a result is one as long as the edited program says so."""

    def f(x, c):
        y = x.exp()
        return x.t(), y, y[0], c.add_(1)

    fast = tessera.jit(f, strict=True)
    x, c = torch.randn(3, 3), torch.zeros(3)
    fast(x, c)
    edited(fast, "captured", tmp_path, lambda text: text.replace("aten.exp(", "aten.sin("))
    seen, y, row, written = fast(x, c)
    assert seen.data_ptr() == x.data_ptr() and row.data_ptr() == y.data_ptr() and written is c
    torch.testing.assert_close(y, x.sin())
    edited(fast, "captured", tmp_path, lambda text: text.replace("return (t, sin,", "return (aten.neg(t), sin,"))
    seen, y, row, written = fast(x, c)
    torch.testing.assert_close(seen, -x.t())
    assert row.data_ptr() == y.data_ptr() and written is c and torch.equal(c, torch.full((3,), 3.0))


def test_edits_that_join_and_part_outputs(tmp_path):
    x = torch.randn(3)
    fast = tessera.jit(lambda x: (x.sin(), x.cos()), strict=True)
    fast(x)
    edited(fast, "captured", tmp_path, lambda text: text.replace("return (sin, cos)", "return (sin, sin)"))
    torch.testing.assert_close(fast(x), (x.sin(), x.sin()))
    edited(fast, "captured", tmp_path, lambda text: text.replace("return (sin, sin)", "return (sin, sin + 1)"))
    torch.testing.assert_close(fast(x), (x.sin(), x.sin() + 1))


@pytest.mark.parametrize("stage", ["captured", "dce", "forward", "backward"])
def test_edits_of_programs_that_give_numbers(stage, tmp_path):
    fast = tessera.jit(lambda x: (x.sum(0) * x.shape[0], x.shape[0] * 2, x.shape[1]), dynamic=True, strict=True)
    fast(torch.randn(4, 3, requires_grad=True))
    edited(fast, stage, tmp_path, lambda text: text)
    x = torch.randn(6, 5, requires_grad=True)
    out, *numbers = fast(x)
    assert numbers == [12, 5]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.full((6, 5), 6.0))


class OddNames(torch.nn.Module):
    """Parameters called what a program calls what it finds around it."""

    def __init__(self):
        super().__init__()
        for name in ("math", "lambda", "torch", "tessera", "größe", "_", "_given", "aten_add", "tile", "slice"):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(4)))

    def forward(self, x):
        for p in self._parameters.values():
            x = (x + p).sin()
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), x.max(1)[0]


def test_parameters_with_odd_names(tmp_path):
    model, x = OddNames(), torch.randn(3, 4)
    fast = tessera.jit(model, strict=True)
    fast(x)[1].sum().backward()
    for stage in ("captured", "forward", "backward"):
        edited(fast, stage, tmp_path, lambda text: text)
    torch.testing.assert_close(fast(x), model(x))
    fast(x)[1].sum().backward()


@pytest.mark.parametrize("mark", [False, True])
def test_claimed_stages_run_by_themselves(mark, tmp_path):
    """What executors run stands in the file as the operators it is, in place writes too."""

    def f(q, tile, cache):
        cache.add_(tile.sin()).mul_(2)
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return (h.softmax(-1) * tile).exp()

    fast = tessera.jit(f, strict=True, executors=["sdpa", "tile", "aten"], dynamic=mark)
    q, tile = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    fast(q, tile, torch.ones(1, 2, 8, 4))
    cache = torch.ones(1, 2, 8, 4)
    want = f(q, tile, cache)
    ran = 0
    for stage in tessera.stages(fast):
        path = str(tmp_path / "stage.py")
        stage.save(path)
        tensors = {"q": q, "tile": tile, "cache": torch.ones(1, 2, 8, 4)}
        names = [v.name for v in stage.trace.inputs]  # a size is x_size_0
        given = [tensors[name] if name in tensors else q.shape[int(name[-1])] for name in names]
        (out,) = run_file(path, "f_0")(*given)[:1]
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(tensors["cache"], cache)
        with open(path) as file:
            ran += "class tile_:" in file.read()
    assert ran >= 3


def test_dump_writes_every_stage(tmp_path):
    with tessera.override(dump=str(tmp_path)):
        tessera.jit(lambda x: x.sin(), strict=True)(torch.ones(2, requires_grad=True))
    files = sorted(f for f in os.listdir(tmp_path / "lambda_0") if f.endswith(".py"))
    assert files[0] == "01_captured.py" and any(f.endswith("_backward.py") for f in files)
    assert all("def lambda_0" in (tmp_path / "lambda_0" / f).read_text() for f in files)


def test_dump_holds_tile_programs_and_kernels(tmp_path):
    with tessera.override(dump=str(tmp_path)):
        tessera.jit(lambda x: x.sin().softmax(-1), strict=True, executors=["tile", "aten"])(torch.ones(2, 8))
    (tile,) = (tmp_path / "lambda_0").glob("*_claim_region_0.mlir")
    (kernel,) = kernels(parse(tile.read_text(), str(tile)))
    out = torch.zeros(16)
    interp.run(kernel, [torch.ones(16), out], [])
    torch.testing.assert_close(out, torch.full((16,), 1 / 8))
    llvmlite.binding.parse_assembly(tile.with_suffix(".ll").read_text()).verify()


def test_explain_tells_who_runs_what_and_what_is_saved():
    fast = tessera.jit(lambda x, w: F.scaled_dot_product_attention(x @ w, x, x), strict=True)
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with torch.no_grad():
        fast(x, torch.randn(4, 4))
    told = tessera.explain(fast)
    assert any("sdpa" in line for line in told.graphs[0].executors)
    assert "aten.matmul" in str(told)
    fast(x, torch.randn(4, 4))
    graph = tessera.explain(fast).graphs[1]
    assert graph.saved_bytes > 0 and graph.recompile_reason
    assert "saves" in str(tessera.explain(fast))


def test_explain_measures_what_it_predicts():
    fast = tessera.jit(lambda x, w: (x @ w).relu().sum(), strict=True)
    fast(torch.randn(8, 16), torch.randn(16, 32, requires_grad=True))
    state = torch.get_rng_state()
    (graph,) = tessera.explain(fast, measure=True).graphs
    assert torch.equal(torch.get_rng_state(), state)
    forward, backward = graph.memory
    for program in graph.memory:
        assert program.measured is not None, program.note
        assert len(program.measured.during) == len(program.equations)
        # the allocator rounds nothing on a CPU: kernels may only add memory of their own
        assert program.measured.peak >= program.predicted.peak > 0
        assert program.measured.after == program.predicted.after
    assert forward.predicted.peak >= 8 * 32 * 4 and "test_inspection.py" in forward.predicted.at
    assert backward.program == "backward"


def test_explain_tells_guards_inputs_and_calls():
    fast = tessera.jit(model, strict=True, executors=["sdpa", "aten"])
    fast(torch.randn(3, 4), torch.randn(4, 4))
    fast(torch.randn(5, 4), torch.randn(4, 4))
    first, second = tessera.explain(fast).graphs
    assert first.inputs == ("x: f32[3, 4]", "w: f32[4, 4]")
    assert "x: float32[3, 4]" in first.guards and "x: float32[any, 4]" in second.guards
    assert second.called_at.endswith(f":{test_explain_tells_guards_inputs_and_calls.__code__.co_firstlineno + 3}")
    assert second.recompile_change == "3 → 5" and "mark_dynamic(tensor, 0)" in second.recompile_advice
    assert "no executor that fuses" in first.unfused[0].reason
    assert json.loads(json.dumps(tessera.explain(fast).to_dict()))["recompiles"] == 1


def test_explanation_renders_in_a_terminal():
    fast = tessera.jit(lambda x: x.sin().cos(), executors=["tile", "aten"], strict=True)
    fast(torch.randn(8))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tessera.explain(fast))
    shown = console.export_text()
    assert "1 graph, 0 graph breaks, 0 recompiles" in shown and "tile fused" in shown and "f32[8]" in shown


def item(x):
    return (x + 1) * (x + 1).sum().item()


def branch(x):
    y = x + 1
    if y.sum() > 0:
        return y * 2
    return y


def asked(x):
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


@torch.compiler.disable
def hidden(x):
    return x


def disabled(x):
    return hidden(x + 1) * 2


logger = logging.getLogger(__name__)


class Logs:
    @property
    def scale(self):
        logger.warning("the scale is two")
        return 2.0


logs = Logs()


def logged(x):
    """What Dynamo cannot follow lies in a property: it goes back to a line before."""
    y = (x + 1).sin()
    z = y * logs.scale
    return z + y


@pytest.mark.parametrize(
    "fn, advice",
    [
        (logged, "ignore_logging_functions"),
        (item, "capture_scalar_outputs"),
        (branch, "torch.where"),
        (asked, "graph_break()"),
        (disabled, "excluded"),
    ],
)
def test_breaks_come_with_a_line_and_advice(fn, advice):
    fast = tessera.jit(fn)
    fast(torch.ones(3))
    (broken,) = tessera.explain(fast).breaks
    assert "test_inspection.py:" in broken.break_line and advice in broken.break_advice


def test_a_function_that_dynamo_gives_up_on_says_why():
    def twice(x):
        with open(os.devnull) as empty:
            return x * 2 if empty.readable() else x

    fast = tessera.jit(twice)
    for _ in range(2):
        torch.testing.assert_close(fast(torch.ones(3)), torch.full((3,), 2.0))
    told = tessera.explain(fast)
    (broken,) = told.breaks
    assert broken.break_reason and broken.break_advice and "nothing that it could compile" in str(told)
    plain = tessera.jit(lambda x: x)
    assert plain(torch.ones(3)).sum() == 3 and not tessera.explain(plain).graphs


def test_advice_knows_its_sentences():
    assert for_break("nobody has seen this\n  Hint: do that.\n  Hint: Please report an issue.") == "do that."
    assert "eval()" in for_recompile("0/0: self.training == True")
    assert "one program serves every value" in for_recompile("0/0: n == 0")
    assert changed("0/1: tensor 'x' size mismatch at index 0. expected 4, actual 6") == (
        "tensor 'x' size mismatch at index 0. expected 4, actual 6",
        "4 → 6",
    )


def test_advice_looks_at_the_guard_alone():
    """The line that Dynamo quotes behind it is the user's, and may hold any word."""
    told = for_recompile("0/0: n == 'a'      # return x * len(n) if training else x[keys]  # f.py:3 in f")
    assert "number or string" in told


def test_calls_beyond_the_limit_are_named():
    with torch._dynamo.config.patch(recompile_limit=3):
        fast = tessera.jit(lambda x, name: x * len(name), executors="aten")
        for i in range(5):
            fast(torch.ones(3), "a" * (i + 1))
    *compiled, beyond = tessera.explain(fast).graphs
    assert len(compiled) == 3 and not any(g.eager_reason for g in compiled)
    assert "at most 3 times" in beyond.eager_reason and "name == 'aaa'" in beyond.recompile_guard
    assert "1 run eagerly" in str(tessera.explain(fast))


def test_a_model_may_have_more_programs_than_torch_compile_allows():
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this PyTorch has one limit for all")
    fast = tessera.jit(lambda x, name: x * len(name), executors="aten")
    for i in range(12):
        fast(torch.ones(3), "a" * (i + 1))
    assert len(tessera.explain(fast).graphs) == 12 and not tessera.explain(fast).eager


def test_a_recompile_is_remembered():
    """Dynamo's own account holds only so many compilations, and numbers them anew after a reset."""
    fast = tessera.jit(lambda x: x * 2, executors="aten")
    fast(torch.ones(3))
    fast(torch.ones(5))
    torch._dynamo.reset()
    other = tessera.jit(lambda x, name: x * len(name), executors="aten")
    for name in ("a", "bb"):
        other(torch.ones(3), name)
    assert [g.recompile_change for g in tessera.explain(fast).graphs] == ["", "3 → 5"]


def test_recompiles_of_a_training_step():
    model = torch.nn.Linear(3, 1)
    step = tessera.train_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters()), executors="aten")
    for rows in (2, 4):
        step(torch.ones(rows, 3))
    first, second = tessera.explain(step).graphs
    assert not first.recompile_reason and second.recompile_change == "2 → 4" and second.guards
    assert "test_inspection.py" in second.called_at
    with torch._dynamo.config.patch(recompile_limit=1):
        step = tessera.train_step(model, lambda m, x, n: m(x).mean() * n, torch.optim.SGD(model.parameters()))
        for name in (True, False):
            step(torch.ones(2, 3), name)
    assert "recompile limit exceeded" in tessera.explain(step).eager[0].eager_reason


def test_names_stay_from_stage_to_stage():
    conv = torch.nn.Conv2d(2, 3, 3)
    fast = tessera.jit(lambda x: conv(conv.weight.new_ones(1, 2, 5, 5) * x).relu(), strict=True)
    fast(torch.randn((), requires_grad=True))
    names = {v.name for v in tessera.stages(fast)["captured"].trace.values()}
    forward = [e.outputs[0].name for e in tessera.stages(fast)["forward"].trace.equations]
    assert "conv2d" in names and "conv2d" in forward


def test_a_trace_calls_its_inputs_as_the_function_does():
    def f(x, weights, *rest, scale):
        return x @ weights["a"] + rest[0] * scale + weights["b"]

    text = str(
        tessera.trace(
            f, torch.ones(2, 2), {"a": torch.ones(2, 2), "b": torch.ones(2)}, torch.ones(2), scale=torch.ones(2)
        )
    )
    assert "def f(x, a, b, x3, scale):" in text
    assert "def forward" not in text and str(tessera.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))).startswith(
        "def Linear(input)"
    )
