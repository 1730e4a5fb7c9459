"""The battery: outcomes of every kind, what may differ from eager and what may not, and a small run of it."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from battery_sections import cases
from torch import nn

import tessera
from tessera.tools.battery import compare, language, layouts, models, modes, operators, tests
from tessera.tools.battery.case import Missing, Outcome, Skip, Wrong
from tessera.tools.battery.command import chosen, main, parser, shard, without_time
from tessera.tools.battery.compare import check, same_strides
from tessera.tools.battery.copies import copied
from tessera.tools.battery.pool import Pool
from tessera.tools.battery.program import Program, check_program
from tessera.tools.battery.sections import QUICK, SECTIONS
from tessera.tools.battery.table import bad, counted, facts, line, table
from tessera.tools.cli import main as command_line
from tessera.tools.command import console
from tessera.util.errors import OptionError


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the sections of these tests."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("PYTHONPATH", path)


def test_outcomes_of_every_kind(here: None) -> None:
    outcomes = Pool(cases("cpu"), "cpu", jobs=1, seconds=300, sections="battery_sections").run()
    found = {o.case: (o.status, o.why) for o in outcomes if o.part in ("second", "")}
    assert found["right"] == ("pass", "") and found["wrong"] == ("wrong", "expected 1, got 2")
    assert found["nothing"] == ("skipped", "eager refuses it too")
    assert found["failing"] == ("error", "ValueError: no such thing | here")
    assert found["hanging"][0] == "timeout" and found["crashing"][0] == "error" and "code" in found["crashing"][1]
    assert found["broken"][0] == "error"  # its worker went, and another did what was left
    counts = Counter(o.case for o in outcomes if o.status == "pass")
    assert counts == {"right": 3, "wrong": 2, "nothing": 2, "failing": 2, "hanging": 1, "crashing": 1, "broken": 1}
    assert [o.status for o in bad(outcomes)] == ["wrong", "error", "error", "error", "timeout"]


def test_what_does_not_fit_is_said(here: None) -> None:
    outcomes = Pool(cases("cpu"), "cpu", jobs=1, seconds=0, sections="battery_sections").run()
    assert counted(outcomes) == {"trial": {"not run": 7}} and not bad(outcomes)


def test_the_rest_of_an_earlier_run(tmp_path: Path) -> None:
    file, seen = tmp_path / "first.json", [("a", "x", "pass"), ("a", "y", "not run"), ("b", "x", "not run")]
    outcomes = [Outcome(section, case, "", status) for section, case, status in seen]
    file.write_text(json.dumps(facts(outcomes, [], "cpu", "here", 1.0)))
    assert without_time(file) == {("a", "y"), ("b", "x")}
    known, more = [("layouts", case.name) for case in SECTIONS["layouts"].cases("cpu")[:9]], ["--sections", "layouts"]
    outcomes = [Outcome(*key, "", "pass" if i % 3 else "not run") for i, key in enumerate(known)]
    file.write_text(json.dumps(facts(outcomes, [], "cpu", "here", 1.0)))
    cases, _ = chosen(parser().parse_args([*more, "--rest", str(file)]), "cpu")
    assert [(case.section, case.name) for case in cases] == known[::3]
    for text in ("{", "[]", '{"outcomes": 3}'):
        file.write_text(text)
        with pytest.raises(OptionError, match="--rest: expected what --json wrote"):
            without_time(file)


def test_table_and_json() -> None:
    outcomes = [Outcome("a", "x", "p", "pass", "", 2.0), Outcome("a", "x", "q", "wrong", "off by 3", 1.0)]
    out = console()
    with out.capture() as shown:
        out.print(table(outcomes))
    assert "section" in shown.get() and "wrong" in shown.get()
    assert line(outcomes[1]) == "wrong a/x/q: off by 3"
    told = facts(outcomes, ["timm is not installed"], "cpu", "here", 3.0)
    assert not told["ok"] and told["sections"] == {"a": {"pass": 1, "wrong": 1}}
    assert json.loads(json.dumps(told)) == told


def test_results_are_compared() -> None:
    x = torch.randn(64, 64)
    check("same", x, x.clone())
    exact = lambda: [x.double()]  # noqa: E731
    check("as good as eager", x + 3e-4, x - 3e-4, exact)
    for other, message in (
        (x + 3e-4, "from float64"),
        (x.double(), "dtype"),
        (x[:3], "shape"),
        (x.clone().requires_grad_(), "requires_grad"),
        (3, "expected a tensor"),
        ([x, x], "expected 1 results, got 2"),
        (torch.where(x > 2, torch.nan, x), "from float64"),
    ):
        with pytest.raises(Wrong, match=message):
            check("other", other, x, exact)
    with pytest.raises(Wrong, match="2 of 3 elements differ"):
        check("whole numbers", torch.tensor([1, 2, 3]), torch.tensor([1, 3, 4]))
    with pytest.raises(Wrong, match="strides"):
        same_strides("result", x.t(), x)


def test_copies_keep_strides_and_what_is_shared() -> None:
    base = torch.randn(4, 6)
    given = (
        base[:, ::2].t(),
        base[1],
        torch.randn(3, requires_grad=True),
        torch.randn(2, dtype=torch.complex64).conj(),
    )
    made = copied(given)
    for a, b in zip(made, given, strict=True):
        assert a.stride() == b.stride() and a.requires_grad == b.requires_grad and torch.equal(a, b)
        assert a.is_conj() == b.is_conj() and a.data_ptr() != b.data_ptr()
    assert made[0].untyped_storage().data_ptr() == made[1].untyped_storage().data_ptr()
    assert copied(given, torch.float64)[2].dtype == torch.float64


def test_a_program_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    program = Program(lambda x: F.softmax(x, -1), (x,), backward=True)
    check_program(program)
    for other, message in (
        (lambda x: F.softmax(x * 1.01, -1), "result"),
        (lambda x: F.softmax(x, -1) + 0 * x.detach().cos() + (x * 0.1 - (x * 0.1).detach()), "gradient"),
        (lambda x: F.softmax(x.detach(), -1), "requires grad"),
        (lambda x: F.softmax(x, -1).t().contiguous().t(), "strides"),
    ):
        monkeypatch.setattr(tessera, "jit", lambda fn, other=other, **_: other)
        with pytest.raises(Wrong, match=message):
            check_program(program)
    with pytest.raises(Skip, match="eager"):
        check_program(Program(lambda x: x.nothing(), (x,)))


def test_a_result_that_is_never_written_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a random state that no dropout asks for only the form is compared, and all of the rest."""
    x, calls = torch.randn(3, 4), itertools.count()

    def with_state(x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x * factor, torch.tensor(next(calls))

    program = Program(with_state, (x,), unwritten=operators._unwritten("torch.ops.aten._flash_attention_forward"))
    monkeypatch.setattr(tessera, "jit", lambda fn, **_: fn)
    check_program(program)
    monkeypatch.setattr(tessera, "jit", lambda fn, **_: lambda x: with_state(x, 1.1))
    with pytest.raises(Wrong, match="result"):
        check_program(program)


def test_sections_name_their_cases() -> None:
    for name, section in SECTIONS.items():
        if name == "tests":
            with pytest.raises(Missing, match="need a GPU"):
                section.cases("cpu")
            continue
        named = [case.name for case in section.cases("cpu")]
        assert len(named) == len(set(named)) and len(named) > 20
        assert all(pattern in named for pattern in QUICK.get(name, ()))
    assert len(language.MODELS) >= 50 and len(operators.cases("cpu")) > 1000
    assert {"train_step adamw", "offload host", "cuda graph of a model"} <= set(modes.MODES)
    assert any("turned" in case.name for case in layouts.cases("cpu"))


def test_rounding_where_float64_cannot_decide() -> None:
    want = torch.tensor([2.9, 0.1], dtype=torch.bfloat16)
    assert compare.rounds_alike(want + 0.0156, want) and not compare.rounds_alike(want + 0.1, want)
    assert not compare.rounds_alike(want.float() + 1e-6, want.float())


def test_an_activation_at_a_kink() -> None:
    """Rounding decides whether a gradient goes through a ReLU at zero: the reference shows both answers."""

    class Kinked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            at_zero = x * self.weight - torch.tensor([1.0, 0.5], device=x.device, dtype=x.dtype)
            return (at_zero.relu() + self.weight).sum()

    def build() -> tuple[nn.Module, tuple, dict]:
        return Kinked(), (torch.ones(2),), {}

    model, args, kwargs = models.prepared(build, True)
    rounded = models.rounded_answers(model, args, kwargs, "cpu", torch.float32, True)
    exact, eager = (
        models.answer(*models.placed(model, args, kwargs, "cpu", dtype), training=True)
        for dtype in (torch.float64, torch.float32)
    )
    truth = exact.gradients["weight"]
    other = max((answer.gradients["weight"] for answer in rounded), key=lambda g: compare.distance(g, truth))
    assert compare.distance(other, truth) > 0.1
    reference = models.Reference(eager, exact, torch.float32, lambda: rounded)
    through = models.Answer(eager.results, {"weight": other.float()}, {})
    models.compare(through, reference, 0)
    wrong = models.Answer(eager.results, {"weight": 3 * other.float()}, {})
    with pytest.raises(Wrong, match="rounding up to"):
        models.compare(wrong, reference, 0)


def test_reports_of_pytest() -> None:
    from xml.etree.ElementTree import fromstring

    def of(inner: str) -> tuple:
        return tests.outcome(fromstring(f"<testcase classname='tests.a' name='b' time='1.5'>{inner}</testcase>"))

    assert of("") == ("tests.a::b", "pass", "", 1.5, "")
    assert of("<failure message='assert 1 == 2'>E</failure>")[1::3] == ("wrong", "E")
    assert of("<error message='fixture'/>")[1] == "error" and of("<skipped message='no'/>")[1:3] == ("skipped", "no")
    assert of("<error>No module named 'hypothesis'</error>")[1:3] == ("skipped", "hypothesis is not installed")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert shard("1/3") == (1, 3) and parser().parse_args([]).device is None
    with pytest.raises(OptionError, match="I below N"):
        shard("3/3")
    assert command_line(["check", "--battery", "--device", "cpu", "--sections", "nonsense"]) == 2
    assert "unknown 'nonsense'" in capsys.readouterr().err
    assert main(["--device", "cpu", "--list", "--sections", "modes", "--only", "train_step *"]) == 0
    assert "modes train_step adamw" in capsys.readouterr().out


# Of every section, what takes a moment.
FEW = ("softmax bf*", "index_put f*", "*layer_norm", "attention*", "loss*", "llama", "train*", "vmap*", "real*")


@pytest.mark.parametrize("only", [FEW, pytest.param(("*",), marks=pytest.mark.sweep)], ids=["few", "all"])
def test_a_small_run(only: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few cases of every section on the CPU, each kernel held to its types: nothing is wrong."""
    file = tmp_path / "battery.json"
    code = main(["--device", "cpu", "--quick", "--only", *only, "--jobs", "1", "--json", str(file)])
    told = json.loads(file.read_text())
    assert code == 0 and told["ok"], capsys.readouterr().out
    assert set(told["sections"]) == set(QUICK) and all(not s.get("not run") for s in told["sections"].values())
