"""What somebody meets who tries Tessera for the first time: texts that run, short reprs, errors that say what to do."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import tessera
from tessera.inspection import Stage
from tessera.tools.cli import main as command_line
from tessera.util.errors import EditError, InputError, OptionError


class Deep(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(scope="module")
def deep():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep()
    fast = tessera.jit(model)
    fast(torch.randn(4, 8)).sum().backward()
    return fast


def test_the_text_of_a_stage_runs():
    def f(x, y):
        return torch.where(x > 0, x / y, float("-inf")).exp()

    torch._dynamo.reset()
    fast, given = tessera.jit(f), (torch.randn(3, 4), torch.rand(3, 4) + 1)
    want = fast(*given)
    for stage in tessera.stages(fast):
        scope: dict = {}
        exec(str(stage), scope)
        torch.testing.assert_close(scope[stage.trace.name](*given)[0], want)


def test_a_stage_is_called(deep):
    stage = tessera.stages(deep)["captured"]
    named = dict(deep.named_parameters())
    x = torch.randn(4, 8)
    names = {name.replace(".", "_"): p for name, p in named.items()}
    given = [x if v.name == "x" else names[v.name] for v in stage.trace.inputs]
    torch.testing.assert_close(stage(*given)[0], deep(x))


def test_the_text_of_a_stage_names_what_it_closes_over():
    weight = torch.randn(3)

    def scale(x):
        return x * weight

    x = torch.randn(3)
    want = scale(x)
    stage = Stage("scale", "traced", tessera.trace(scale, x))
    scope: dict = {"constants": stage.constants}
    exec(str(stage), scope)
    torch.testing.assert_close(scope[stage.trace.name](x)[0], want)
    torch.testing.assert_close(stage(x)[0], want)


def test_reprs_are_short(deep):
    found = tessera.stages(deep)
    assert len(repr(found[0])) < 80 and len(repr(found[0].trace)) < 80
    assert len(repr(found)) < 100 * len(found)
    told = tessera.explain(deep)
    assert repr(told) == str(told)
    (graph,) = told.graphs
    assert all(len(repr(part)) < 160 for part in (graph, *graph.regions, *graph.unfused))
    assert "<pre" in tessera.explain(deep)._repr_html_()
    shown = tessera.report(deep)
    assert len(repr(shown)) < 200 and shown._repr_html_().startswith("<iframe")


def test_equal_layers_are_told_once(deep):
    few, many = Deep(2), Deep(12)
    torch._dynamo.reset()
    lengths = []
    for model in (few, many):
        fast = tessera.jit(model, executors=["aten"])
        fast(torch.randn(4, 8)).sum().backward()
        lengths.append(len(str(tessera.explain(fast)).splitlines()))
    assert lengths[1] <= lengths[0] + 2


def test_graphs_that_are_alike_are_told_once():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    torch._dynamo.reset()
    fast = tessera.jit(Counts())
    for _ in range(10):
        fast(torch.ones(3))
    told = tessera.explain(fast)
    assert len(told.graphs) <= 4 and not told.eager  # from the second change on the number is dynamic
    assert len(str(told)) < 4000
    assert str(told).count("to do:") <= 2


MISTAKES = {
    "name": ("aten.sin(x)", "aten.sin(missing)", r"4: expected a name .* got 'missing'"),
    "operator": ("aten.sin(x)", "aten.sinus(x)", r"expected an operator of PyTorch, got aten.sinus"),
    "shape": ("aten.sin(x)", "aten.mm(x, x)", r"\d+: expected arguments that the operator takes"),
    "syntax": ("aten.sin(x)", "aten.sin(x", r"\d+: expected Python"),
    "branch": ("sin = aten.sin(x)", "sin = aten.sin(x) if x.sum() > 0 else x", r"depends on a tensor"),
    "arguments": ("(x)", "(x, more)", r"expected a function of \(x\), got \(x, more\)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_edit_says_what_and_where(mistake, tmp_path):
    torch._dynamo.reset()

    def f(x):
        return x.sin()

    fast = tessera.jit(f)
    fast(torch.ones(3))
    path = tmp_path / "f.py"
    tessera.stages(fast)["captured"].save(str(path))
    before, after, told = MISTAKES[mistake]
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    if mistake == "name":
        told = told.removeprefix("4")
    with pytest.raises(EditError, match=told) as error:
        tessera.edit(fast, str(path))
    assert re.search(r"f\.py(:\d+)?: expected", str(error.value))


def test_an_edit_of_no_file_says_what_is_expected(tmp_path):
    fast = tessera.jit(lambda x: x.sin())
    fast(torch.ones(3))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path, why in (("captured", "No such file"), (tmp_path, "directory"), (tmp_path / "bytes", "decode")):
        with pytest.raises(EditError, match=f"{re.escape(str(path))}: expected a file .* wrote: .*{why}"):
            tessera.edit(fast, path)


def test_outputs_that_cannot_be_written_are_found_first(tmp_path):
    calls = []

    def f(x):
        calls.append(1)
        return x + 1

    fast = tessera.jit(f)
    for path in (tmp_path, tmp_path / "missing" / "report.html"):
        with pytest.raises(OptionError, match=re.escape(str(path))):
            tessera.report(fast, path, args=(torch.ones(2),))
    assert not calls


def test_a_report_is_measured_with_keywords_alone(tmp_path):
    torch._dynamo.reset()
    fast = tessera.jit(lambda x: x.sin())
    tessera.report(fast, tmp_path / "report.html", kwargs={"x": torch.ones(3)}, steps=1)
    assert (tmp_path / "report.html").stat().st_size > 1000


NEW_PROCESS = """
import os, sys, torch
before = set(sys.modules)
import tessera
print(sorted(set(sys.modules) - before))
assert 'jit' in dir(tessera)

import tessera.api
from torch._dynamo.variables import builder
plain = builder.make_dupe_guard
assert not hasattr(plain, "__wrapped__")
for ask in (lambda: torch.compile(torch.sin, backend="tessera"), lambda: tessera.jit(torch.sin)):
    if not os.fork():
        ask()
        os._exit(builder.make_dupe_guard.__wrapped__ is not plain)
    assert os.wait()[1] == 0

fast = tessera.jit(lambda x: (x * 2 + 1).exp())
fast(torch.ones(100))
print([r.operators for g in tessera.explain(fast).graphs for r in g.regions if r.fused])
"""


def test_a_new_process_loads_nothing_until_something_is_used_and_then_all_that_is_needed():
    """Rules that fill tables must be loaded by whoever reads the tables: without them nothing is fused. Dynamo is left
    alone until something is to be compiled; the guard for tensors of two names (test_same_tensor.py) is there before
    the first frame is traced, however that is asked for."""
    run = subprocess.run([sys.executable, "-c", NEW_PROCESS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "['tessera', 'tessera.util', 'tessera.util.version']",
        "[('aten.mul', 'aten.add', 'aten.exp')]",
    ]


def test_a_call_is_told_by_the_users_line(deep):
    (graph,) = tessera.explain(deep).graphs
    assert graph.called_at.rpartition(":")[0].endswith("test_front_door.py")


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(tessera, "compile") and not hasattr(tessera, "_nothing")
    assert {"jit", "profile", "ops"} <= set(dir(tessera))


def test_options_that_make_no_sense_are_named():
    model = nn.Linear(2, 2)
    mistakes = {
        "executors": lambda: tessera.jit(model, executors=[None]),
        "executors: expected a list": lambda: tessera.jit(model, executors=3),
        "claims": lambda: tessera.register_executor("nonsense", torch.sin),
        "dynamic": lambda: tessera.jit(model, dynamic="yes"),
        "strict": lambda: tessera.jit(model, strict="yes"),
        "name: expected a name": lambda: tessera.register_executor(3, {}),
        "memory_budget: expected a size": lambda: tessera.jit(model, memory_budget="eight"),
        "optimizer: expected": lambda: tessera.train_step(model, None, None),
        "args: expected a tuple": lambda: tessera.export(model, torch.ones(2), "model.tess"),
    }
    for told, mistake in mistakes.items():
        with pytest.raises(OptionError, match=told):
            mistake()
    with pytest.raises(InputError, match="got a set"):
        tessera.jit(lambda x, names: x, frontend="functional")(torch.ones(2), {1, 2})


@pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("given", ["x", 0, -1.0, None.__class__])
def test_limits_of_gradients_are_numbers(option, given):
    model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=f"{option}: expected a number above 0"):
        tessera.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), **{option: given})


def test_an_optimizer_of_another_model_is_noticed():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="owns no parameter of Linear"):
        tessera.train_step(model, None, torch.optim.SGD(other.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tessera.train_step(model, None, torch.optim.SGD([model.bias], lr=0.1))


def test_a_slice_to_the_end_is_printed_without_one():
    def f(x):
        x = x.clone()
        x[1::2] = x[:-1:2] * 2
        return x[2:], x[:, 1::2]

    given = torch.randn(4, 6)
    stage = Stage("f", "traced", tessera.trace(f, given))
    assert "92233720" not in str(stage) and re.search(r"aten\.slice\(\w+, 0, 2\)", str(stage))
    for ours, eager in zip(stage(given), f(given), strict=True):
        torch.testing.assert_close(ours, eager)


def test_the_command_line_says_how_a_function_is_named(capsys):
    with pytest.raises(SystemExit):
        command_line(["trace", "--help"])
    assert "script.py:function" in capsys.readouterr().out


def logged_by(logger: str, run: Callable[[], object]) -> str:
    """PyTorch's loggers have handlers of their own and hand nothing on."""
    text = io.StringIO()
    handler, log = logging.StreamHandler(text), logging.getLogger(logger)
    log.addHandler(handler)
    try:
        run()
    finally:
        log.removeHandler(handler)
    return text.getvalue()


def test_shapes_that_do_not_fit_are_told_as_eager_tells_them():
    """Without a log of fake tensors before, and without Dynamo's error, of which it would be told as another."""

    def run() -> None:
        for model in (nn.Linear(3, 3), nn.Linear(3, 3).forward):
            torch._dynamo.reset()
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as error:
                tessera.jit(model)(torch.ones(2, 4))
            assert error.value.__context__ is None

    assert not logged_by("torch._subclasses.fake_tensor", run)


def test_shapes_that_do_not_fit_in_a_transform_or_an_edit_are_not_logged(tmp_path):
    torch._dynamo.reset()
    fast, path = tessera.jit(lambda x: x.sin()), tmp_path / "f.py"
    fast(torch.ones(2, 3))
    tessera.stages(fast)["captured"].save(str(path))
    path.write_text(path.read_text().replace("aten.sin(x)", "aten.mm(x, x)"))

    def run() -> None:
        with pytest.raises(EditError, match="expected arguments that the operator takes"):
            tessera.edit(fast, str(path))
        with pytest.raises(RuntimeError, match="mat1 and mat2|size mismatch|reduction dim"):
            tessera.grad(lambda x: (x @ x).sum())(torch.ones(2, 4))

    assert not logged_by("torch._subclasses.fake_tensor", run)


@pytest.mark.parametrize("how", ["jit", "train_step"])
def test_an_end_of_a_graph_is_told_by_explain_and_not_by_a_log_before(how: str) -> None:
    """Other backends have no `explain`: for them Dynamo's log stays."""
    tensors = torch._dynamo.variables.TensorVariable
    model, x = nn.Linear(3, 3), torch.ones(2, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * x.sum().item()

    def ours() -> None:
        if how == "jit":
            fast = tessera.jit(f)
            fast(x)
            assert "Tensor.item()" in str(tessera.explain(fast))
        else:
            tessera.train_step(model, lambda model, x: f(x), torch.optim.SGD(model.parameters()))(x)

    def theirs() -> None:
        torch.compile(f, backend="eager")(x)

    for run in (theirs, ours):
        torch._dynamo.reset()
        tensors._warn_capture_scalar_outputs.cache_clear()  # Dynamo says it once in a process
        assert ("Tensor.item()" in logged_by(tensors.__module__, run)) == (run is theirs)
